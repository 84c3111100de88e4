"""Stores for tests: one in memory, one that fails on purpose. Shipped, so that users can test their own code.

Covers ``MemoryStore`` (the whole contract without a disk) and ``FaultStore`` (any store, plus scripted errors and
delays).
It does not replace tests on a real file system; those are parametrised over the same contract.

Rule: both use the real queue and worker threads. A race is provoked with ``hold(event)``, never with a sleep.

Example:
    >>> event, reached = threading.Event(), threading.Event()
    >>> store = FaultStore(MemoryStore(), [Fault("write", hold(event, reached), index=0)])
    >>> ticket = store.write(buffer, extent)
    >>> reached.wait(10)  # the write is in its worker now and stays there until event.set()
"""

from __future__ import annotations

import dataclasses
import errno as errno_codes
import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from io_backend.buffers import Memory, copy_bytes, resolve
from io_backend.config import BLOCK_NBYTES, BackendConfig
from io_backend.errors import BackendUnavailableError, ShortTransferError, StorageFullError, map_os_error
from io_backend.meter import TransferOutcome
from io_backend.queued_store import QueuedStore, Space
from io_backend.store import Extent, Priority, StoreStatistics

if TYPE_CHECKING:
    from io_backend.store import BufferLike, Operation, Store
    from io_backend.ticket import Ticket

Action: TypeAlias = Callable[[str, Extent | None], None]
_HOLD_TIMEOUT_S = 60.0


