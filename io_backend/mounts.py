"""Which file system a path is on, and whether it is a sensible place to spill to.

Covers the mount table of Linux and the list of refused types.
It does not open or create anything.

Rule: the answer is for the real path; symbolic links and parts that do not exist yet are resolved first.
"""

from __future__ import annotations

import dataclasses
import os
import re

_MOUNT_TABLE = "/proc/self/mountinfo"
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "rootfs"})
_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "glusterfs", "9p", "afs", "beegfs", "gpfs", "orangefs"}
)
_LOCAL_FUSE = frozenset({"fuseblk", "fuse.fuse-overlayfs", "fuse.ntfs-3g", "fuse.exfat"})


@dataclasses.dataclass(frozen=True, slots=True)
class Mount:
    """One line of the mount table."""

    mount_point: str
    file_system: str
    source: str = ""
    """What is mounted, often a device node."""
    options: tuple[str, ...] = ()
    """Of the mount and of the file system."""
    device_number: str = ""
    """``major:minor``; not stable between boots, and 0 as the major where there is no block device."""


def unsafe_reason(file_system: str) -> str | None:
    """Why a file system of this type is refused for spilling, or ``None`` if it is fine."""
    if file_system in _IN_MEMORY:
        return "it keeps files in memory, so spilling there frees nothing"
    if file_system in _NETWORK or (file_system.startswith("fuse.") and file_system not in _LOCAL_FUSE):
        return "it is a network or user-space file system, far slower than a local disk"
    return None


def find_mount(path: str | os.PathLike[str], *, table: str | None = None) -> Mount:
    """The mount that holds ``path``; type ``unknown`` where there is no mount table.

    Args:
        path: Need not exist.
        table: Text in the format of ``/proc/self/mountinfo``; ``None`` reads the system's.
    """
    if table is None:
        try:
            with open(_MOUNT_TABLE, encoding="utf-8", errors="surrogateescape") as file:
                table = file.read()
        except OSError:
            return Mount("/", "unknown")
    real = os.path.realpath(path)
    best = Mount("/", "unknown")
    for mount in map(_parse_line, table.splitlines()):
        # A later line over the same point hides the earlier one, hence >= in length.
        if mount is not None and _holds(mount.mount_point, real) and len(mount.mount_point) >= len(best.mount_point):
            best = mount
    return best


def _parse_line(line: str) -> Mount | None:
    """Source: proc_pid_mountinfo(5): fields before `` - `` end in options, after it come type, source, options."""
    left, separator, right = line.partition(" - ")
    fields, tail = left.split(" "), right.split(" ")
    if not separator or len(fields) < 5:
        return None
    options = [*(fields[5].split(",") if len(fields) > 5 else []), *(tail[2].split(",") if len(tail) > 2 else [])]
    return Mount(
        mount_point=_unescape(fields[4]),
        file_system=tail[0],
        source=_unescape(tail[1]) if len(tail) > 1 else "",
        options=tuple(dict.fromkeys(options)),
        device_number=fields[2],
    )


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _holds(mount_point: str, path: str) -> bool:
    prefix = mount_point if mount_point.endswith("/") else mount_point + "/"
    return path == mount_point or path.startswith(prefix)
