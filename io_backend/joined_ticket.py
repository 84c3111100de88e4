"""The ticket of a transfer that consists of several, one a device.

Covers being one ticket towards the caller: done when all parts are, failed when one is, cancelled all or nothing. It
runs nothing: the parts' pools do.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

from io_backend.ticket import Ticket

if TYPE_CHECKING:
    from io_backend.queued_ticket import QueuedTicket
    from io_backend.store import Extent, Operation, Priority

_logger = logging.getLogger(__name__)


class JoinedTicket(Ticket):
    """See `Ticket`. It keeps no buffer: the parts do."""

    __slots__ = ("_callbacks", "_default_timeout_s", "_parts")

    def __init__(
        self,
        operation: Operation,
        extent: Extent,
        priority: Priority,
        parts: Sequence[QueuedTicket],
        *,
        default_timeout_s: float,
    ) -> None:
        super().__init__(operation, extent, priority)
        self._parts = tuple(parts)
        self._default_timeout_s = default_timeout_s
        self._callbacks: deque[Callable[[Ticket], object]] = deque()
        for part in self._parts:
            part.add_done_callback(self._part_done)

    @property
    def started(self) -> bool:
        """See `Ticket`."""
        return any(part.started for part in self._parts)

    @property
    def cancelled(self) -> bool:
        """See `Ticket`."""
        return all(part.cancelled for part in self._parts)

    @property
    def elapsed_s(self) -> float:
        """See `Ticket`."""
        return max(part.elapsed_s for part in self._parts)

    @property
    def transfer_s(self) -> float:
        """See `Ticket`."""
        return max(part.transfer_s for part in self._parts)

    def done(self) -> bool:
        """See `Ticket`."""
        return all(part.done() for part in self._parts)

    def exception(self) -> BaseException | None:
        """See `Ticket`. Of several, the one that is not a mere consequence of a cancellation."""
        if not self.done():
            return None
        errors = [error for part in self._parts if (error := part.exception()) is not None]
        return min(errors, key=lambda error: isinstance(error, CancelledError), default=None)

    def wait(self, timeout_s: float | None = None) -> None:
        """See `Ticket`."""
        deadline_s = time.monotonic() + (self._default_timeout_s if timeout_s is None else timeout_s)
        for part in self._parts:
            part.wait_until_done(max(0.0, deadline_s - time.monotonic()))
        error = self.exception()
        if error is not None:
            try:
                raise error
            finally:
                error.__traceback__ = None  # as for a single one: frames must not pile up

    def cancel(self) -> bool:
        """See `Ticket`. If one part has started, none is cancelled."""
        claimed: list[QueuedTicket] = []
        for part in self._parts:
            if not part.claim():
                for other in claimed:
                    other.unclaim()
                return self.cancelled
            claimed.append(part)
        for part in claimed:
            part.take_back()
        return True

    def raise_priority(self, priority: Priority) -> None:
        """See `Ticket`."""
        if priority < self.priority:
            self.priority = priority
            for part in self._parts:
                part.raise_priority(priority)

    def add_done_callback(self, fn: Callable[[Ticket], object]) -> None:
        """See `Ticket`."""
        self._callbacks.append(fn)
        if self.done():
            self._run_callbacks()

    def _part_done(self, part: Ticket) -> None:
        if self.done():
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        with contextlib.suppress(IndexError):  # another thread took the last one
            while self._callbacks:
                self._run(self._callbacks.popleft())

    def _run(self, callback: Callable[[Ticket], object]) -> None:
        try:
            callback(self)
        except Exception:
            _logger.exception("a completion callback of %r raised; the transfer itself is unaffected", self)


class Once:
    """A callable that several parts call and that runs once; the others wait for it and share its failure.

    Thread safety: called from any thread.
    """

    def __init__(self, function: Callable[[], object]) -> None:
        self._function: Callable[[], object] | None = function
        self._failure: BaseException | None = None
        self._lock = threading.Lock()

    def __call__(self) -> None:
        """Run the function, or wait until it has run."""
        with self._lock:
            if self._function is not None:
                function, self._function = self._function, None
                try:
                    function()
                except BaseException as error:  # whatever it was: the other parts must not move a byte
                    self._failure = error
            if self._failure is not None:
                raise self._failure
