"""What a store is: the words and the protocol every transport implements.

Covers ``Priority``, ``Extent``, ``StoreStatistics`` and the ``Store`` protocol.
It does no I/O; ``posix_store`` and ``testing`` implement the protocol, ``queued_store`` holds what they share.

Rule: a store knows bytes and extents. What the bytes mean, and when to move them, is decided above it.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import mmap

    import torch
    from typing_extensions import Buffer

    from io_backend.ticket import Ticket

    BufferLike: TypeAlias = torch.Tensor | torch.UntypedStorage | Buffer

Operation: TypeAlias = Literal["write", "read"]

_serials = itertools.count(1)


class Priority(enum.IntEnum):
    """In which order queued transfers start: lower first, then in the order of submission."""

    URGENT = 0
    """Compute is waiting for it now."""
    DEADLINE = 1
    """It will be needed at a known time."""
    BACKGROUND = 2
    """Nobody waits for it. Background writes never occupy the last free worker."""


@dataclasses.dataclass(frozen=True, slots=True)
class Extent:
    """A byte range of a store's file, owned by the caller of ``allocate`` until ``free``."""

    file_index: int
    """Which of the store's files."""
    offset: int
    """Byte offset in that file; aligned."""
    nbytes: int
    """Bytes asked for: every transfer moves exactly this many."""
    capacity_nbytes: int
    """Bytes reserved in the file: ``nbytes`` rounded up to the alignment."""
    serial: int = dataclasses.field(default_factory=_serials.__next__)
    """Unique in the process, so that a freed extent is never mistaken for the next one in its place."""

    def __str__(self) -> str:
        return f"extent #{self.serial} ({self.nbytes} bytes at offset {self.offset} of file {self.file_index})"


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceStatistics:
    """What one device of a store has done so far."""

    name: str
    """Its spill directory."""
    written_nbytes: int
    read_nbytes: int
    weight: float = 1.0
    """Its share of new bytes, in proportion to the other devices' weights."""
    out: str = ""
    """Why it gets nothing new any more; empty while it does."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoreStatistics:
    """What a store has done so far and holds now. A snapshot: it does not change."""

    written_nbytes: int
    """Bytes of finished writes, without padding."""
    read_nbytes: int
    """Bytes of finished reads, without padding."""
    write_busy_s: float
    """Seconds in which at least one write was running."""
    read_busy_s: float
    """Seconds in which at least one read was running."""
    paths: Mapping[str, int]
    """Bytes by transport, e.g. ``{"posix-direct": n, "posix-buffered": m}``."""
    num_writes: int
    num_reads: int
    live_nbytes: int
    """File bytes of extents not yet free for reuse (capacity, so padding included)."""
    high_water_nbytes: int
    """The most ``live_nbytes`` has been."""
    file_nbytes: int
    """Bytes the store's files take on disk."""
    largest_free_nbytes: int
    """Largest request that needs no growth. Far below ``file_nbytes - live_nbytes`` means fragmented."""
    queued: int
    """Transfers submitted and not yet started."""
    bounced_nbytes: int = 0
    """Bytes that were copied through staging memory because their buffer was not aligned."""
    devices: tuple[DeviceStatistics, ...] = ()
    """One an SSD; empty for a store without any."""


@runtime_checkable
class Store(Protocol):
    """Keeps bytes outside the training memory and moves them asynchronously.

    Thread safety: every method may be called from any thread. ``free`` and everything on a ``Ticket`` except ``wait``
    may also be called from ``__del__`` during a garbage collection that interrupts this very store.

    Invariants: transfers of one extent happen as if in the order of submission, so a read never sees bytes older than
    the last write before it. An extent's space is reused only after its last transfer and mapping ended.
    """

    def allocate(self, nbytes: int, *, contiguous: bool = False) -> Extent:
        """Space for ``nbytes`` bytes; the caller owns it until ``free``. Its content is undefined until written.

        Args:
            nbytes: 0 or more.
            contiguous: Keep it in one piece, so that it can be mapped; else it may be spread over devices.

        Raises:
            StorageFullError: File system, quota or ``max_spill_nbytes`` exhausted. Nothing was taken.
            BackendUnavailableError: The store is closed or was inherited through a fork.
        """
        ...

    def free(self, extent: Extent) -> None:
        """Give the space back. Never blocks, never raises; a second ``free`` is ignored with a warning in the log.

        Transfers already submitted still run; the space is reused after they end.
        """
        ...

    def write(
        self,
        buffer: BufferLike,
        extent: Extent,
        *,
        priority: Priority = Priority.BACKGROUND,
        after: Callable[[], object] | None = None,
    ) -> Ticket:
        """Start copying ``buffer`` into ``extent``; does not block.

        Args:
            buffer: Contiguous CPU tensor of any dtype, ``torch.UntypedStorage``, or anything with the buffer protocol,
                of exactly ``extent.nbytes`` bytes. The ticket holds it until done; do not change or resize it before.
            extent: A live extent of this store.
            priority: When to start relative to other queued transfers.
            after: Called in the worker before the first byte moves (to wait for a device event there).
                If it raises, the ticket fails and no byte moves.

        Raises:
            ValueError: Wrong size, not contiguous, not on the CPU, or the extent is not live here. Nothing changed.
            BackendUnavailableError: The store is closed or was inherited through a fork. Nothing changed.
        """
        ...

    def read(
        self,
        extent: Extent,
        buffer: BufferLike,
        *,
        priority: Priority = Priority.DEADLINE,
        after: Callable[[], object] | None = None,
    ) -> Ticket:
        """Start copying ``extent`` into ``buffer``; does not block. Arguments and errors as for ``write``.

        The ticket fails with ``CorruptExtentError`` when the extent was never written, or the write before it failed
        or was cancelled. After any failed read the extent is as it was and the buffer's content is undefined.
        """
        ...

    def statistics(self) -> StoreStatistics:
        """Totals since the store was opened, and what it holds now."""
        ...

    @property
    def staging_nbytes(self) -> int:
        """Bytes of staging memory this store holds at most."""
        ...

    def map(self, extent: Extent) -> mmap.mmap:
        """The extent as shared, writable memory backed by the file; waits for transfers of the extent first.

        The space is not reused while the mapping is alive, even after ``free``.

        Raises:
            ValueError: An empty extent, or one that is not live here.
            BackendUnavailableError: This transport has no file to map.
            TimeoutError: Earlier transfers of the extent did not end in time.
        """
        ...

    def close(self, timeout_s: float = 30.0) -> None:
        """Cancel what is queued, wait for what is running, release threads, memory and files. Idempotent.

        Raises:
            TimeoutError: A running transfer did not end within ``timeout_s`` seconds. Nothing more will start; the
                files stay open until it ends. Call ``close`` again.
        """
        ...

    def describe(self) -> str:
        """One line: transport, file system, alignment, and why this transport."""
        ...
