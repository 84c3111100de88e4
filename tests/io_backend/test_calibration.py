"""Calibration: that a measurement is complete, leaves nothing, is found again, and that no file can hurt.

Covers measuring with little space and time, the choice of settings, saving and loading, and what `open_store` makes of
it. No test says how fast a disk is.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
from pathlib import Path

import pytest

import io_backend
from io_backend import (
    Calibration,
    DeviceCalibration,
    SpillDirectoryError,
    StorageFullError,
    calibrate,
    load_calibration,
)
from io_backend import calibration as module
from io_backend.devices import fingerprint
from io_backend.disk_trials import Rate, choose, span_nbytes
from io_backend.errors import BackendError
from io_backend.striped_store import StripedStore

MIB = 1 << 20


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "teraio-calibration"


def made_up(path: Path, **changes: object) -> DeviceCalibration:
    values = {
        "path": str(path),
        "fingerprint": fingerprint(path),
        "device": "disk",
        "file_system": "ext4",
        "transport": "posix-direct",
        "reason": "",
        "read_bytes_per_s": 2e9,
        "write_bytes_per_s": 1e9,
        "mixed_read_bytes_per_s": 1e9,
        "mixed_write_bytes_per_s": 0.5e9,
        "mixed_factor": 0.5,
        "latency_s": 1e-4,
        "block_nbytes": 4096,
        "memory_alignment_nbytes": 512,
        "chunk_nbytes": 16 * MIB,
        "num_threads": 1,
        "read_cpu_s_per_gb": 0.01,
        "write_cpu_s_per_gb": 0.01,
        "read_noise": 0.1,
        "write_noise": 0.1,
        "mixed_noise": 0.1,
        "measured_at": "2026-01-01T00:00:00+00:00",
    }
    return DeviceCalibration(**{**values, **changes})  # type: ignore[arg-type]


def test_a_measurement_is_complete_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    dirs = [tmp_path / "there", tmp_path / "not" / "there"]
    found = calibrate(dirs, seconds=0.05, most_nbytes=8 * MIB)
    assert [device.path for device in found.devices] == [str(each) for each in dirs]
    for device in found.devices:
        for field in dataclasses.fields(device):
            value = getattr(device, field.name)
            if isinstance(value, float):
                assert math.isfinite(value), field.name
                assert value >= 0, field.name
        assert 0.05 <= device.mixed_factor <= 1
        assert device.transport in ("posix-direct", "posix-buffered")
        assert device.chunk_nbytes % 4096 == 0
        assert device.num_threads in (1, 2, 4)
        assert device.num_workers >= 2
        assert device.fingerprint == fingerprint(tmp_path)
    assert list((tmp_path / "there").iterdir()) == []
    assert not (tmp_path / "not").exists()


def test_what_suits_can_be_given_to_a_store(tmp_path: Path) -> None:
    (device,) = calibrate([tmp_path], seconds=0.01, most_nbytes=8 * MIB).devices
    io_backend.BackendConfig(chunk_nbytes=device.chunk_nbytes, num_workers=device.num_workers)


def test_too_little_space(tmp_path: Path) -> None:
    with pytest.raises(StorageFullError, match="too few to measure"):
        calibrate([tmp_path], seconds=0.01, most_nbytes=MIB)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_disk_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.preadv, 0

    def sometimes(*arguments: object) -> int:
        nonlocal calls
        calls += 1
        if calls > 5:  # the proof of O_DIRECT and the first reads go well
            raise OSError(errno.EIO, "broken")
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", sometimes)
    with pytest.raises(BackendError):
        calibrate([tmp_path / "new"], seconds=0.01, most_nbytes=8 * MIB)
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="seconds"):
        calibrate([tmp_path], seconds=0)
    with pytest.raises(ValueError, match="at least one"):
        calibrate([])
    (tmp_path / "file").touch()
    with pytest.raises(SpillDirectoryError):
        calibrate([tmp_path / "file"])


@pytest.mark.parametrize(
    ("free", "most", "expected"),
    [(10 << 40, 1 << 30, 1 << 30), (200 * MIB, 1 << 30, 16 * MIB), (79 * MIB, 1 << 30, 0), (10 << 40, 7 * MIB, 0)],
)
def test_space_taken(free: int, most: int, expected: int) -> None:
    assert span_nbytes(free, most) == expected


def rates(write_s: float, read_s: float, cpu_s: float) -> list[Rate]:
    return [Rate({"write": MIB}, write_s, cpu_s), Rate({"read": MIB}, read_s, cpu_s)]


def test_the_cheapest_of_the_fast_is_chosen() -> None:
    found = {
        (1, 4): rates(1.0, 1.0, 0.5),
        (4, 4): rates(1.02, 1.02, 0.1),
        (4, 1): rates(1.02, 1.02, 0.1),
        (16, 1): rates(1.5, 1.5, 0.01),  # cheap and slow
    }
    assert choose(found) == (4, 1)
    del found[(4, 1)], found[(4, 4)]
    assert choose(found) == (1, 4)


def test_a_fast_direction_does_not_hide_a_slow_one() -> None:
    fast_writes = [Rate({"write": 100 * MIB}, 10.0, 0.1), Rate({"read": MIB}, 10.0, 0.1)]
    balanced = [Rate({"write": 10 * MIB}, 10.0, 0.1), Rate({"read": 10 * MIB}, 10.0, 0.1)]
    assert choose({(1, 1): fast_writes, (2, 1): balanced}) == (2, 1)


def test_speeds_put_together(tmp_path: Path) -> None:
    device = made_up(tmp_path)
    assert device.combined_bytes_per_s == pytest.approx(4e9 / 3)
    assert device.round_trip_bytes_per_s == pytest.approx(2e9 / 3)
    assert made_up(tmp_path, mixed_factor=1.0).round_trip_bytes_per_s == pytest.approx(1e9)


def test_saved_and_found_again(tmp_path: Path, cache: Path) -> None:
    assert load_calibration(tmp_path) is None
    device = made_up(tmp_path)
    (path,) = Calibration((device,)).save()
    assert path.parent == cache
    assert load_calibration(tmp_path) == device
    assert load_calibration(tmp_path / "new") == dataclasses.replace(device, path=str(tmp_path / "new"))
    assert Calibration.load([tmp_path]) == Calibration((device,))
    Calibration((dataclasses.replace(device, latency_s=5.0),)).save()
    assert [each.name for each in cache.iterdir()] == [path.name]


GOOD = {**dataclasses.asdict(made_up(Path("/"))), "kind": "teraio-calibration", "version": 1}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "null",
        "\xff\xfe",
        json.dumps({**GOOD, "version": 2}),
        json.dumps({**GOOD, "version": "1"}),
        json.dumps({**GOOD, "kind": "teraio-ledger"}),
        json.dumps({**GOOD, "fingerprint": "0" * 16}),
        json.dumps({**GOOD, "read_bytes_per_s": -1.0}),
        json.dumps({**GOOD, "read_bytes_per_s": math.nan}),
        json.dumps({**GOOD, "read_bytes_per_s": "fast"}),
        json.dumps({key: value for key, value in GOOD.items() if key != "latency_s"}),
    ],
)
def test_a_bad_file_counts_as_none(tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture, text: str) -> None:
    cache.mkdir(parents=True)
    path = cache / f"{fingerprint(tmp_path)}.json"
    path.write_text(text.replace(GOOD["fingerprint"], fingerprint(tmp_path)))
    with caplog.at_level("INFO"):
        assert load_calibration(tmp_path) is None
    assert str(path) in caplog.text
    Calibration((made_up(tmp_path),)).save()
    assert load_calibration(tmp_path) is not None


def test_fields_of_a_later_version_are_ignored(tmp_path: Path, cache: Path) -> None:
    cache.mkdir(parents=True)
    content = {**GOOD, "fingerprint": fingerprint(tmp_path), "colour": "blue"}
    (cache / f"{fingerprint(tmp_path)}.json").write_text(json.dumps(content))
    assert load_calibration(tmp_path) is not None


def test_a_store_over_several_starts_with_measured_speeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Both directories are on one disk here: tell them apart by name.
    monkeypatch.setattr(module, "fingerprint", lambda path: Path(path).name)
    slow = made_up(tmp_path / "slow", fingerprint="slow", read_bytes_per_s=1e9, write_bytes_per_s=1e9)
    fast = made_up(tmp_path / "fast", fingerprint="fast", read_bytes_per_s=3e9, write_bytes_per_s=3e9)
    Calibration((slow,)).save()
    for known, weights in ((False, [1.0, 1.0]), (True, [1e9, 3e9])):
        if known:
            Calibration((fast,)).save()
        store = io_backend.open_store([tmp_path / "slow", tmp_path / "fast"])
        assert isinstance(store, StripedStore)
        assert [device.weight for device in store.statistics().devices] == pytest.approx(weights)
        store.close()
