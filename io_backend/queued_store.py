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
import functools
import logging
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

from io_backend.buffers import Memory, resolve
from io_backend.config import BackendConfig
from io_backend.errors import BackendUnavailableError, CorruptExtentError, map_os_error
from io_backend.meter import Meter, TransferOutcome
from io_backend.store import Extent, Priority, StoreStatistics
from io_backend.ticket import Ticket
from io_backend.workers import WorkerPool

if TYPE_CHECKING:
    from io_backend.store import BufferLike, Operation

_logger = logging.getLogger(__name__)
_PRUNE_PENDING = 8
_NO_PATH = "none"  # what a transfer of no bytes went through


@dataclasses.dataclass(frozen=True, slots=True)
class Space:
    """Bytes of a store's space: in use, most ever in use, and taken on disk."""

    live_nbytes: int
    high_water_nbytes: int
    file_nbytes: int


@dataclasses.dataclass(slots=True)
class _Record:
    """What the store remembers about one live extent."""

    extent: Extent
    filled: bool = False  # written by a transfer or mapped: a read makes sense
    last_write: Ticket | None = None
    pending: list[Ticket] = dataclasses.field(default_factory=list)  # oldest first; done ones are pruned now and then
    mappings: list[weakref.ref[mmap.mmap]] = dataclasses.field(default_factory=list)

    def unfinished(self) -> tuple[Ticket, ...]:
        """Transfers queued or running, oldest first."""
        self.pending = [ticket for ticket in self.pending if not ticket.done()]
        return tuple(self.pending)

    def busy(self) -> bool:
        """Whether a transfer or a mapping still uses the space."""
        mapped = any((mapping := reference()) is not None and not mapping.closed for reference in self.mappings)
        return mapped or bool(self.unfinished())


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
        self._records: dict[int, _Record] = {}
        self._deferred: list[_Record] = []
        self._freed: deque[Extent] = deque()
        self._meter = Meter()
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
    def _transfer(self, operation: Operation, extent: Extent, memory: Memory) -> TransferOutcome:
        """Move ``extent.nbytes`` bytes, blocking, on a worker."""

    @abc.abstractmethod
    def _location(self, extent: Extent) -> str:
        """The path for error messages."""

    @abc.abstractmethod
    def _release(self) -> None:
        """Close files and drop memory; called when no transfer runs any more, possibly twice."""

    @abc.abstractmethod
    def _map(self, extent: Extent) -> mmap.mmap:
        """Map a non-empty extent that no transfer uses."""

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

    def allocate(self, nbytes: int) -> Extent:
        """Space for ``nbytes`` bytes; see :meth:`Store.allocate`."""
        if nbytes < 0:
            raise ValueError(f"cannot allocate {nbytes} bytes")
        self._check_usable("allocate")
        with self._lock:
            self._drain_freed()
            extent = self._claim_space(nbytes)
            self._records[extent.serial] = _Record(extent)
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
        return self._submit("write", extent, buffer, priority, after)

    def read(
        self,
        extent: Extent,
        buffer: BufferLike,
        *,
        priority: Priority = Priority.DEADLINE,
        after: Callable[[], object] | None = None,
    ) -> Ticket:
        """Start copying ``extent`` into ``buffer``; see :meth:`Store.read`."""
        return self._submit("read", extent, buffer, priority, after)

    def statistics(self) -> StoreStatistics:
        """Totals since the store was opened, and what it holds now."""
        self._check_process("statistics")
        writes, reads, paths, bounced_nbytes = self._meter.snapshot()
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
            bounced_nbytes=bounced_nbytes,
        )

    def map(self, extent: Extent) -> mmap.mmap:
        """The extent as shared, writable memory; see :meth:`Store.map`."""
        self._check_usable("map")
        if extent.nbytes == 0:
            raise ValueError(f"cannot map {extent}: it is empty")
        with self._lock:
            pending = self._live_record(extent).unfinished()
        for ticket in pending:
            try:
                ticket.wait()
            except (OSError, CancelledError) as error:
                if not ticket.done():  # the wait itself timed out
                    raise
                _logger.info("mapping %s although an earlier transfer did not succeed: %s", extent, error)
        with self._lock:
            record = self._live_record(extent)
            mapping = self._map(extent)
            record.mappings.append(weakref.ref(mapping))
            record.filled, record.last_write = True, None  # what the caller stores there counts as written
        return mapping

    def close(self, timeout_s: float = 30.0) -> None:
        """Cancel what is queued, wait for what runs, release everything; see :meth:`Store.close`."""
        self._closed = True
        self._stop_workers.detach()
        self._pool.stop(timeout_s)
        self._freed.clear()
        self._release()

    # Internals.

    def _check_usable(self, operation: str) -> None:
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

    def _live_record(self, extent: Extent) -> _Record:
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

    def _submit(
        self,
        operation: Operation,
        extent: Extent,
        buffer: BufferLike,
        priority: Priority,
        after: Callable[[], object] | None,
    ) -> Ticket:
        self._check_usable(operation)
        memory = self._resolve(buffer)
        if memory.nbytes != extent.nbytes:
            raise ValueError(
                f"{operation}: the buffer has {memory.nbytes} bytes, {extent} needs exactly {extent.nbytes}"
            )
        if operation == "read" and memory.readonly:
            raise ValueError(f"read: the buffer for {extent} is read-only")
        with self._lock:
            record = self._live_record(extent)
            source = record.last_write
            if operation == "write":
                dependencies = record.unfinished()
            else:
                dependencies = (source,) if source is not None and not source.done() else ()
            ticket = Ticket(
                operation,
                extent,
                Priority(priority),
                functools.partial(self._run, operation, extent, memory, after, source, record.filled),
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
            self._meter.begin(operation)
            self._meter.end(operation, 0, TransferOutcome(_NO_PATH))
            ticket.finish(None)
        return ticket

    def _resolve(self, buffer: BufferLike) -> Memory:
        """Find the caller's bytes; transports that reach device memory override it."""
        return resolve(buffer)

    def _run(
        self,
        operation: Operation,
        extent: Extent,
        memory: Memory,
        after: Callable[[], object] | None,
        source: Ticket | None,
        filled: bool,
    ) -> None:
        """One transfer, on a worker."""
        if operation == "read" and extent.nbytes:
            self._check_source(extent, source, filled)
        outcome = None
        try:
            if after is not None:
                after()
            self._meter.begin(operation)
            try:
                outcome = self._transfer(operation, extent, memory) if extent.nbytes else TransferOutcome(_NO_PATH)
            finally:
                self._meter.end(operation, extent.nbytes, outcome)
        except OSError as error:
            raise map_os_error(
                error, operation=operation, path=self._location(extent), offset=extent.offset, nbytes=extent.nbytes
            ) from error

    def _check_source(self, extent: Extent, source: Ticket | None, filled: bool) -> None:
        """Refuse to read what was never, or not successfully, written: the space may hold a former owner's bytes."""
        if not filled:
            raise CorruptExtentError(f"read of {extent} in {self._location(extent)}: nothing was ever written to it")
        reason = source.exception() if source is not None else None
        if reason is not None:
            raise CorruptExtentError(
                f"read of {extent} in {self._location(extent)}: the write before it did not succeed, so it holds no "
                f"valid bytes. The write's error: {reason}"
            ) from reason
