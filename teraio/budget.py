"""How much memory there is to budget, when the user does not say.

Covers the machine's and the container's free bytes and the number of local ranks. On a CPU machine the container's
limit is what kills, so the lesser of the two counts.
"""

import os
from pathlib import Path

import psutil

from teraio.errors import ConfigError

_SHARE = 0.9
_NO_LIMIT_NBYTES = 1 << 60
_CGROUP = Path("/sys/fs/cgroup")


def default_budget_nbytes(held_nbytes: int) -> int:
    """0.9 of what is free plus what model and optimizer already hold, divided by the ranks on this machine."""
    return int(_SHARE * (free_nbytes() + held_nbytes)) // local_ranks()


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


def machine_nbytes() -> int:
    """Bytes of memory that the machine has."""
    return int(psutil.virtual_memory().total)


def local_ranks() -> int:
    """Number of ranks on this machine as the launcher says, at least 1.

    Raises:
        ConfigError: The launcher's variable is not a number.
    """
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"LOCAL_WORLD_SIZE must be a number of ranks of at least 1, got {text!r}")
    return int(text)


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
