"""Hardware records: checks and their file."""

import json
import math
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifetime import Hardware, TraceError

GOOD = Hardware(read_bytes_per_s=3e9, write_bytes_per_s=2e9)
NUMBERS = [f.name for f in fields(Hardware) if f.name != "source"]


def test_round_trip(tmp_path: Path) -> None:
    hardware = Hardware(
        read_bytes_per_s=3e9,
        write_bytes_per_s=2e9,
        latency_s=1e-4,
        mixed_factor=0.5,
        compute_factor=0.9,
        host_bytes_per_s=1e10,
        device_nbytes=80 << 30,
        host_nbytes=1 << 40,
        peak_flops=1e15,
        memory_bytes_per_s=2e12,
        source="a data sheet — with “quotes”",
    )
    hardware.save(tmp_path / "h.json")
    assert Hardware.load(tmp_path / "h.json") == hardware
    assert Hardware.load(str(tmp_path / "h.json")) == hardware
    assert list(json.loads((tmp_path / "h.json").read_text())) == sorted(asdict(hardware))


rates = st.floats(min_value=1e-3, max_value=1e15)


@given(read=rates, write=rates, latency=st.floats(0, 10), mixed=st.floats(0.01, 1), nbytes=st.integers(0, 2**60))
def test_any_record_survives(
    read: float, write: float, latency: float, mixed: float, nbytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    hardware = Hardware(read, write, latency_s=latency, mixed_factor=mixed, device_nbytes=nbytes)
    path = tmp_path_factory.getbasetemp() / "any.json"
    hardware.save(path)
    assert Hardware.load(path) == hardware
    path.unlink()


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    hardware = Hardware(np.float32(8.0), np.float64(4.0), device_nbytes=np.int64(1 << 40))  # type: ignore[arg-type]
    hardware.save(tmp_path / "h.json")
    assert Hardware.load(tmp_path / "h.json") == hardware


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1, "3", None, True, [1.0]])
def test_what_is_no_amount_is_refused(name: str, value: Any) -> None:
    with pytest.raises(TraceError, match=rf"Hardware\.{name} must be"):
        replace(GOOD, **{name: value})


@pytest.mark.parametrize("name", ["read_bytes_per_s", "write_bytes_per_s", "mixed_factor", "compute_factor"])
def test_zero_is_refused_where_nothing_would_move(name: str) -> None:
    with pytest.raises(TraceError, match=rf"Hardware\.{name} must be above 0"):
        replace(GOOD, **{name: 0})


@pytest.mark.parametrize("name", ["mixed_factor", "compute_factor"])
def test_factor_above_one_is_refused(name: str) -> None:
    with pytest.raises(TraceError, match=r"at most 1, got 1\.5"):
        replace(GOOD, **{name: 1.5})


def test_source_is_a_text() -> None:
    with pytest.raises(TraceError, match=r"Hardware\.source must be a text"):
        replace(GOOD, source=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "[1, 2]",
        "3",
        "null",
        '"text"',
        "{}",
        '{"read_bytes_per_s": 1}',
        '{"read_bytes_per_s": 1, "write_bytes_per_s": 0}',
        '{"read_bytes_per_s": 1, "write_bytes_per_s": "2"}',
        '{"read_bytes_per_s": NaN, "write_bytes_per_s": 2}',
        '{"read_bytes_per_s": 1, "write_bytes_per_s": 1, "unknown": 2}',
        "[" * 100_000,
        "9" * 9999,
    ],
)
def test_file_that_is_no_record(tmp_path: Path, text: str) -> None:
    path = tmp_path / "h.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"h\.json is not a hardware record written by teraio"):
        Hardware.load(path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "h.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError):
        Hardware.load(tmp_path / "h.json")


def test_missing_file_stays_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Hardware.load(tmp_path / "none")
    with pytest.raises(IsADirectoryError):
        Hardware.load(tmp_path)
