"""The ticket of a transfer that runs on a pool of workers.

Covers the right to start it, completion, callbacks, and who holds the buffer meanwhile. It does not run anything:
``workers`` claims a ticket, runs its work and finishes it.

Rule: no method runs Python code under a lock. A garbage collection may run ``__del__`` methods in any thread at any
moment, also in one that is inside this module or in the pool, and those may cancel tickets or free extents. The right
to start is one item in a deque, popped once; completion is a raw lock, released once; callbacks sit in a deque, each
popped once.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Protocol

from io_backend.ticket import Ticket

if TYPE_CHECKING:
    from io_backend.store import Extent, Operation, Priority
    from io_backend.workers import WorkerPool

_logger = logging.getLogger(__name__)
_serials = itertools.count(1)
_WAIT_SLICE_S = 1.0
_SUSPICIOUS_S = 10.0
"""A wait this long is no healthy disk's: what waits and what runs goes to the log."""


class Work(Protocol):
    """What a ticket runs; it holds the buffer and the store."""

    def __call__(self) -> object:
        """Move the bytes, on a worker; raises whatever goes wrong."""
        ...

    def joins(self, works: Sequence[Work], following: Work) -> bool:
        """Whether one system call could carry `following` behind `works`, of which this is the first."""
        ...

    def run_together(self, works: Sequence[Work]) -> list[BaseException | None]:
        """Move the bytes of `works`, this one first, and say for each how it went."""
        ...


class QueuedTicket(Ticket):
    """See `Ticket`."""

    __slots__ = (
        "_callbacks",
        "_cancelled",
        "_continuations",
        "_default_timeout_s",
        "_exception",
        "_finished",
        "_finished_s",
        "_latch",
        "_pool",
        "_right_to_start",
        "_started_s",
        "_submitted_s",
        "_work",
        "dependencies",
        "serial",
    )

    def __init__(
        self,
        operation: Operation,
        extent: Extent,
        priority: Priority,
        work: Work,
        *,
        pool: WorkerPool,
        dependencies: tuple[QueuedTicket, ...] = (),
        default_timeout_s: float = 120.0,
    ) -> None:
        super().__init__(operation, extent, priority)
        self.serial = next(_serials)
        self.dependencies = dependencies
        """Tickets that must be done before this one may start, oldest first."""
        self._cancelled = False
        self._work: Work | None = work
        self._pool = pool
        self._default_timeout_s = default_timeout_s
        self._right_to_start: deque[None] = deque([None])
        self._latch = threading.Lock()
        self._latch.acquire()
        self._finished = False
        self._exception: BaseException | None = None
        self._continuations: deque[Callable[[], object]] = deque()
        self._callbacks: deque[Callable[[Ticket], object]] = deque()
        self._submitted_s = time.monotonic()
        self._started_s: float | None = None
        self._finished_s: float | None = None

    @property
    def started(self) -> bool:
        """See `Ticket`."""
        return self._started_s is not None

    @property
    def cancelled(self) -> bool:
        """See `Ticket`."""
        return self._cancelled

    @property
    def work(self) -> Work | None:
        """What it will run; ``None`` once it has begun, or never will."""
        return self._work

    @property
    def elapsed_s(self) -> float:
        """See `Ticket`."""
        return (self._finished_s if self._finished_s is not None else time.monotonic()) - self._submitted_s

    @property
    def transfer_s(self) -> float:
        """See `Ticket`."""
        if self._started_s is None:
            return 0.0
        return (self._finished_s if self._finished_s is not None else time.monotonic()) - self._started_s

    def done(self) -> bool:
        """See `Ticket`."""
        return self._finished

    def exception(self) -> BaseException | None:
        """See `Ticket`."""
        return self._exception

    def wait(self, timeout_s: float | None = None) -> None:
        """See `Ticket`."""
        self.wait_until_done(timeout_s)
        if self._exception is not None:
            try:
                raise self._exception
            finally:
                # The same object may be raised again: do not let tracebacks and the frames in them pile up.
                self._exception.__traceback__ = None

    def wait_until_done(self, timeout_s: float | None = None) -> None:
        """As ``wait``, without raising what the transfer failed with."""
        limit_s = self._default_timeout_s if timeout_s is None else timeout_s
        start_s = time.monotonic()
        deadline_s = start_s + limit_s
        suspicious_s = start_s + _SUSPICIOUS_S
        while not self._finished:
            # In slices: a waiter interrupted between its acquire and release below would leave the latch taken.
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(self._timeout_text(limit_s))
            if time.monotonic() >= suspicious_s:
                suspicious_s = math.inf
                _logger.warning("waiting for %s since %g s. %s", repr(self), _SUSPICIOUS_S, self._pool.dump_queue())
            if self._latch.acquire(timeout=min(left_s, _WAIT_SLICE_S)):
                self._latch.release()

    def cancel(self) -> bool:
        """See `Ticket`."""
        if not self.claim():
            return self._cancelled
        self.take_back()
        return True

    def raise_priority(self, priority: Priority) -> None:
        """See `Ticket`."""
        if priority >= self.priority or self.started or self._finished:
            return
        self.priority = priority
        self._pool.submit(self)

    def add_done_callback(self, fn: Callable[[Ticket], object]) -> None:
        """See `Ticket`."""
        self._callbacks.append(fn)
        if self._finished:
            self._run_callbacks()

    def add_continuation(self, fn: Callable[[], object]) -> None:
        """As ``add_done_callback``, for the pool itself: runs before every user callback."""
        self._continuations.append(fn)
        if self._finished:
            self._run_continuations()

    def claim(self) -> bool:
        """Take the one right to start (or cancel) this ticket; True for exactly one caller."""
        try:
            self._right_to_start.pop()
        except IndexError:
            return False
        return True

    def take_back(self) -> None:
        """Cancel the claimed ticket."""
        self._cancelled = True
        self.finish(CancelledError(f"{self.operation} of {self.extent} was cancelled before it started"))

    def unclaim(self) -> None:
        """Give the claimed right to start back, unused: the transfer is queued again."""
        self._right_to_start.append(None)
        self._pool.submit(self)

    def begin(self) -> Work:
        """Mark the claimed ticket as started and hand its work over; for workers only."""
        self._started_s = time.monotonic()
        work, self._work = self._work, None
        if work is None:
            raise RuntimeError(f"{self!r} was started twice")
        return work

    def finish(self, exception: BaseException | None) -> None:
        """Record the outcome, drop the buffer, wake waiters, then run callbacks; called once, by whoever claimed it."""
        self._work = None
        self.dependencies = ()
        self._exception = exception
        self._finished_s = time.monotonic()
        self._finished = True
        self._pool.forget(self)
        self._latch.release()
        self._run_continuations()
        self._run_callbacks()

    def _run_continuations(self) -> None:
        while self._continuations:
            try:
                continuation = self._continuations.popleft()
            except IndexError:  # another thread took the last one
                return
            continuation()

    def _run_callbacks(self) -> None:
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                callback(self)
            except Exception:
                _logger.exception("a completion callback of %r raised; the transfer itself is unaffected", self)

    def _timeout_text(self, limit_s: float) -> str:
        return (
            f"{self.operation} of {self.extent} is {self.state} after {self.elapsed_s:.1f} s (waited {limit_s:g} s); "
            f"{self._pool.describe_queue()}. It goes on: wait again, raise io_timeout_s, or check the device"
        )
