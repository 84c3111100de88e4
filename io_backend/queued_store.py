"""What every store shares: extents and their order of I/O, deferred reuse, submission, statistics, closing.

Covers the ``Store`` protocol above an abstract transport: subclasses say where space comes from and how bytes move.
It does not know files (``posix_store``) nor when to move what (the layers above).

Rules:
- Order: a write waits for every earlier transfer of its extent, a read for the last write before it.
- Reuse: space returns to the allocator only when the extent is freed, its transfers done and its mappings gone.
- Garbage collection: ``free`` only appends to a deque, because a collection may call it while this very thread holds
  the store's lock. The deque is drained under the lock by ``allocate``, submissions and ``statistics``: ``allocate``
  first takes back everything freed before it, so deferring never makes a store look fuller than it is.
"""

from __future__ import annotations

import abc
import dataclasses
import logging
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from io_backend import integrity
from io_backend.buffers import Memory, resolve
from io_backend.config import BackendConfig
from io_backend.errors import BackendUnavailableError
from io_backend.meter import Meter, TransferOutcome
from io_backend.queued_ticket import QueuedTicket
from io_backend.store import DeviceStatistics, Extent, Priority, StoreStatistics
from io_backend.transfer import NO_PATH, ExtentRecord, Transfer
from io_backend.workers import WorkerPool

if TYPE_CHECKING:
    from io_backend.store import BufferLike, Operation
    from io_backend.ticket import Ticket

_logger = logging.getLogger(__name__)
_PRUNE_PENDING = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Space:
    """Bytes of a store's space: in use, most ever in use, taken on disk, and the largest free range in that."""

    live_nbytes: int
    high_water_nbytes: int
    file_nbytes: int
    largest_free_nbytes: int


