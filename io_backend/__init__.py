"""Bytes on SSDs: extents, asynchronous transfers, leased spill directories.

Covers moving a buffer's bytes to a file and back, on worker threads, and the space they take there.
It does not know tensors' meaning, plans or autograd: the packages above do.

Rule: this module only re-exports; importing it opens nothing, starts no thread and does not import torch.
"""

from io_backend.calibration import Calibration, DeviceCalibration, calibrate, load_calibration
from io_backend.config import BackendConfig
from io_backend.errors import (
    BackendError,
    BackendUnavailableError,
    CorruptExtentError,
    ShortTransferError,
    SpillDirectoryError,
    StorageFullError,
)
from io_backend.host_memory import free_nbytes, machine_nbytes
from io_backend.host_store import HostStore
from io_backend.ledger import Ledger, read_ledger
from io_backend.opening import open_store
from io_backend.orphans import Reclaimed, reclaim
from io_backend.posix_store import PosixStore
from io_backend.spill_directory import SpillDirectory
from io_backend.store import DeviceStatistics, Extent, Priority, Store, StoreStatistics
from io_backend.ticket import Ticket

__all__ = [
    "BackendConfig",
    "BackendError",
    "BackendUnavailableError",
    "Calibration",
    "CorruptExtentError",
    "DeviceCalibration",
    "DeviceStatistics",
    "Extent",
    "HostStore",
    "Ledger",
    "PosixStore",
    "Priority",
    "Reclaimed",
    "ShortTransferError",
    "SpillDirectory",
    "SpillDirectoryError",
    "StorageFullError",
    "Store",
    "StoreStatistics",
    "Ticket",
    "calibrate",
    "free_nbytes",
    "load_calibration",
    "machine_nbytes",
    "open_store",
    "read_ledger",
    "reclaim",
]
