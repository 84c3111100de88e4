"""Wear: what is made of the programs' answers, and that every failure of theirs is a reason.

Covers both programs by scripts on PATH, sysfs by a small tree, and the arithmetic of days. Does not cover real disks.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from io_backend import wear as module
from io_backend.devices import Device
from io_backend.wear import Wear, read_wear

NVME = Device("nvme0n1", kind="nvme")
SATA = Device("sda", kind="scsi")
TB = 10**12


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is all of PATH, but for the shell that the scripts in it need."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    real = module.shutil.which
    monkeypatch.setattr(module.shutil, "which", lambda name, path=None: real(name) if path is None else None)
    return folder


def install(folder: Path, name: str, *, prints: object = None, says: str = "", code: int = 0, first: str = "") -> None:
    text = prints if isinstance(prints, str) else json.dumps(prints)
    (folder / f"{name}.out").write_text(text)
    script = folder / name
    script.write_text(
        f"#!/bin/sh\n{first}\nprintf '%s' \"$*\" > {folder}/{name}.args\n"
        f'while IFS= read -r line || [ -n "$line" ]; do printf \'%s\\n\' "$line"; done < {folder}/{name}.out\n'
        f'echo "{says}" >&2\nexit {code}\n'
    )
    script.chmod(0o755)


@pytest.mark.parametrize(
    "log",
    [
        {"percent_used": 3, "data_units_written": 20_000_000},
        {"percentage_used": 3, "data_units_written": "20,000,000"},
    ],
)
def test_nvme(programs: Path, log: dict[str, object]) -> None:
    install(programs, "nvme", prints=log)
    wear = read_wear(NVME)
    assert (wear.percentage_used, wear.written_nbytes, wear.reason) == (3.0, 20_000_000 * 512_000, "")
    assert wear.source == "nvme smart-log"
    assert (programs / "nvme.args").read_text() == "smart-log /dev/nvme0n1 -o json"


def test_smartctl_after_nvme_was_not_permitted(programs: Path) -> None:
    install(programs, "nvme", prints="", says="/dev/nvme0n1: Permission denied", code=1)
    log = {"nvme_smart_health_information_log": {"percentage_used": 0, "data_units_written": 5}}
    install(programs, "smartctl", prints=log, code=64)  # old errors in the log: the answer is good
    wear = read_wear(NVME)
    assert (wear.percentage_used, wear.written_nbytes, wear.source) == (0.0, 2_560_000, "smartctl")


def test_sata(programs: Path) -> None:
    install(programs, "smartctl", prints={"endurance_used": {"current_percent": 12}})
    assert read_wear(SATA) == Wear(device="sda", percentage_used=12.0, source="smartctl")


@pytest.mark.parametrize(
    ("prints", "says", "code", "expected"),
    [
        ("", "Permission denied", 1, "Permission denied"),
        ("not json", "", 0, "no JSON"),
        ([], "", 0, "no JSON object"),
        ({}, "", 0, "says nothing"),
        ({"endurance_used": 5}, "", 0, "says nothing"),
        ({"endurance_used": {"current_percent": "many"}}, "", 0, "says nothing"),
        ({"smartctl": {"messages": [{"string": "open failed: Permission denied"}]}}, "", 2, "open failed"),
        ({"nvme_smart_health_information_log": {"percentage_used": None}}, "", 0, "neither"),
        ({"error": "no such device"}, "", 1, "no such device"),
    ],
)
def test_answers_that_say_nothing(programs: Path, prints: object, says: str, code: int, expected: str) -> None:
    install(programs, "smartctl", prints=prints, says=says, code=code)
    wear = read_wear(SATA)
    assert (wear.percentage_used, wear.written_nbytes) == (None, None)
    assert expected in wear.reason


def test_no_programs(programs: Path) -> None:
    reason = read_wear(NVME).reason
    assert "nvme is not installed" in reason
    assert "smartctl is not installed" in reason


def test_a_program_that_hangs(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TIMEOUT_S", 0.1)
    install(programs, "smartctl", first="read nothing < /dev/zero")
    assert "did not answer" in read_wear(SATA).reason


def test_a_file_that_cannot_be_run(programs: Path) -> None:
    (programs / "smartctl").write_bytes(b"\x7fELF nonsense")
    (programs / "smartctl").chmod(0o755)
    assert "cannot be run" in read_wear(SATA).reason


@pytest.mark.parametrize("device", [Device("vda", kind="virtio"), Device("loop0", kind="loop"), Device("zram0")])
def test_virtual_disks_are_not_asked(programs: Path, device: Device) -> None:
    install(programs, "smartctl", prints={})
    assert "virtual" in read_wear(device).reason
    assert not (programs / "smartctl.args").exists()


@pytest.mark.parametrize(
    ("text", "percentage"), [("0x01 0x02\n", 20.0), ("0x0b 0x00", 110.0), ("0x00 0x00", None), ("", None), ("x", None)]
)
def test_mmc(programs: Path, tmp_path: Path, text: str, percentage: float | None) -> None:
    (tmp_path / "device").mkdir()
    (tmp_path / "device" / "life_time").write_text(text)
    wear = read_wear(Device("mmcblk0", kind="mmc", sysfs=tmp_path))
    assert wear.percentage_used == percentage
    assert bool(wear.reason) == (percentage is None)


@pytest.mark.parametrize(
    ("wear", "days", "reason"),
    [
        (Wear(device="d", rated_nbytes=600 * TB, written_nbytes=100 * TB), 500, "rated"),
        (Wear(device="d", rated_nbytes=600 * TB, written_nbytes=900 * TB), 0, "rated"),
        (Wear(device="d", rated_nbytes=600 * TB, percentage_used=50), 300, "rated"),
        (Wear(device="d", percentage_used=10, written_nbytes=60 * TB), 540, "estimated"),
        (Wear(device="d", percentage_used=104, written_nbytes=60 * TB), 0, "over"),
        (Wear(device="d", percentage_used=0, written_nbytes=60 * TB), None, "too early"),
        (Wear(device="d", percentage_used=5), None, "how much was written"),
        (Wear(device="d", written_nbytes=5), None, "how much of its life"),
        (Wear(device="d", reason="it is a virtual disk"), None, "virtual"),
    ],
)
def test_days_left(wear: Wear, days: float | None, reason: str) -> None:
    left = wear.days_left(1 * TB)
    assert left.days == (None if days is None else pytest.approx(days))
    assert reason in left.reason


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 0"):
        Wear(device="d").days_left(0)
