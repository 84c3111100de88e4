"""The handle of one submitted transfer, as callers see it.

Covers waiting, cancelling, priority changes and completion callbacks. How a transfer runs is its maker's business:
``queued_ticket`` for one on a pool, ``joined_ticket`` for one that consists of several.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from io_backend.store import Extent, Operation, Priority


class Ticket(abc.ABC):
    """One transfer: queued, then running, then done (succeeded, failed or cancelled).

    Holds the buffer and the store's files until it is done; then drops them.

    Thread safety: all methods from any thread; all but ``wait`` also from ``__del__``.
    """

    __slots__ = ("__weakref__", "extent", "operation", "priority")

    def __init__(self, operation: Operation, extent: Extent, priority: Priority) -> None:
        self.operation: Operation = operation
        self.extent = extent
        self.priority = priority

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.operation} of {self.extent}, {self.state}>"

    @property
    def nbytes(self) -> int:
        """Bytes that it moves."""
        return self.extent.nbytes

    @property
    def state(self) -> str:
        """``queued``, ``running``, ``done``, ``failed`` or ``cancelled``."""
        if not self.done():
            return "running" if self.started else "queued"
        if self.cancelled:
            return "cancelled"
        return "done" if self.exception() is None else "failed"

    @property
    @abc.abstractmethod
    def started(self) -> bool:
        """Whether a worker has begun this transfer; it can no longer be cancelled then."""

    @property
    @abc.abstractmethod
    def cancelled(self) -> bool:
        """Whether ``cancel`` succeeded."""

    @property
    @abc.abstractmethod
    def elapsed_s(self) -> float:
        """Seconds from submission until done, or until now."""

    @property
    @abc.abstractmethod
    def transfer_s(self) -> float:
        """Seconds from the start in a worker (``after`` included) until done, or until now; 0 if not started."""

    @abc.abstractmethod
    def done(self) -> bool:
        """Whether the transfer has succeeded, failed or been cancelled."""

    @abc.abstractmethod
    def exception(self) -> BaseException | None:
        """Why the transfer failed, ``CancelledError`` if cancelled, ``None`` if it succeeded or is not done."""

    @abc.abstractmethod
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

    @abc.abstractmethod
    def cancel(self) -> bool:
        """Take the transfer back if no worker has started it.

        Returns:
            True if it will never run (``wait`` then raises ``CancelledError``), False if it is running or done.
        """

    @abc.abstractmethod
    def raise_priority(self, priority: Priority) -> None:
        """Start earlier than planned: re-queues a queued transfer and what it depends on. Never lowers a priority."""

    @abc.abstractmethod
    def add_done_callback(self, fn: Callable[[Ticket], object]) -> None:
        """Call ``fn(ticket)`` when done: in the worker, in the canceller's thread if cancelled, at once if done.

        It must not block: it holds up a worker. Its exceptions are logged and dropped.
        """
