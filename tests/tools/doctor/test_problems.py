"""The rules of ``teraio doctor`` over facts made up, and the tables that show them."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from io_backend import DeviceCalibration, Ledger
from io_backend.devices import Device
from io_backend.mounts import Mount
from io_backend.wear import Wear
from tools.doctor.directory import DirectoryFacts, gds_lacks
from tools.doctor.machine import MachineFacts, examine_machine
from tools.doctor.problems import find_problems
from tools.doctor.render import render, sentence

GIB = 1 << 30
SPEED = DeviceCalibration(
    path="/spill",
    fingerprint="0" * 16,
    device="nvme0n1",
    file_system="ext4",
    transport="posix-direct",
    reason="proved",
    read_bytes_per_s=2.0 * GIB,
    write_bytes_per_s=2.0 * GIB,
    mixed_read_bytes_per_s=1.0 * GIB,
    mixed_write_bytes_per_s=1.0 * GIB,
    mixed_factor=0.5,
    latency_s=1e-4,
    block_nbytes=4096,
    memory_alignment_nbytes=512,
    chunk_nbytes=16 << 20,
    num_threads=1,
    read_cpu_s_per_gb=0.01,
    write_cpu_s_per_gb=0.01,
    read_noise=0.1,
    write_noise=0.1,
    mixed_noise=0.1,
    measured_at="2026-01-01T00:00:00+00:00",
)
MACHINE = MachineFacts(
    kernel="6.8",
    num_cores=8,
    free_nbytes=64 * GIB,
    free_reason="free memory",
    container_free_nbytes=None,
    locked_nbytes=None,
    huge_pages="madvise",
    torch_huge_pages=True,
    kvikio="",
    nvidia_fs="",
)


def facts(**changes: Any) -> DirectoryFacts:
    """A directory without a fault, but for ``changes``."""
    values: dict[str, Any] = {
        "path": "/spill",
        "failure": "",
        "mount": Mount("/", "ext4", "/dev/nvme0n1", ("rw", "data=ordered"), "259:0"),
        "devices": (Device("nvme0n1", "FAST", "S1", 1000 * GIB, "nvme"),),
        "total_nbytes": 1000 * GIB,
        "free_nbytes": 500 * GIB,
        "reserve_nbytes": GIB,
        "quota": "none seen",
        "calibration": SPEED,
        "save_failure": "",
        "ledger": Ledger(),
        "bytes_per_day": 1e12,
        "wear": (Wear(device="nvme0n1", percentage_used=1, written_nbytes=10**13, source="nvme smart-log"),),
        "gds": "",
    }
    return DirectoryFacts(**{**values, **changes})


def test_no_problem_without_a_fault() -> None:
    assert find_problems([facts()], MACHINE) == []


def worn(**changes: Any) -> tuple[Wear, ...]:
    return (Wear(device="nvme0n1", **changes),)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"failure": "no permission", "calibration": None}, "no permission"),
        ({"mount": Mount("/", "overlay", "overlay")}, "container's own layer"),
        ({"free_nbytes": 5 * GIB}, "only 4.00 GiB"),
        ({"free_nbytes": 0}, "only 0 B"),
        ({"devices": (Device("sda", kind="scsi", rotational=True),)}, "rotating"),
        ({"calibration": dataclasses.replace(SPEED, transport="posix-buffered", reason="EINVAL")}, "EINVAL"),
        ({"calibration": dataclasses.replace(SPEED, write_noise=0.9)}, "90%"),
        ({"wear": worn(percentage_used=85, written_nbytes=10**15)}, "85 %"),
        ({"wear": worn(rated_nbytes=10**14, written_nbytes=0)}, "in 100 days"),
        ({"ledger": Ledger(note="ledger.json is damaged")}, "damaged"),
        ({"save_failure": "read-only"}, "read-only"),
    ],
)
def test_each_fault_is_one_problem(changes: dict[str, Any], expected: str) -> None:
    (problem,) = find_problems([facts(**changes)], MACHINE)
    assert problem.where == "/spill"
    assert expected in problem.what
    assert problem.remedy


def test_a_virtual_disk_that_claims_to_rotate_is_believed_to_be_none() -> None:
    assert find_problems([facts(devices=(Device("vda", kind="virtio", rotational=True),))], MACHINE) == []


def test_two_directories_on_one_disk() -> None:
    (problem,) = find_problems([facts(), facts(path="/other")], MACHINE)
    assert problem.where == "/other"
    assert "same disk as /spill" in problem.what
    assert find_problems([facts(), facts(path="/other", devices=(Device("nvme1n1", kind="nvme"),))], MACHINE) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({"huge_pages": "never"}, "huge pages are off"), ({"torch_huge_pages": False}, "THP_MEM_ALLOC_ENABLE")],
)
def test_the_machine(changes: dict[str, Any], expected: str) -> None:
    (problem,) = find_problems([facts()], dataclasses.replace(MACHINE, **changes))
    assert problem.where == "machine"
    assert expected in problem.what


@pytest.mark.parametrize(
    ("mount", "expected"),
    [
        (Mount("/", "xfs"), ""),
        (Mount("/", "ext4", options=("data=ordered",)), ""),
        (Mount("/", "ext4"), "data=ordered"),
        (Mount("/", "btrfs"), "btrfs"),
    ],
)
def test_gds(mount: Mount, expected: str) -> None:
    assert bool(gds_lacks(mount)) == bool(expected)
    assert expected in gds_lacks(mount)


def test_a_made_up_machine_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (
        ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n"),
        ("sys/module/nvidia_fs/version", "2.24\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")
    machine = examine_machine(tmp_path)
    assert (machine.huge_pages, machine.nvidia_fs, machine.torch_huge_pages) == ("never", "2.24", True)
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE")
    machine = examine_machine(tmp_path / "nothing")
    assert (machine.huge_pages, machine.nvidia_fs, machine.torch_huge_pages) == ("", "", False)


def shown(directories: list[DirectoryFacts], machine: MachineFacts = MACHINE) -> str:
    out = io.StringIO()
    render(
        directories,
        machine,
        find_problems(directories, machine),
        Console(file=out, width=200, markup=False, highlight=False),
    )
    return out.getvalue()


def test_what_is_shown() -> None:
    text = shown([facts(ledger=Ledger(3 * GIB, 2 * GIB, "2026-01-02", 7))])
    for expected in (
        "ext4 at /",
        "nvme0n1 (FAST), 1000 GiB",
        "499 GiB usable",
        "half duplex (0.50)",
        "1 % of its rated life used, 10.0 TB written in all (nvme smart-log)",
        "990 days left at 1 TB a day",
        "3.00 GiB written, 2.00 GiB read in 7 sessions since 2026-01-02",
        "the directory can be used",
    ):
        assert expected in text
    assert "warning" not in text


def test_what_is_unknown_is_shown_as_unknown() -> None:
    text = shown([facts(devices=(), wear=worn(reason="it is a virtual disk"), bytes_per_day=None)])
    assert "unknown: it is a virtual disk" in text
    text = shown([facts(bytes_per_day=None)])
    assert "days left unknown: no rate of writing is known" in text


def test_brackets_are_shown_as_they_are() -> None:
    assert "/spill/[bold]x" in shown([facts(path="/spill/[bold]x")])


def test_an_unusable_directory_is_named() -> None:
    text = shown([facts(failure="no permission", calibration=None)])
    assert "cannot be used: /spill" in text
    assert "remedy: name a directory on a local SSD" in text


def test_the_sentence() -> None:
    assert "up to 1.00 GiB can leave and come back" in sentence(SPEED)


def test_facts_become_json_without_serial_numbers() -> None:
    content = facts().to_dict()
    assert content["round_trip_bytes_per_s"] == pytest.approx(GIB)
    assert content["wear"][0]["days_left"] == pytest.approx(990)
    assert "S1" not in str(content)
