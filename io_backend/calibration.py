"""How fast the spill directories are: measured once, kept for this hardware.

Covers the records, measuring a list of directories, and the saved files in the user's cache. How a trial is made is
``disk_trials``' business, what names the hardware ``devices``'.

Rules:
- A measurement leaves nothing in the directory; it takes a tenth of the free space at most, and gives it back.
- A saved file that is damaged, foreign or newer counts as none: it is logged, and the next measurement replaces it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import math
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from io_backend import disk_trials, json_file
from io_backend.config import BackendConfig
from io_backend.devices import find_devices, fingerprint
from io_backend.errors import StorageFullError
from io_backend.mounts import find_mount
from io_backend.posix_store import PosixStore
from io_backend.spill_directory import SpillDirectory
from io_backend.user_cache import user_cache_directory

_logger = logging.getLogger(__name__)
_GIB = 1 << 30
_MOST_NBYTES = 1 * _GIB
_TYPES: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}
_KIND, _VERSION = "teraio-calibration", 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeviceCalibration:
    """What was measured in one directory. GB is 1e9 bytes; noise is (largest - least) / median over the rounds."""

    path: str
    """The directory it was measured in; others on the same hardware share the measurement."""
    fingerprint: str
    """Of the hardware, file system and kernel."""
    device: str
    """The disks' model or name, for people."""
    file_system: str
    transport: str
    """``posix-direct`` or ``posix-buffered``."""
    reason: str
    """Why this transport."""
    read_bytes_per_s: float
    """Reads alone."""
    write_bytes_per_s: float
    """Writes alone, onto space written before."""
    mixed_read_bytes_per_s: float
    """Reads while writes run."""
    mixed_write_bytes_per_s: float
    """Writes while reads run."""
    mixed_factor: float
    """Rates r and w that hold at once satisfy r/R + w/W <= 2 * mixed_factor: 1 is full duplex, 0.5 half duplex."""
    latency_s: float
    """Median of one read of 4 KiB, from the call to its end, nothing else running."""
    block_nbytes: int
    """What O_DIRECT wants offsets and lengths to be multiples of."""
    memory_alignment_nbytes: int
    """What O_DIRECT wants addresses to be multiples of."""
    chunk_nbytes: int
    """Best bytes a system call: the cheapest in processor time among those within 5 % of the fastest."""
    num_threads: int
    """Best number of transfers at once, chosen likewise."""
    read_cpu_s_per_gb: float
    """Seconds of processor time, user and system."""
    write_cpu_s_per_gb: float
    read_noise: float
    write_noise: float
    mixed_noise: float
    measured_at: str
    """Date and time, ISO 8601, UTC."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            # `dataclasses.fields` gives annotations as text under `from __future__ import annotations`.
            expected = _TYPES[str(field.type)]
            if not isinstance(value, expected) or isinstance(value, bool):
                raise ValueError(f"{field.name} is {value!r}, expected {field.type}")
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{field.name} is {value!r}, expected a finite number")
        for name in _MUST_BE_POSITIVE:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected more than 0")

    @property
    def combined_bytes_per_s(self) -> float:
        """Bytes a second of what goes out and comes back: the harmonic mean of both directions."""
        return 2 / (1 / self.read_bytes_per_s + 1 / self.write_bytes_per_s)

    @property
    def round_trip_bytes_per_s(self) -> float:
        """Bytes a second that can be written while as many are read: the steady state of offload."""
        both = 2 * self.mixed_factor / (1 / self.read_bytes_per_s + 1 / self.write_bytes_per_s)
        return min(both, self.read_bytes_per_s, self.write_bytes_per_s)

    @property
    def num_workers(self) -> int:
        """``BackendConfig.num_workers`` that suits: at least 2, so that a read need not wait for a write."""
        return max(2, self.num_threads)


_MUST_BE_POSITIVE = frozenset(
    {
        "read_bytes_per_s", "write_bytes_per_s", "mixed_factor", "latency_s", "block_nbytes", "chunk_nbytes",
        "num_threads",
    }
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Calibration:
    """Measurements of some directories, in their order."""

    devices: tuple[DeviceCalibration, ...]

    def save(self, cache: Path | None = None) -> list[Path]:
        """Write one file for each hardware; the files' paths.

        Args:
            cache: The directory; ``None`` for ``teraio-calibration`` in the user's cache.

        Raises:
            OSError: A file cannot be written. Earlier ones are.
        """
        cache = cache if cache is not None else calibration_directory()
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        dir_fd = os.open(cache, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for device in self.devices:
                json_file.replace_object(
                    f"{device.fingerprint}.json",
                    dataclasses.asdict(device),
                    kind=_KIND,
                    version=_VERSION,
                    dir_fd=dir_fd,
                    temporary=f".{device.fingerprint}-{secrets.token_hex(4)}.new",
                )
        finally:
            os.close(dir_fd)
        return [cache / f"{device.fingerprint}.json" for device in self.devices]

    @classmethod
    def load(cls, dirs: Sequence[str | os.PathLike[str]], cache: Path | None = None) -> Calibration | None:
        """The saved measurements of all these directories; ``None`` if one has none. Never raises."""
        devices = [load_calibration(directory, cache) for directory in dirs]
        found = tuple(device for device in devices if device is not None)
        return cls(found) if len(found) == len(devices) else None

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {"devices": [dataclasses.asdict(device) for device in self.devices]}


def calibration_directory() -> Path:
    """Where measurements are kept; it need not exist."""
    return user_cache_directory() / "teraio-calibration"


def load_calibration(directory: str | os.PathLike[str], cache: Path | None = None) -> DeviceCalibration | None:
    """What was measured on this directory's hardware before; ``None`` if nothing usable was saved. Never raises.

    Args:
        directory: Need not exist.
        cache: Where measurements are kept; ``None`` for the user's cache.
    """
    name = fingerprint(directory)
    path = (cache if cache is not None else calibration_directory()) / f"{name}.json"
    try:
        content = json_file.read_object(path, kind=_KIND, version=_VERSION)
        known = {field.name for field in dataclasses.fields(DeviceCalibration)}
        device = DeviceCalibration(**{key: value for key, value in content.items() if key in known})
        if device.fingerprint != name:
            raise ValueError(f"it was measured on other hardware, {device.fingerprint}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        _logger.info("ignored the saved measurement %s: %s; `teraio doctor` writes a new one", path, error)
        return None
    return dataclasses.replace(device, path=os.fspath(directory))


def calibrate(
    dirs: Sequence[str | os.PathLike[str]],
    seconds: float = 3.0,
    *,
    most_nbytes: int = _MOST_NBYTES,
    allow_unsafe: bool = False,
) -> Calibration:
    """Measure directories, one after another. Blocks; other work on the machine falsifies the result.

    Args:
        dirs: Directories to spill to. A missing one is made for the measurement and removed again.
        seconds: About how long each takes; slow disks take longer.
        most_nbytes: Disk space to use at most; a tenth of what is free is the other limit.
        allow_unsafe: Measure file systems in memory and on a network too.

    Returns:
        The measurements, not saved yet: see `Calibration.save`.

    Raises:
        ValueError: No time, or no directory.
        SpillDirectoryError: A directory cannot be used.
        StorageFullError: It has too little space for a measurement, some 80 MiB.
        BackendError: A transfer failed: the directory is not fit for use.
        TimeoutError: A transfer did not end.
    """
    if not seconds > 0:
        raise ValueError(f"seconds is {seconds}, expected more than 0; 3 is usual")
    if not dirs:
        raise ValueError("expected at least one directory to measure")
    return Calibration(tuple(_calibrate_one(Path(each), seconds, most_nbytes, allow_unsafe) for each in dirs))


def _calibrate_one(root: Path, seconds: float, most_nbytes: int, allow_unsafe: bool) -> DeviceCalibration:
    root = root.expanduser().absolute()
    missing = [directory for directory in (root, *root.parents) if not directory.exists()]
    try:
        directory = SpillDirectory.create(root, allow_unsafe=allow_unsafe)
        with contextlib.closing(directory):
            return _measure(root, directory, seconds, most_nbytes)
    finally:
        for made in missing:
            with contextlib.suppress(OSError):
                made.rmdir()


def _measure(root: Path, directory: SpillDirectory, seconds: float, most_nbytes: int) -> DeviceCalibration:
    state = os.statvfs(directory.path)
    free_nbytes = state.f_bavail * state.f_frsize
    span_nbytes = disk_trials.span_nbytes(free_nbytes, most_nbytes)
    if span_nbytes == 0:
        raise StorageFullError(
            f"{root} has {free_nbytes} bytes free (limit {most_nbytes}), too few to measure its speed in a tenth of "
            "them. Free some, or name another directory"
        )
    config = BackendConfig(num_workers=disk_trials.MOST_THREADS, starts_ledger=False)
    with contextlib.closing(PosixStore(directory, config)) as store:
        found = disk_trials.DiskTrials(store, span_nbytes=span_nbytes, seconds=seconds).run()
        file = store.file
        mount = find_mount(root)
        return DeviceCalibration(
            path=str(root),
            fingerprint=fingerprint(root),
            device=", ".join(str(device) for device in find_devices(mount)),
            file_system=mount.file_system,
            transport="posix-direct" if file.direct_fd is not None else "posix-buffered",
            reason=file.reason,
            block_nbytes=file.block_nbytes,
            memory_alignment_nbytes=file.memory_alignment,
            measured_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **{field.name: getattr(found, field.name) for field in dataclasses.fields(found)},
        )
