"""How much host memory this process may still take, and why not more.

Covers the machine's free memory, the container's limits and the limit of locked memory. It takes nothing.
"""

from __future__ import annotations

import dataclasses
import resource
from pathlib import Path

import psutil

_NO_LIMIT_NBYTES = 1 << 60
_CGROUP = Path("/sys/fs/cgroup")


@dataclasses.dataclass(frozen=True, slots=True)
class HostLimit:
    """What may be taken, and what sets the limit."""

    nbytes: int
    reason: str


def host_limit(*, pinned: bool, local_ranks: int = 1, cgroup_root: Path = _CGROUP) -> HostLimit:
    """What one of ``local_ranks`` processes may take of host memory now.

    Args:
        pinned: Whether it is to be locked, so that the limit of locked memory counts too.
        local_ranks: Processes that share the machine, this one included. Locked memory is limited for each by itself.
        cgroup_root: Where the memory cgroups are.
    """
    limits = [HostLimit(int(psutil.virtual_memory().available) // local_ranks, "free memory of the machine")]
    container = container_free_nbytes(cgroup_root)
    if container is not None:
        limits.append(HostLimit(container // local_ranks, "the container's memory limit"))
    if pinned:
        soft_nbytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        if soft_nbytes != resource.RLIM_INFINITY:
            limits.append(HostLimit(soft_nbytes, "the limit of locked memory (`ulimit -l`)"))
    return min(limits, key=lambda limit: limit.nbytes)


def machine_nbytes() -> int:
    """Bytes of memory that the machine has."""
    return int(psutil.virtual_memory().total)


def free_nbytes(cgroup_root: Path = _CGROUP) -> int:
    """Bytes that can still be allocated: the lesser of the machine's and the container's."""
    available = int(psutil.virtual_memory().available)
    container = container_free_nbytes(cgroup_root)
    return available if container is None else min(available, container)


def container_free_nbytes(root: Path = _CGROUP) -> int | None:
    """Limit less use of the memory cgroup (version 2 or 1) that this process is in; None without a limit."""
    free: list[int] = []
    for directory, limit_name, usage_name in _cgroup_directories(root):
        limit, usage = _read_number(directory / limit_name), _read_number(directory / usage_name)
        if limit is not None and usage is not None and limit < _NO_LIMIT_NBYTES:
            free.append(max(0, limit - usage + _reclaimable_nbytes(directory)))
    return min(free) if free else None


def _cgroup_directories(root: Path) -> list[tuple[Path, str, str]]:
    """The process's own groups and all groups above them; a limit anywhere on the way up holds."""
    found = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            base, limit, usage = root, "memory.max", "memory.current"
            base = root / "unified" if (root / "unified").is_dir() else root
        elif "memory" in controllers.split(","):
            base, limit, usage = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        directory = base / name.lstrip("/")
        while True:
            found.append((directory, limit, usage))
            if directory == base or base not in directory.parents:
                break
            directory = directory.parent
    return found


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable_nbytes(directory: Path) -> int:
    """Page cache that the kernel takes back before it kills."""
    try:
        lines = (directory / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    stats = dict(line.split(maxsplit=1) for line in lines if " " in line)
    return int(stats.get("total_inactive_file", stats.get("inactive_file", "0")))
