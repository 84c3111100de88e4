"""fio as a contender: the same blocks, depth and bytes, on a file written before.

Covers the file, the command line, and reading fio's JSON.
Does not choose engines and memory: ``lineup`` does.
Must stay true: fio's own clock is taken, which starts after its memory is allocated and filled; and the processor time
is the one it reports for its I/O thread (its whole process would include filling the buffers and writing the report).
"""

import json
import mmap
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .contender import ContenderError, Family
from .fio_memory import FioMemory
from .workers.case import Case
from .workers.clock import Measurement

RUN_LIMIT_S = 600.0
_FILL_NBYTES = 16 << 20

_PATTERNS = {
    # A mixed pattern with nothing but reads: then fio fills, and so touches, its buffers before its clock starts.
    "read": ("--rw=rw", "--rwmixread=100"),
    "write": ("--rw=write",),
    # One job, not one a direction: jobs fill their buffers after their common start, so they begin tens of milliseconds
    # apart, and their own clocks do not show it. The direction of each transfer is drawn; of small seeds, this one
    # comes nearest to halves at all sizes (48 to 56 % reads).
    "mixed": ("--rw=rw", "--rwmixread=50", "--randseed=2"),
}
_MIXED_SHARES = (0.25, 0.75)
"""Least and most share of reads that still counts as mixed."""


class FioFile:
    """The file that all fio contenders share: fully written, overwritten by each of them."""

    def __init__(self, path: Path) -> None:
        """The file appears with ``ensure``."""
        self.path = path

    def ensure(self, nbytes: int) -> None:
        """Write the file to ``nbytes`` if it is shorter; raises ``OSError``."""
        if self.path.exists() and self.path.stat().st_size >= nbytes:
            return
        with mmap.mmap(-1, _FILL_NBYTES) as block, self.path.open("wb") as file:
            block.write(os.urandom(_FILL_NBYTES))
            for start in range(0, nbytes, _FILL_NBYTES):
                file.write(memoryview(block)[: min(_FILL_NBYTES, nbytes - start)])
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class FioContender:
    """One engine with one kind of memory; each measurement is a run of fio.

    Thread safety: one thread.
    """

    def __init__(
        self, fio: str, engine: str, memory: FioMemory, *, file: FioFile, environment: Mapping[str, str]
    ) -> None:
        """Nothing runs before ``measure``; the arguments are as ``lineup`` has them."""
        self.name = f"fio {engine}, {memory.name}"
        self.family: Family = "fio"
        added = "".join(f" {name}={value}" for name, value in memory.environment.items())
        self.description = f"ioengine={engine} direct=1 iomem={memory.iomem}{added} ({memory.how})"
        self._fio = fio
        self._engine = engine
        self._memory = memory
        self._file = file
        self._environment = {**environment, **memory.environment}
        self._case: Case | None = None

    def prepare(self, case: Case) -> None:
        """Write the file if that was not done yet."""
        try:
            self._file.ensure(case.total_nbytes)
        except OSError as error:
            raise ContenderError(f"cannot write {self._file.path}: {error.strerror}") from error
        self._case = case

    def measure(self) -> Measurement:
        """Run fio once."""
        assert self._case is not None
        report = self._file.path.with_name("fio.json")
        report.unlink(missing_ok=True)
        command = command_line(
            self._fio, self._case, engine=self._engine, iomem=self._memory.iomem, path=self._file.path, report=report
        )
        try:
            ended = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=RUN_LIMIT_S,
                check=False,
                env=self._environment,
                cwd=self._file.path.parent,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ContenderError(f"fio did not run: {error}") from error
        if ended.returncode != 0 or not report.exists():
            words = " / ".join(ended.stderr.split("\n")[:2]).strip(" /")
            raise ContenderError(f"fio ended with exit code {ended.returncode}: {words}")
        return parse_report(report.read_text(encoding="utf-8", errors="replace"), self._case)

    def release(self) -> None:
        """The file stays for the next case."""
        self._case = None

    def close(self) -> None:
        """Nothing is open; the file goes with its directory."""


def command_line(fio: str, case: Case, *, engine: str, iomem: str, path: Path, report: Path) -> list[str]:
    """The call of fio for a case: one job, whose reads and writes each go through the file from its start."""
    return [
        *(fio, "--output-format=json", f"--output={report}", "--thread", f"--ioengine={engine}", "--direct=1"),
        *(f"--filename={path}", f"--bs={case.buffer_nbytes}", f"--iomem={iomem}", f"--iodepth={case.depth}"),
        # No layout of the file by fio, and no changes to the data between writes: nobody else makes any.
        *("--allow_file_create=0", "--fallocate=none", "--scramble_buffers=0"),
        *(f"--size={case.total_nbytes}", *_PATTERNS[case.workload], f"--name={case.workload}"),
    ]


def parse_report(text: str, case: Case) -> Measurement:
    """What a run took, from fio's JSON, which notes may precede.

    Raises:
        ContenderError: It is no report, the job failed, or it moved other bytes than the case has.
    """
    jobs = _jobs(text)
    if len(jobs) != 1:
        raise ContenderError(f"fio reported {len(jobs)} jobs, expected 1")
    (job,) = jobs
    try:
        if job["error"]:
            raise ContenderError(f"fio's job failed: {os.strerror(job['error'])}")
        _check_moved(job["read"]["io_bytes"], job["write"]["io_bytes"], case)
        elapsed_s = max(job["read"]["runtime"], job["write"]["runtime"]) / 1000
        cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    except (KeyError, TypeError) as error:
        raise ContenderError(f"fio's report lacks {error}") from error
    if elapsed_s <= 0:
        raise ContenderError("fio measured no time: too few bytes for its clock of milliseconds")
    return Measurement(elapsed_s, cpu_s)


def _check_moved(read_nbytes: int, written_nbytes: int, case: Case) -> None:
    """Refuse a run that did other work than the case; raises ``ContenderError``."""
    total_nbytes = case.total_nbytes
    least, most = {"read": (1.0, 1.0), "write": (0.0, 0.0), "mixed": _MIXED_SHARES}[case.workload]
    if read_nbytes + written_nbytes != total_nbytes or not least <= read_nbytes / total_nbytes <= most:
        raise ContenderError(
            f"fio read {read_nbytes} and wrote {written_nbytes} bytes, expected {total_nbytes} bytes of {case.workload}"
        )


def _jobs(text: str) -> Sequence[dict[str, Any]]:
    """The jobs of a report."""
    start = text.find("{")
    try:
        jobs: Sequence[dict[str, Any]] = json.loads(text[start:])["jobs"] if start >= 0 else []
    except (ValueError, KeyError) as error:
        raise ContenderError(f"fio's report is not the JSON expected: {error}") from error
    return jobs
