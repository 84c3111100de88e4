"""What there is to know about one spill directory.

Covers where it lies, its space, its speed, its ledger and the wear of its disks.
Does not judge: ``problems`` does.
Must stay true: a directory that cannot be used is still examined as far as it goes.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any

from io_backend import BackendError, Calibration, DeviceCalibration, Ledger, calibrate, read_ledger
from io_backend.devices import Device, find_devices
from io_backend.mounts import Mount, find_mount, unsafe_reason
from io_backend.spill_file import default_reserve_nbytes
from io_backend.wear import DaysLeft, Wear, read_wear


@dataclasses.dataclass(frozen=True, kw_only=True)
class DirectoryFacts:
    """One directory as it was found."""

    path: str
    failure: str
    """Why it cannot be used; empty if it can."""
    mount: Mount
    devices: tuple[Device, ...]
    total_nbytes: int
    free_nbytes: int
    reserve_nbytes: int
    """What teraio leaves free."""
    quota: str
    """What limits this user's files beside the space, as far as it is seen from here."""
    calibration: DeviceCalibration | None
    save_failure: str
    """Why the measurement could not be kept; empty if it was, or was not to be."""
    ledger: Ledger
    bytes_per_day: float | None
    """At which days of life are told: as asked for, else the ledger's average."""
    wear: tuple[Wear, ...]
    gds: str
    """What this directory lacks for GPUDirect Storage; empty if nothing."""

    def days_left(self) -> list[tuple[Wear, DaysLeft]]:
        """Of each disk, at ``bytes_per_day`` over all of them together."""
        rate = self.bytes_per_day
        if rate is None or rate <= 0:
            return [(wear, DaysLeft(None, "no rate of writing is known (--tb-per-day)")) for wear in self.wear]
        return [(wear, wear.days_left(rate / len(self.wear))) for wear in self.wear]

    def to_dict(self) -> dict[str, Any]:
        """As plain values. Serial numbers stay out: such files are sent to others."""
        return {
            "path": self.path,
            "usable": not self.failure,
            "failure": self.failure,
            "mount_point": self.mount.mount_point,
            "file_system": self.mount.file_system,
            "mount_options": list(self.mount.options),
            "devices": [
                {
                    "name": device.name,
                    "model": device.model,
                    "kind": device.kind,
                    "size_nbytes": device.size_nbytes,
                    "rotational": device.rotational,
                }
                for device in self.devices
            ],
            "total_nbytes": self.total_nbytes,
            "free_nbytes": self.free_nbytes,
            "reserve_nbytes": self.reserve_nbytes,
            "quota": self.quota,
            "calibration": dataclasses.asdict(self.calibration) if self.calibration else None,
            "round_trip_bytes_per_s": self.calibration.round_trip_bytes_per_s if self.calibration else None,
            "save_failure": self.save_failure,
            "ledger": dataclasses.asdict(self.ledger),
            "bytes_per_day": self.bytes_per_day,
            "wear": [
                {**dataclasses.asdict(wear), "days_left": left.days, "days_left_reason": left.reason}
                for wear, left in self.days_left()
            ],
            "gds_lacks": self.gds,
        }


def examine(
    path: Path, *, seconds: float, save: bool, bytes_per_day: float | None, rated_nbytes: int | None
) -> DirectoryFacts:
    """Look at a directory and measure it. Blocks for about ``seconds``.

    Args:
        path: Need not exist; it is made for the measurement and removed again.
        seconds: For the measurement.
        save: Whether to keep the measurement for later sessions.
        bytes_per_day: Written to it, for the days of life; ``None`` takes the ledger's average.
        rated_nbytes: Endurance of each of its disks, if known.
    """
    path = path.expanduser().absolute()
    mount = find_mount(path)
    devices = find_devices(mount)
    calibration, failure = _measure(path, seconds)
    ledger = read_ledger(path)
    total_nbytes, free_nbytes = _space(path)
    return DirectoryFacts(
        path=str(path),
        failure=failure,
        mount=mount,
        devices=devices,
        total_nbytes=total_nbytes,
        free_nbytes=free_nbytes,
        reserve_nbytes=default_reserve_nbytes(total_nbytes),
        quota=_quota(mount),
        calibration=calibration,
        save_failure=_save(calibration) if save and calibration is not None else "",
        ledger=ledger,
        bytes_per_day=bytes_per_day if bytes_per_day is not None else ledger.bytes_per_day(),
        wear=tuple(read_wear(device, rated_nbytes=rated_nbytes) for device in devices),
        gds=gds_lacks(mount),
    )


def gds_lacks(mount: Mount) -> str:
    """What a mount lacks for GPUDirect Storage; empty if nothing that can be seen here.

    Source: the GDS installation guide: ext4 with data=ordered, or XFS, on NVMe.
    """
    if mount.file_system == "xfs":
        return ""
    if mount.file_system != "ext4":
        return f"the file system is {mount.file_system}, not ext4 or xfs"
    if "data=ordered" not in mount.options:
        return "ext4 is not mounted with the option data=ordered by name, which cuFile looks for"
    return ""


def _measure(path: Path, seconds: float) -> tuple[DeviceCalibration | None, str]:
    """The measurement, or why there is none."""
    reason = unsafe_reason(find_mount(path).file_system)
    if reason is not None:
        return None, f"{reason} (a session takes it with allow_unsafe_spill=True only)"
    try:
        return calibrate([path], seconds).devices[0], ""
    except BackendError as error:
        return None, error.strerror or str(error)
    except OSError as error:
        return None, str(error)


def _save(calibration: DeviceCalibration) -> str:
    try:
        Calibration((calibration,)).save()
    except OSError as error:
        return str(error)
    return ""


def _space(path: Path) -> tuple[int, int]:
    """Bytes in all, and free for this user, of the file system that holds the path or will."""
    for existing in (path, *path.parents):
        try:
            state = os.statvfs(existing)
        except OSError:
            continue
        return state.f_blocks * state.f_frsize, state.f_bavail * state.f_frsize
    return 0, 0


def _quota(mount: Mount) -> str:
    """How much is left under a quota only its own tools say; that there is one the mount options tell."""
    found = [
        option
        for option in mount.options
        if option.partition("=")[0]
        in ("quota", "usrquota", "grpquota", "prjquota", "uquota", "gquota", "pquota", "usrjquota", "grpjquota")
    ]
    return f"kept on this file system ({', '.join(found)}): see `quota`" if found else "none seen in the mount options"
