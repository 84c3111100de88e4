"""Which disks are behind a directory, and a name for this hardware that lasts.

Covers sysfs (model, serial number, size, members of a RAID or a volume) and the fingerprint that saved measurements
are found by. It opens no device and needs no privilege.

Rule: the fingerprint says the same after a reboot, on whatever number the kernel gave the device; and it differs
wherever the speed may.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
from pathlib import Path

from io_backend.mounts import Mount, find_mount

SYSFS = Path("/sys")
_BY_UUID = Path("/dev/disk/by-uuid")
_SECTOR_NBYTES = 512  # of sysfs sizes, whatever the disk's own sector. Source: Documentation/ABI/stable/sysfs-block
_MOST_LEVELS = 8
_OPTIONS_THAT_MATTER = re.compile(
    r"(no)?(barrier|discard|dax|sync|dirsync|delalloc|datacow|datasum|largeio|autodefrag|ssd|ssd_spread)"
    r"|(data|dax|discard|compress|compress-force|allocsize|logbsize|logbufs|journal_checksum|stripe|swidth|sunit)(=.*)?"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """One physical (or virtual) disk."""

    name: str
    """The kernel's, such as ``nvme0n1``; not stable between boots."""
    model: str = ""
    """Empty where the disk does not say, as most virtual ones do not."""
    serial: str = ""
    size_nbytes: int = 0
    kind: str = ""
    """``nvme``, ``virtio``, ``scsi``, ``mmc``, ``loop``, or empty."""
    rotational: bool = False
    """As the kernel believes; virtual disks often claim it wrongly."""
    sysfs: Path | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.model})" if self.model else self.name


def find_devices(mount: Mount, *, sysfs: Path = SYSFS) -> tuple[Device, ...]:
    """The disks that a mounted file system lies on: several for a RAID or a volume group, none where nothing is known.

    Args:
        mount: From `find_mount`.
        sysfs: Where sysfs is.
    """
    number = mount.device_number
    node = sysfs / "dev" / "block" / number
    if not number or number.startswith("0:") or not node.exists():
        # btrfs and others have a number of their own: the source names the device.
        if not mount.source.startswith("/dev/"):
            return ()
        node = sysfs / "class" / "block" / Path(os.path.realpath(mount.source)).name
    with contextlib.suppress(OSError):
        return tuple(_describe(disk) for disk in _disks(node.resolve(strict=True), _MOST_LEVELS))
    return ()


def fingerprint(path: str | os.PathLike[str], *, table: str | None = None, sysfs: Path = SYSFS) -> str:
    """A short name of the hardware and software that decide how fast a directory is. Never raises for what is unknown.

    Args:
        path: Need not exist; what exists of it decides.
        table: As for `find_mount`.
        sysfs: Where sysfs is.
    """
    mount = find_mount(path, table=table)
    devices = find_devices(mount, sysfs=sysfs)
    disks: object = sorted((device.model, device.serial, device.size_nbytes) for device in devices)
    if not any(device.serial for device in devices):
        # Without a serial number two disks of one model are the same: the file system on it tells them apart.
        disks = [disks, _uuid(mount) or mount.source, _size_nbytes(mount.mount_point)]
    facts = [
        disks,
        mount.file_system,
        sorted(option for option in mount.options if _OPTIONS_THAT_MATTER.fullmatch(option)),
        ".".join(os.uname().release.split(".")[:2]),
        os.cpu_count(),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _disks(node: Path, levels: int) -> list[Path]:
    """The whole disks under a block device: from a partition to its disk, from a volume to its members."""
    if (node / "partition").exists():
        node = node.parent
    members = sorted((node / "slaves").iterdir()) if (node / "slaves").is_dir() else []
    if not members or levels == 0:
        return [node]
    found = [disk for member in members for disk in _disks(member.resolve(), levels - 1)]
    return list(dict.fromkeys(found))


def _describe(node: Path) -> Device:
    size = _read(node / "size")
    return Device(
        name=node.name,
        model=" ".join(_read(node / "device" / "model").split()),
        serial=_first(node / "device" / "serial", node / "serial", node / "wwid", node / "device" / "wwid"),
        size_nbytes=int(size) * _SECTOR_NBYTES if size.isdigit() else 0,
        kind=_kind(node),
        rotational=_read(node / "queue" / "rotational") == "1",
        sysfs=node,
    )


def _kind(node: Path) -> str:
    for prefix, kind in (("nvme", "nvme"), ("vd", "virtio"), ("sd", "scsi"), ("mmc", "mmc"), ("loop", "loop")):
        if node.name.startswith(prefix):
            return kind
    return ""


def _first(*paths: Path) -> str:
    return next((text for path in paths if (text := _read(path))), "")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip("\0\n ")
    except OSError:
        return ""


def _uuid(mount: Mount) -> str:
    """Of the file system, where udev keeps links by it."""
    with contextlib.suppress(OSError):
        for link in _BY_UUID.iterdir():
            if os.path.realpath(link) == os.path.realpath(mount.source):
                return link.name
    return ""


def _size_nbytes(mount_point: str) -> int:
    try:
        state = os.statvfs(mount_point)
    except OSError:
        return 0
    return state.f_blocks * state.f_frsize