class QueuedStore(abc.ABC):
    """A store whose transfers run on a pool of worker threads; see the ``Store`` protocol for the contract.

    Thread safety: as the protocol says. The lock guards the records and the subclass's space; it is held for table
    work and for growing a file, never for a transfer.
    """

    def __init__(self, num_workers: int, config: BackendConfig) -> None:
        self.config = config
        self._pid = os.getpid()
        self._closed = False
        self._lock = threading.Lock()
        self.verify = config.verify
        self._records: dict[int, ExtentRecord] = {}
        self._deferred: list[ExtentRecord] = []
        self._freed: deque[Extent] = deque()
        self.meter = Meter()
        self._pool = WorkerPool(num_workers)
        # Workers hold the pool, never the store: an unclosed store can be collected, and then they leave.
        self._stop_workers = weakref.finalize(self, self._pool.request_stop)
        self._stop_workers.atexit = False

    # What a transport provides. The first three are called under the lock.

    @abc.abstractmethod
    def _claim_space(self, nbytes: int) -> Extent:
        """Reserve space; raises StorageFullError."""

    @abc.abstractmethod
    def _return_space(self, extent: Extent) -> None:
        """Take back what ``_claim_space`` gave."""

    @abc.abstractmethod
    def _space(self) -> Space:
        """Account of the space."""

    @abc.abstractmethod
    def move(self, operation: Operation, extent: Extent, memory: Memory) -> TransferOutcome:
        """See `Transport.move`."""

    @abc.abstractmethod
    def location(self, extent: Extent) -> str:
        """See `Transport.location`."""

    @abc.abstractmethod
    def _release(self) -> None:
        """Close files and drop memory; called when no transfer runs any more, possibly twice."""

    @abc.abstractmethod
    def _map(self, extent: Extent) -> mmap.mmap:
        """Map a non-empty extent that no transfer uses."""

    def goes_with(self, transfers: Sequence[Transfer], following: Transfer) -> bool:
        """See `Transport.goes_with`: no, unless a transport says otherwise."""
        return False

    def move_together(self, operation: Operation, pieces: Sequence[tuple[Extent, Memory]]) -> list[TransferOutcome]:
        """See `Transport.move_together`."""
        raise NotImplementedError

    def sums(self, memory: Memory) -> tuple[int, ...]:
        """See `Transport.sums`; transports that reach device memory override it."""
        return integrity.checksums(integrity.chunks(memory))

    def maintain(self) -> None:
        """See `Transport.maintain`: nothing, unless a transport says otherwise."""
        return

    def _devices(self, written_nbytes: int, read_nbytes: int) -> tuple[DeviceStatistics, ...]:
        """Account of the devices, for stores that have one."""
        return ()

    @property
    @abc.abstractmethod
    def staging_nbytes(self) -> int:
        """Bytes of staging memory this store holds at most."""

    @abc.abstractmethod
    def describe(self) -> str:
        """One line: transport, file system, alignment, and why this transport."""

    # The store protocol.

    def __enter__(self) -> QueuedStore:
        return self

    def __exit__(self, *exc_details: object) -> None:
        self.close()

    def allocate(self, nbytes: int, *, contiguous: bool = False) -> Extent:
        """Space for ``nbytes`` bytes; see :meth:`Store.allocate`."""
        if nbytes < 0:
            raise ValueError(f"cannot allocate {nbytes} bytes")
        self.check_usable("allocate")
        with self._lock:
            self._drain_freed()
            extent = self._claim_space(nbytes)
            self._records[extent.serial] = ExtentRecord(extent)
        return extent

    def free(self, extent: Extent) -> None:
        """Give the space back without blocking; see :meth:`Store.free` and the module's rule on garbage collection."""
        self._freed.append(extent)

    def write(
        self,
        buffer: BufferLike,
        extent: Extent,
        *,
        priority: Priority = Priority.BACKGROUND,
        after: Callable[[], object] | None = None,
    ) -> Ticket:
        """Start copying ``buffer`` into ``extent``; see :meth:`Store.write`."""
        return self.submit("write", extent, self.resolve(buffer, "write", extent), priority, after)

    def read(
        self,
        extent: Extent,
        buffer: BufferLike,
        *,
        priority: Priority = Priority.DEADLINE,
        after: Callable[[], object] | None = None,
    ) -> Ticket:
        """Start copying ``extent`` into ``buffer``; see :meth:`Store.read`."""
        return self.submit("read", extent, self.resolve(buffer, "read", extent), priority, after)

    def statistics(self) -> StoreStatistics:
        """Totals since the store was opened, and what it holds now."""
        self._check_process("statistics")
        writes, reads, paths, bounced_nbytes = self.meter.snapshot()
        with self._lock:
            self._drain_freed()
            space = self._space()
        return StoreStatistics(
            written_nbytes=writes.nbytes,
            read_nbytes=reads.nbytes,
            write_busy_s=writes.busy_s,
            read_busy_s=reads.busy_s,
            paths=paths,
            num_writes=writes.num,
            num_reads=reads.num,
            live_nbytes=space.live_nbytes,
            high_water_nbytes=space.high_water_nbytes,
            file_nbytes=space.file_nbytes,
            queued=self._pool.num_queued(),
            largest_free_nbytes=space.largest_free_nbytes,
            bounced_nbytes=bounced_nbytes,
            devices=self._devices(writes.nbytes, reads.nbytes),
        )

    def map(self, extent: Extent) -> mmap.mmap:
        """The extent as shared, writable memory; see :meth:`Store.map`."""
        self.check_usable("map")
        if extent.nbytes == 0:
            raise ValueError(f"cannot map {extent}: it is empty")
        while True:
            with self._lock:
                record = self._live_record(extent)
                pending = record.unfinished()
                if not pending:  # nor may one come between: its order and its sums would be forgotten below
                    mapping = self._map(extent)
                    record.mappings.append(weakref.ref(mapping))
                    # What the caller stores there counts as written.
                    record.filled, record.last_write, record.sums = True, None, None
                    return mapping
            for ticket in pending:
                ticket.wait_until_done()
                if ticket.exception() is not None:
                    _logger.info("mapping %s although an earlier %r did not succeed", extent, ticket)

    def close_soon(self) -> None:
        """The first half of `close`: cancel what is queued, take nothing new. Does not wait."""
        self._closed = True
        self._pool.stop_soon()

    def close(self, timeout_s: float = 30.0) -> None:
        """Cancel what is queued, wait for what runs, release everything; see :meth:`Store.close`."""
        self._closed = True
        self._stop_workers.detach()
        self._pool.stop(timeout_s)
        self._freed.clear()
        self._release()

    def oldest_running_s(self) -> float:
        """Seconds that the longest running transfer has been running; 0 when none runs."""
        return max((ticket.transfer_s for ticket in self._pool.unfinished()), default=0.0)

    # Internals.

    def check_usable(self, operation: str) -> None:
        """Raise BackendUnavailableError when the store is closed or was inherited through a fork."""
        self._check_process(operation)
        if self._closed:
            raise BackendUnavailableError(f"{operation}: this store is closed; open a new one")

    def _check_process(self, operation: str) -> None:
        if os.getpid() != self._pid:
            # The workers did not survive the fork, and a lock may be held by a thread that no longer exists.
            raise BackendUnavailableError(
                f"{operation}: this store belongs to process {self._pid} and does not work in its forked child "
                f"{os.getpid()}; open a store of its own there"
            )

    def _live_record(self, extent: Extent) -> ExtentRecord:
        """The record of an extent that may be used; call under the lock."""
        self._drain_freed()
        record = self._records.get(extent.serial)
        if record is None:
            raise ValueError(f"{extent} is not live in this store: freed already, or allocated by another store")
        return record

    def _drain_freed(self) -> None:
        """Retire the freed extents and return the space of those that nothing uses; call under the lock."""
        while self._freed:
            extent = self._freed.popleft()
            record = self._records.pop(extent.serial, None)
            if record is None:
                _logger.warning("ignored the free of %s: it is not live in this store (freed twice?)", extent)
            else:
                self._deferred.append(record)
        if self._deferred:
            deferred, self._deferred = self._deferred, []
            for record in deferred:
                if record.busy():
                    self._deferred.append(record)
                else:
                    self._return_space(record.extent)

    def resolve(self, buffer: BufferLike, operation: Operation, extent: Extent) -> Memory:
        """Where the bytes of a buffer are; refuses one that does not suit the operation.

        Raises:
            ValueError: Wrong size, not contiguous, on a device this store does not reach, or read-only for a read.
        """
        memory = self._resolve(buffer)
        if memory.nbytes != extent.nbytes:
            raise ValueError(
                f"{operation}: the buffer has {memory.nbytes} bytes, {extent} needs exactly {extent.nbytes}"
            )
        if operation == "read" and memory.readonly:
            raise ValueError(f"read: the buffer for {extent} is read-only")
        return memory

    def submit(
        self,
        operation: Operation,
        extent: Extent,
        memory: Memory,
        priority: Priority,
        after: Callable[[], object] | None,
        *,
        counted: bool = True,
    ) -> QueuedTicket:
        """Queue one transfer, as ``write`` and ``read`` do.

        Args:
            operation: The direction.
            extent: A live extent of this store.
            memory: Of its size, as `resolve` gave it.
            priority: As for ``write``.
            after: As for ``write``.
            counted: Whether it counts as one transfer, or is only a part of one that counts elsewhere.
        """
        self.check_usable(operation)
        with self._lock:
            record = self._live_record(extent)
            source = record.last_write
            if operation == "write":
                dependencies = record.unfinished()
            else:
                dependencies = (source,) if source is not None and not source.done() else ()
            ticket = QueuedTicket(
                operation,
                extent,
                Priority(priority),
                Transfer(self, operation, record, memory, after, source, record.filled, counted),
                pool=self._pool,
                dependencies=dependencies,
                default_timeout_s=self.config.io_timeout_s,
            )
            if operation == "write":
                record.last_write, record.filled = ticket, True
            record.pending.append(ticket)
            if len(record.pending) > _PRUNE_PENDING:
                record.unfinished()
            if extent.nbytes or after is not None:
                self._pool.add(ticket)
        if extent.nbytes == 0 and after is None and ticket.claim():
            self.meter.begin(operation)
            self.meter.end(operation, 0, TransferOutcome(NO_PATH), counted=counted)
            ticket.finish(None)
        return ticket

    def _resolve(self, buffer: BufferLike) -> Memory:
        """Find the caller's bytes; transports that reach device memory override it."""
        return resolve(buffer)
