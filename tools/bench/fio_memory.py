"""Buffers on huge pages for fio, by whatever way this system allows.

Covers the two ways, and a proof of each by a short run.
Does not change the system: who wants reserved huge pages sets ``vm.nr_hugepages``.
Must stay true: a way counts only if fio's memory was seen to be on huge pages (or fio could take reserved ones).

The first way is the C library's: with the tunable ``glibc.malloc.hugetlb=1`` (2.35 or newer) its ``malloc`` asks for
transparent huge pages, which fio itself has no option for.
"""

import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_PROBE_NBYTES = 64 << 20
_PROBE_LIMIT_S = 20.0
_POLL_S = 0.02
_ANONYMOUS_HUGE = re.compile(r"^AnonHugePages:\s+(\d+) kB$", re.MULTILINE)
_HUGE_FREE = re.compile(r"^HugePages_Free:\s+(\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class FioMemory:
    """Where fio's buffers come from."""

    name: str
    """As tables show it."""
    how: str
    """How it is had, for the description."""
    iomem: str
    """Value of fio's ``--iomem``."""
    environment: Mapping[str, str]
    """Variables to add."""


ORDINARY = FioMemory("ordinary buffers", "by malloc", "malloc", {})
TRANSPARENT = FioMemory("huge pages", "transparent, by malloc", "malloc", {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"})
RESERVED = FioMemory("huge pages", "reserved, by shared memory", "shmhuge", {})


def find_huge_pages(fio: str, environment: Mapping[str, str]) -> FioMemory | str:
    """The first way that works, or why none does. Blocks for about a second.

    Args:
        fio: The program.
        environment: All of its environment variables, without those of a way.
    """
    if _gets_transparent(fio, environment):
        return TRANSPARENT
    if _num_reserved_free() > 0 and _runs(fio, environment, RESERVED):
        return RESERVED
    return (
        "fio's memory does not get huge pages: needs glibc 2.35 or newer with transparent_hugepage at 'madvise' or "
        "'always', or enough pages in /proc/sys/vm/nr_hugepages"
    )


def _gets_transparent(fio: str, environment: Mapping[str, str]) -> bool:
    """Whether at least half of fio's buffers are seen on huge pages while it runs."""
    with _probe(fio, environment, TRANSPARENT) as process:
        status = Path(f"/proc/{process.pid}/smaps_rollup")
        deadline_s = time.monotonic() + _PROBE_LIMIT_S
        try:
            while process.poll() is None and time.monotonic() < deadline_s:
                try:
                    found = _ANONYMOUS_HUGE.search(status.read_text(encoding="utf-8"))
                except OSError:  # it has just ended
                    return False
                if found is not None and int(found[1]) * 1024 >= _PROBE_NBYTES // 2:
                    return True
                time.sleep(_POLL_S)
        finally:
            process.kill()
    return False


def _runs(fio: str, environment: Mapping[str, str], memory: FioMemory) -> bool:
    """Whether fio ends well with that memory."""
    with _probe(fio, environment, memory) as process:
        try:
            return process.wait(timeout=_PROBE_LIMIT_S) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            return False


def _probe(fio: str, environment: Mapping[str, str], memory: FioMemory) -> "subprocess.Popen[bytes]":
    """Fio at work for a second without any device, its buffers filled."""
    return subprocess.Popen(
        [
            fio,
            *("--ioengine=null", "--rw=write", "--size=1g", "--bs=16m", f"--iodepth={_PROBE_NBYTES >> 24}"),
            *("--time_based", "--runtime=1", "--thread", f"--iomem={memory.iomem}", "--name=probe"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**environment, **memory.environment},
        cwd="/",
    )


def _num_reserved_free() -> int:
    """Free pages of the system's reserve."""
    try:
        found = _HUGE_FREE.search(Path("/proc/meminfo").read_text(encoding="utf-8"))
    except OSError:
        return 0
    return int(found[1]) if found else 0
