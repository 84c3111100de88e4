"""What the kernel says about a process and this machine, read from ``/proc``.

Covers anonymous memory of a process, now and at its peak, and the names for the machine in a result.
Does not know what the process is doing: ``worker_process`` decides when to sample.
Must stay true: a reading is one system call on a file kept open, so sampling every few milliseconds takes nothing
noticeable from the process being measured.
"""

import os
import re
from pathlib import Path
from types import TracebackType
from typing import Self

_ANONYMOUS = re.compile(rb"^RssAnon:\s+(\d+) kB$", re.MULTILINE)
_STATUS_NBYTES = 8192
"""More than the whole of ``/proc/<pid>/status``."""


def reads_proc() -> bool:
    """Whether this system tells a process's anonymous memory (Linux does)."""
    try:
        with AnonymousMemory(os.getpid()) as memory:
            return memory.read_nbytes() > 0
    except OSError:
        return False


class AnonymousMemory:
    """Anonymous resident memory (``RssAnon``) of one process: what it allocated, without files it mapped.

    Thread safety: reads may come from any thread; the peak belongs to the thread that samples.
    Invariants: ``peak_nbytes`` is the largest reading since ``reset_peak``, 0 before the first.
    """

    def __init__(self, pid: int) -> None:
        """Open the status file of process ``pid``; raises ``OSError`` if there is none."""
        self._descriptor = os.open(f"/proc/{pid}/status", os.O_RDONLY | os.O_CLOEXEC)
        self.peak_nbytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the status file."""
        os.close(self._descriptor)

    def read_nbytes(self) -> int:
        """The present value in bytes; 0 once the process has ended."""
        try:
            found = _ANONYMOUS.search(os.pread(self._descriptor, _STATUS_NBYTES, 0))
        except ProcessLookupError:
            return 0
        return int(found[1]) * 1024 if found else 0

    def sample(self) -> None:
        """Take one reading into the peak."""
        self.peak_nbytes = max(self.peak_nbytes, self.read_nbytes())

    def reset_peak(self) -> None:
        """Forget the readings so far."""
        self.peak_nbytes = 0


def own_anonymous_nbytes() -> int:
    """Anonymous resident memory of this process, bytes."""
    with AnonymousMemory(os.getpid()) as memory:
        return memory.read_nbytes()


def cpu_model() -> str:
    """The processor's name as the kernel gives it, or ``"unknown"``."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def num_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))
