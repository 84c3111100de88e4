"""The handle of one submitted transfer.

Covers waiting, cancelling, priority changes, completion callbacks, and who holds the buffer meanwhile.
It does not run anything: ``workers`` claims a ticket, runs its work and finishes it.

Rule: no method runs Python code under a lock. A garbage collection may run ``__del__`` methods in any thread at any
moment, also in one that is inside this module or in the pool, and those may cancel tickets or free extents. The right
to start is one item in a deque, popped once; completion is a raw lock, released once; callbacks sit in a deque, each
popped once.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from io_backend.store import Extent, Operation, Priority
    from io_backend.workers import WorkerPool

_logger = logging.getLogger(__name__)
_serials = itertools.count(1)
_WAIT_SLICE_S = 1.0


class Ticket:
    """One transfer: queued, then running, then done (succeeded, failed or cancelled).

    Holds the buffer and, through its work, the store and its files until it is done; then drops them.

    Thread safety: all methods from any thread; all but ``wait`` also from ``__del__``.
    """

    __slots__ = (
        "__weakref__",
        "_callbacks",
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
        "cancelled",
        "dependencies",
        "extent",
        "nbytes",
        "operation",
        "priority",
        "serial",
    )

    def __init__(
        self,
        operation: Operation,
        extent: Extent,
        priority: Priority,
        work: Callable[[], object],
        *,
        pool: WorkerPool,
        dependencies: tuple[Ticket, ...] = (),
        default_timeout_s: float = 120.0,
    ) -> None:
        self.operation: Operation = operation
        self.extent = extent
        self.nbytes = extent.nbytes
        self.priority = priority
        self.serial = next(_serials)
        self.dependencies = dependencies
        """Tickets that must be done before this one may start, oldest first."""
        self.cancelled = False
        """True once ``cancel`` succeeded."""
        self._work: Callable[[], object] | None = work
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

    def __repr__(self) -> str:
        return f"<Ticket {self.serial}: {self.operation} of {self.extent}, {self.state}>"

    @property
    def state(self) -> str:
        """``queued``, ``running``, ``done``, ``failed`` or ``cancelled``."""
        if not self._finished:
            return "running" if self.started else "queued"
        if self.cancelled:
            return "cancelled"
        return "done" if self._exception is None else "failed"

    @property
    def started(self) -> bool:
        """Whether a worker has begun this transfer; it can no longer be cancelled then."""
        return self._started_s is not None

    @property
    def elapsed_s(self) -> float:
        """Seconds from submission until done, or until now."""
        return (self._finished_s if self._finished_s is not None else time.monotonic()) - self._submitted_s

    @property
    def transfer_s(self) -> float:
        """Seconds from the start in a worker (``after`` included) until done, or until now; 0 if not started."""
        if self._started_s is None:
            return 0.0
        return (self._finished_s if self._finished_s is not None else time.monotonic()) - self._started_s

    def done(self) -> bool:
        """Whether the transfer has succeeded, failed or been cancelled."""
        return self._finished

    def exception(self) -> BaseException | None:
        """Why the transfer failed, ``CancelledError`` if cancelled, ``None`` if it succeeded or is not done."""
        return self._exception

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the transfer is done.

        Args:
            timeout_s: Seconds to wait at most; ``None`` takes the store's ``io_timeout_s``. Never endless.

        Raises:
            BackendError: The transfer failed; see the subclasses. After a failed write the buffer is unchanged, after a
                failed read the extent is.
            CancelledError: The transfer was cancelled.
            TimeoutError: It is not done yet. It goes on; wait again or give up.
        """
        limit_s = self._default_timeout_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + limit_s
        while not self._finished:
            # In slices: a waiter interrupted between its acquire and release below would leave the latch taken.
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(self._timeout_text(limit_s))
            if self._latch.acquire(timeout=min(left_s, _WAIT_SLICE_S)):
                self._latch.release()
        if self._exception is not None:
            try:
                raise self._exception
            finally:
                # The same object may be raised again: do not let tracebacks and the frames in them pile up.
                self._exception.__traceback__ = None

    def cancel(self) -> bool:
        """Take the transfer back if no worker has started it.

        Returns:
            True if it will never run (``wait`` then raises ``CancelledError``), False if it is running or done.
        """
        if not self.claim():
            return self.cancelled
        self.cancelled = True
        self.finish(CancelledError(f"{self.operation} of {self.extent} was cancelled before it started"))
        return True

    def raise_priority(self, priority: Priority) -> None:
        """Start earlier than planned: re-queues a queued transfer and what it depends on. Never lowers a priority."""
        if priority >= self.priority or self.started or self._finished:
            return
        self.priority = priority
        self._pool.submit(self)

    def add_done_callback(self, fn: Callable[[Ticket], object]) -> None:
        """Call ``fn(ticket)`` when done: in the worker, in the canceller's thread if cancelled, at once if done.

        It must not block: it holds up a worker. Its exceptions are logged and dropped.
        """
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

    def begin(self) -> Callable[[], object]:
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