class MemoryStore(QueuedStore):
    """Keeps the bytes of each extent in memory of its own; path ``"memory"``.

    Thread safety and invariants: as the ``Store`` protocol says. Space freed is given back to the system, not recycled.
    """

    def __init__(self, config: BackendConfig | None = None, *, capacity_nbytes: int | None = None) -> None:
        """Start the workers.

        Args:
            config: Settings; ``None`` takes the defaults.
            capacity_nbytes: Most bytes the extents may take together; ``None`` for no limit.
        """
        self._capacity_nbytes = capacity_nbytes
        self._contents: dict[int, Memory] = {}
        self._next_offset = 0
        self._live_nbytes = 0
        self._high_water_nbytes = 0
        config = config if config is not None else BackendConfig()
        super().__init__(config.num_workers, config)

    @property
    def staging_nbytes(self) -> int:
        """None: bytes are copied straight."""
        return 0

    def describe(self) -> str:
        """One line."""
        return f"memory store with {self._pool.num_workers} workers, no alignment: for tests, spills nothing"

    def _claim_space(self, nbytes: int) -> Extent:
        capacity_nbytes = -(-nbytes // BLOCK_NBYTES) * BLOCK_NBYTES
        if self._capacity_nbytes is not None and self._live_nbytes + capacity_nbytes > self._capacity_nbytes:
            raise StorageFullError(
                errno_codes.ENOSPC,
                f"the memory store holds {self._live_nbytes} of capacity_nbytes={self._capacity_nbytes}: "
                f"no room for {capacity_nbytes} bytes. Free extents or raise capacity_nbytes",
            )
        extent = Extent(0, self._next_offset, nbytes, capacity_nbytes)
        if nbytes:
            self._contents[extent.serial] = resolve(bytearray(nbytes))
        self._next_offset += capacity_nbytes
        self._live_nbytes += capacity_nbytes
        self._high_water_nbytes = max(self._high_water_nbytes, self._live_nbytes)
        return extent

    def _return_space(self, extent: Extent) -> None:
        self._contents.pop(extent.serial, None)
        self._live_nbytes -= extent.capacity_nbytes

    def _space(self) -> Space:
        return Space(self._live_nbytes, self._high_water_nbytes, 0, 0)

    def move(self, operation: Operation, extent: Extent, memory: Memory) -> TransferOutcome:
        content = self._contents[extent.serial]
        target, source = (content, memory) if operation == "write" else (memory, content)
        copy_bytes(target.address, source.address, extent.nbytes)
        return TransferOutcome("memory")

    def _map(self, extent: Extent) -> mmap.mmap:
        raise BackendUnavailableError(f"cannot map {extent}: a memory store has no file; use a posix store")

    def location(self, extent: Extent) -> str:
        return "<memory>"

    def _release(self) -> None:
        self._contents.clear()


def fail(errno: int = errno_codes.EIO) -> Action:
    """The operation fails with this error number, before any byte moves."""

    def action(operation: str, extent: Extent | None) -> None:
        raise OSError(errno, f"scripted: {os.strerror(errno)}")

    return action


def short(moved_nbytes: int) -> Action:
    """The operation fails as if the system had stopped after ``moved_nbytes`` bytes."""

    def action(operation: str, extent: Extent | None) -> None:
        raise ShortTransferError(f"scripted: {operation} of {extent} stopped after {moved_nbytes} bytes")

    return action


def hold(event: threading.Event, reached: threading.Event | None = None) -> Action:
    """The operation stays in its worker until ``event`` is set; ``reached`` is set when it got there.

    Fails the ticket with ``TimeoutError`` if the event is not set within 60 seconds.
    """

    def action(operation: str, extent: Extent | None) -> None:
        if reached is not None:
            reached.set()
        if not event.wait(_HOLD_TIMEOUT_S):
            raise TimeoutError(
                f"scripted: {operation} of {extent} was held, the event not set in {_HOLD_TIMEOUT_S:g} s"
            )

    return action


def slow(seconds: float) -> Action:
    """The operation takes this much longer."""

    def action(operation: str, extent: Extent | None) -> None:
        time.sleep(seconds)

    return action


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """What happens to which operations."""

    operation: Literal["allocate", "write", "read"]
    action: Action
    """``fail``, ``short``, ``hold``, ``slow``, or a callable of (operation, extent); no extent for allocate."""
    index: int | None = None
    """Only the operation with this number, counted from 0 per kind in the order of the calls; ``None``: all of them."""
    where: Callable[[Extent], bool] | None = None
    """Only operations on extents for which this is true; ``None``: all of them. Not asked for allocate."""

    def matches(self, operation: str, index: int, extent: Extent | None) -> bool:
        """Whether this call is meant."""
        if operation != self.operation or (self.index is not None and index != self.index):
            return False
        return self.where is None or extent is None or self.where(extent)


class FaultStore:
    """Any store with a script of faults; without faults it behaves as the store inside.

    ``allocate`` faults act in the caller, ``write`` and ``read`` faults in the worker, before the caller's ``after``.

    Thread safety: as the inner store; ``add`` may be called while it is in use.
    """

    def __init__(self, inner: Store, script: Sequence[Fault] = ()) -> None:
        self.inner = inner
        self._script = list(script)
        self._counters = {operation: itertools.count() for operation in ("allocate", "write", "read")}

    def add(self, fault: Fault) -> None:
        """Append to the script; applies to the calls from now on."""
        self._script.append(fault)

    def clear(self) -> None:
        """Drop the script; what is already submitted keeps its faults."""
        self._script = []

    def _due(self, operation: str, extent: Extent | None) -> list[Action]:
        index = next(self._counters[operation])
        return [fault.action for fault in self._script if fault.matches(operation, index, extent)]

    def _after(self, operation: str, extent: Extent, after: Callable[[], object] | None) -> Callable[[], object] | None:
        actions = self._due(operation, extent)
        if not actions:
            return after

        def act() -> None:
            for action in actions:
                action(operation, extent)
            if after is not None:
                after()

        return act

    def allocate(self, nbytes: int, *, contiguous: bool = False) -> Extent:
        """As the inner store, after the script's ``allocate`` faults; their ``OSError`` arrives as a typed error."""
        for action in self._due("allocate", None):
            try:
                action("allocate", None)
            except OSError as error:
                raise map_os_error(error, operation="allocate", path="<script>", offset=0, nbytes=nbytes) from error
        return self.inner.allocate(nbytes, contiguous=contiguous)

    def free(self, extent: Extent) -> None:
        """As the inner store."""
        self.inner.free(extent)

    def write(
        self,
        buffer: BufferLike,
        extent: Extent,
        *,
        priority: Priority = Priority.BACKGROUND,
        after: Callable[[], object] | None = None,
    ) -> Ticket:
        """As the inner store, with the script's ``write`` faults in the worker."""
        return self.inner.write(buffer, extent, priority=priority, after=self._after("write", extent, after))

    def read(
        self,
        extent: Extent,
        buffer: BufferLike,
        *,
        priority: Priority = Priority.DEADLINE,
        after: Callable[[], object] | None = None,
    ) -> Ticket:
        """As the inner store, with the script's ``read`` faults in the worker."""
        return self.inner.read(extent, buffer, priority=priority, after=self._after("read", extent, after))

    def statistics(self) -> StoreStatistics:
        """As the inner store."""
        return self.inner.statistics()

    @property
    def staging_nbytes(self) -> int:
        """As the inner store."""
        return self.inner.staging_nbytes

    def map(self, extent: Extent) -> mmap.mmap:
        """As the inner store."""
        return self.inner.map(extent)

    def close(self, timeout_s: float = 30.0) -> None:
        """As the inner store."""
        self.inner.close(timeout_s)

    def describe(self) -> str:
        """As the inner store, and how many faults are scripted."""
        return f"{self.inner.describe()} with {len(self._script)} scripted faults"
