"""Settings of the storage backend.

Covers sizes, worker count, limits and timeouts of a store, with the reason of each default.
It reads no environment and no files: whoever opens a store passes the settings in.

Rule: a constructed ``BackendConfig`` is valid; nothing below checks its values again.
"""

from __future__ import annotations

import dataclasses

_KIB = 1024
_MIB = 1024 * _KIB
BLOCK_NBYTES = 4096
"""Unit of file offsets and lengths: what every O_DIRECT device accepts, whatever its logical block."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BackendConfig:
    """How a store moves bytes and how much disk and memory it may take.

    Raises:
        ValueError: A value is out of its range; the message names value, unit and what would be accepted.
    """

    chunk_nbytes: int = 16 * _MIB
    """Bytes per system call, a multiple of 4096. From 4 MiB on one thread keeps a disk busy; larger cost less CPU."""

    num_workers: int = 3
    """I/O threads per spill directory. Three: two for background writes, so that the device has the next one while one
    ends, and one that is always free for an urgent read."""

    bounce_nbytes: int = 8 * _MIB
    """Bytes of staging memory per worker, a multiple of 4096. Allocated at first use, only for unaligned buffers."""

    growth_nbytes: int = 256 * _MIB
    """Bytes by which a spill file grows at least. Preallocated, so a full disk shows at ``allocate``, not mid-write."""

    reserve_free_nbytes: int | None = None
    """Bytes left free on each file system. ``None``: 1 GiB or 5 % of it, whichever is less."""

    max_spill_nbytes: int | None = None
    """Most bytes the spill files may take on disk together. ``None``: what the file systems allow."""

    allow_unsafe_spill: bool = False
    """Accept a directory in RAM (tmpfs) or on a network file system. The first saves nothing, the second is slow."""

    direct_io: bool = True
    """Try O_DIRECT first. Off forces the page cache path, for comparison and for file systems with faulty O_DIRECT."""

    verify: bool = False
    """Keep a checksum of every 4 MiB written and check it when they are read back."""

    coalesce_nbytes: int = 1 * _MIB
    """Queued transfers up to this size that lie side by side in the file go in one system call. 0: never."""

    starts_ledger: bool = True
    """Count bytes written and read in a small file in the spill directory (`read_ledger`). Off: only in one that is
    there already, for measurements, which leave nothing behind."""

    io_timeout_s: float = 120.0
    """Seconds ``Ticket.wait()`` waits when not told otherwise. Far above any healthy transfer."""

    def __post_init__(self) -> None:
        for name in ("chunk_nbytes", "bounce_nbytes", "growth_nbytes"):
            self._check_blocks(name)
        if not 1 <= self.num_workers <= 64:
            raise ValueError(f"num_workers is {self.num_workers} threads, expected 1 to 64; 2 suits most disks")
        for name in ("reserve_free_nbytes", "max_spill_nbytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} is {value} bytes, expected 0 or more; leave it None for the default")
        if not self.io_timeout_s > 0:
            raise ValueError(f"io_timeout_s is {self.io_timeout_s} seconds, expected more than 0; the default is 120")

    def _check_blocks(self, name: str) -> None:
        """Refuse sizes that O_DIRECT or one system call (under 2 GiB) could not take."""
        value = getattr(self, name)
        most_nbytes = 1024 * _MIB if name != "growth_nbytes" else 1 << 50
        if value % BLOCK_NBYTES or not BLOCK_NBYTES <= value <= most_nbytes:
            rounded = max(BLOCK_NBYTES, min(most_nbytes, value // BLOCK_NBYTES * BLOCK_NBYTES))
            raise ValueError(
                f"{name} is {value} bytes, expected a multiple of {BLOCK_NBYTES} up to {most_nbytes}; try {rounded}"
            )
