"""fio as a contender: its command line, its report, and what happens when it fails.

Covers all of it without fio, by canned reports and a stand-in program. A run of the real one is in ``test_bench_runs``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tools.bench.contender import ContenderError
from tools.bench.fio import FioContender, FioFile, command_line, parse_report
from tools.bench.fio_memory import ORDINARY, RESERVED, TRANSPARENT, find_huge_pages
from tools.bench.workers.case import Case, Workload

MIB = 1 << 20


def case_of(workload: Workload) -> Case:
    return Case(workload=workload, buffer_nbytes=MIB, depth=4, total_nbytes=8 * MIB)


def report_of(*, read_nbytes: int = 0, written_nbytes: int = 0, **changes: Any) -> str:
    """A report as fio 3.33 writes it, as far as it is read."""
    job = {
        "jobname": "job",
        "error": 0,
        "read": {"io_bytes": read_nbytes, "runtime": 4 if read_nbytes else 0},
        "write": {"io_bytes": written_nbytes, "runtime": 5 if written_nbytes else 0},
        "job_runtime": 4,
        "usr_cpu": 25.0,
        "sys_cpu": 50.0,
    }
    return json.dumps({"fio version": "fio-3.33", "jobs": [{**job, **changes}]})


@pytest.mark.parametrize(
    ("workload", "read_mib", "written_mib", "elapsed_s"),
    [("read", 8, 0, 0.004), ("write", 0, 8, 0.005), ("mixed", 3, 5, 0.005)],
)
def test_report_gives_time_and_cpu(workload: Workload, read_mib: int, written_mib: int, elapsed_s: float) -> None:
    text = report_of(read_nbytes=read_mib * MIB, written_nbytes=written_mib * MIB)
    measurement = parse_report(text, case_of(workload))
    assert measurement.elapsed_s == elapsed_s
    assert measurement.cpu_s == pytest.approx(0.003)


def test_notes_before_the_report_are_skipped() -> None:
    text = "fio: some note about the kernel\n" + report_of(read_nbytes=8 * MIB)
    assert parse_report(text, case_of("read")).elapsed_s == 0.004


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "0 jobs"),
        ("fio: no report today", "0 jobs"),
        ("{ not json", "JSON"),
        ('{"fio version": "x"}', "jobs"),
        ('{"jobs": [{"error": 0}]}', "lacks 'read'"),
        (report_of(read_nbytes=8 * MIB, error=28), "No space left"),
        (report_of(read_nbytes=7 * MIB), "expected 8388608 bytes of read"),
        (report_of(read_nbytes=7 * MIB, written_nbytes=MIB), "expected 8388608 bytes of read"),
        (report_of(read_nbytes=8 * MIB, read={"io_bytes": 8 * MIB, "runtime": 0}), "no time"),
    ],
)
def test_what_is_no_result_is_an_error(text: str, expected: str) -> None:
    with pytest.raises(ContenderError, match=expected):
        parse_report(text, case_of("read"))


def test_mixed_must_be_mixed() -> None:
    with pytest.raises(ContenderError, match="mixed"):
        parse_report(report_of(read_nbytes=8 * MIB), case_of("mixed"))


@pytest.mark.parametrize("workload", ["read", "write", "mixed"])
def test_command_does_the_work_of_the_case(workload: Workload) -> None:
    case = case_of(workload)
    command = command_line("fio", case, engine="libaio", iomem="malloc", path=Path("/d/f"), report=Path("/d/fio.json"))
    assert command[0] == "fio"
    for option in ("--ioengine=libaio", "--direct=1", "--iodepth=4", f"--bs={MIB}", f"--size={8 * MIB}"):
        assert option in command
    # fio takes options of a job before its name as everybody's; there is one job, so the name may come last.
    assert command[-1] == f"--name={workload}"


def test_file_is_written_once(tmp_path: Path) -> None:
    file = FioFile(tmp_path / "f")
    file.ensure(3 * MIB + 4096)
    written = file.path.stat()
    assert written.st_size == 3 * MIB + 4096
    assert written.st_blocks * 512 >= written.st_size
    file.ensure(MIB)
    assert file.path.stat() == written


def stand_in(directory: Path, script: str) -> str:
    """A program that takes fio's place."""
    program = directory / "stand-in"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o700)
    return str(program)


def contender_of(tmp_path: Path, script: str) -> FioContender:
    program = stand_in(tmp_path, script)
    return FioContender(program, "libaio", TRANSPARENT, file=FioFile(tmp_path / "f"), environment=dict(os.environ))


def test_contender_reads_what_the_program_reports(tmp_path: Path) -> None:
    (tmp_path / "canned").write_text(report_of(read_nbytes=8 * MIB), encoding="utf-8")
    copies = 'test "$GLIBC_TUNABLES" = glibc.malloc.hugetlb=1 && cp canned fio.json'
    contender = contender_of(tmp_path, copies)
    assert contender.name == "fio libaio, huge pages"
    contender.prepare(case_of("read"))
    assert contender.measure().elapsed_s == 0.004
    contender.release()
    contender.close()


@pytest.mark.parametrize("script", ["echo out of luck >&2; exit 3", "echo out of luck >&2"])
def test_a_program_without_a_result_is_an_error(tmp_path: Path, script: str) -> None:
    contender = contender_of(tmp_path, script)
    contender.prepare(case_of("read"))
    with pytest.raises(ContenderError, match="out of luck"):
        contender.measure()


def test_an_old_report_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "fio.json").write_text(report_of(read_nbytes=8 * MIB), encoding="utf-8")
    contender = contender_of(tmp_path, "exit 0")
    contender.prepare(case_of("read"))
    with pytest.raises(ContenderError):
        contender.measure()


def test_without_huge_pages_the_reason_is_given(tmp_path: Path) -> None:
    found = find_huge_pages(stand_in(tmp_path, "exit 1"), dict(os.environ))
    assert isinstance(found, str)
    assert "huge pages" in found


def test_the_ways_differ_in_what_fio_is_told() -> None:
    assert ORDINARY.environment == {}
    assert TRANSPARENT.environment
    assert RESERVED.iomem == "shmhuge"
