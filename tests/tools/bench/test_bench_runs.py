"""Small real runs: a worker of our own, fio where it is installed, and the whole command.

Covers that every workload runs and leaves nothing behind. No time is asserted: machines differ.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from io_backend.mounts import find_mount, unsafe_reason
from tests.spill_roots import sessions
from tools import cli
from tools.bench import command
from tools.bench.fio import FioContender, FioFile
from tools.bench.fio_memory import ORDINARY
from tools.bench.rounds import run_case
from tools.bench.worker_process import WorkerProcess
from tools.bench.workers.case import Case, Workload
from tools.demo.worker_process import worker_environment

MIB = 1 << 20
WORKLOADS: tuple[Workload, ...] = ("read", "write", "mixed")


def small_cases() -> list[Case]:
    return [Case(workload=workload, buffer_nbytes=MIB, depth=4, total_nbytes=8 * MIB) for workload in WORKLOADS]


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A directory that a store accepts."""
    reason = unsafe_reason(find_mount(tmp_path).file_system)
    if reason is not None:
        pytest.skip(f"no disk under {tmp_path}: {reason}")
    return tmp_path


@pytest.mark.parametrize("buffers", ["huge", "torch"])
def test_store_does_every_workload(disk: Path, buffers: str) -> None:
    arguments = ["teraio", str(disk), buffers]
    worker = WorkerProcess(
        "ours", "teraio", arguments, interpreter=sys.executable, environment=worker_environment(), directory=disk
    )
    try:
        assert "posix" in worker.description
        results = [run_case(case, [worker], 2, lambda case, name: None) for case in small_cases()]
    finally:
        worker.close()
    for result in results:
        (row,) = result.rows
        assert row.failure is None
        assert len(row.measurements) == 2
        assert all(measurement.elapsed_s > 0 for measurement in row.measurements)
    assert sessions(disk) == []


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_fio_does_every_workload(disk: Path) -> None:
    fio = shutil.which("fio")
    assert fio is not None
    contender = FioContender(fio, "libaio", ORDINARY, file=FioFile(disk / "fio.bin"), environment=dict(os.environ))
    for case in small_cases():
        (row,) = run_case(case, [contender], 1, lambda case, name: None).rows
        # A disk that takes 8 MiB in under a millisecond is too fast for fio's clock, and that is said.
        assert row.failure is None or "no time" in row.failure


def test_command_writes_its_result_and_leaves_nothing_else(
    disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "all_cases", lambda *, quick: small_cases()[:1])
    monkeypatch.setenv("PATH", "")  # without fio: this is about the command
    results, measured = disk / "results", disk / "measured"
    results.mkdir()
    measured.mkdir()
    options = ["--json", str(results / "r.json"), "--markdown", str(results / "r.md")]
    assert cli.main(["bench", "io", str(measured), "--rounds", "1", *options]) == 0
    values = json.loads((results / "r.json").read_text(encoding="utf-8"))
    assert values["rounds"] == 1
    assert values["machine"]["fio"] == "not installed"
    rows = values["cases"][0]["rows"]
    assert len(rows) == 3
    assert all(row["gb_per_s"]["median"] > 0 for row in rows)
    assert "teraio, huge pages" in (results / "r.md").read_text(encoding="utf-8")
    assert "teraio, huge pages" in capsys.readouterr().out
    assert sessions(measured) == []


def test_a_full_disk_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing_free = shutil._ntuple_diskusage(10, 10, 0)
    monkeypatch.setattr(command.shutil, "disk_usage", lambda path: nothing_free)
    assert cli.main(["bench", "io", str(tmp_path)]) == 1
    assert "0 B free" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
