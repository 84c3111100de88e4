"""The threads that carry transfers out, and the order in which they do.

Covers the priority queue, dependencies between tickets, the worker kept free for urgent work, stopping.
It does not know what a transfer is: it runs a ticket's work and reports the outcome to the ticket.

Rule (lock-free hand-over): ``submit``, ``forget`` and ``request_stop`` may run inside a garbage collection in any
thread, also in a worker that holds the queue lock. So they only append to a deque, pop from a dict or put a token into
a ``SimpleQueue`` (whose ``put`` is re-entrant). Only workers take the queue lock, to sort what was handed over.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import logging
import os
import queue
import threading
import time
import traceback
from collections import deque
from typing import TYPE_CHECKING, TypeAlias

from io_backend.errors import BackendUnavailableError
from io_backend.store import Priority

if TYPE_CHECKING:
    from io_backend.queued_ticket import QueuedTicket, Work

    _Entry: TypeAlias = tuple[int, int, int, QueuedTicket]

_logger = logging.getLogger(__name__)
_IDLE_WAKE_S = 60.0
_MOST_DUMPED = 50
_LEAVE_S = 1.0


class WorkerPool:
    """A few daemon threads over one priority queue of tickets.

    Thread safety: all methods from any thread; see the module's rule for those that garbage collection may call.

    Invariants: a ticket starts after its dependencies are done. Background writes occupy at most all workers but one
    (the only one, if there is just one). A worker survives whatever a ticket's work raises.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._pid = os.getpid()
        self._inbox: deque[_Entry] = deque()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._entry_numbers = itertools.count()
        self._unfinished: dict[int, QueuedTicket] = {}
        self._stopping = False
        self._lock = threading.Lock()  # guards the three fields below; taken by workers only
        self._foreground: list[_Entry] = []
        self._background_writes: list[_Entry] = []
        self._num_background_running = 0
        self._threads = [
            threading.Thread(target=_work_until_stopped, args=(self,), name=f"teraio-io-{index}", daemon=True)
            for index in range(num_workers)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:
            self.request_stop()
            raise BackendUnavailableError(f"could not start {num_workers} I/O threads: {error}") from error

    def add(self, ticket: QueuedTicket) -> None:
        """Take a new ticket in; it starts when its dependencies are done and a worker is free."""
        self._unfinished[ticket.serial] = ticket
        if ticket.done():  # queued by a dependent one and finished before it got here
            self.forget(ticket)
        self.submit(ticket)

    def submit(self, ticket: QueuedTicket) -> None:
        """Queue a ticket, or chain it to its first unfinished dependency, which inherits its priority.

        Queueing twice is harmless: a ticket can be claimed only once.
        """
        for dependency in ticket.dependencies:
            if not dependency.done():
                dependency.raise_priority(ticket.priority)
                dependency.add_continuation(functools.partial(self.submit, ticket))
                return
        self._inbox.append((int(ticket.priority), ticket.serial, next(self._entry_numbers), ticket))
        self._wake.put(None)
        if self._stopping:  # checked after the append: the last worker may have left just before it
            ticket.cancel()

    def forget(self, ticket: QueuedTicket) -> None:
        """A ticket is done."""
        self._unfinished.pop(ticket.serial, None)

    def unfinished(self) -> list[QueuedTicket]:
        """The tickets that are queued or running, oldest first."""
        while True:
            try:
                return list(self._unfinished.values())
            except RuntimeError:  # changed while being copied, by a collection in this very call
                continue

    def num_queued(self) -> int:
        """How many tickets have not started."""
        return sum(not ticket.started and not ticket.done() for ticket in self.unfinished())

    def describe_queue(self) -> str:
        """One line for timeout messages: what waits and what runs."""
        tickets = self.unfinished()
        running = [ticket for ticket in tickets if ticket.started]
        text = f"queue: {len(tickets) - len(running)} waiting, {len(running)} running on {self.num_workers} workers"
        if running:
            oldest = max(running, key=lambda ticket: ticket.transfer_s)
            text += f", the longest a {oldest.operation} of {oldest.nbytes} bytes for {oldest.transfer_s:.1f} s"
        return text

    def dump_queue(self) -> str:
        """A line for each ticket that is queued or running, oldest first, under a line that sums up."""
        tickets = self.unfinished()
        lines = [self.describe_queue()]
        for ticket in tickets[:_MOST_DUMPED]:
            lines.append(
                f"  {ticket.operation} of {ticket.extent}, {ticket.priority.name.lower()}: {ticket.state}, submitted "
                f"{ticket.elapsed_s:.1f} s ago, running for {ticket.transfer_s:.1f} s"
            )
        if len(tickets) > _MOST_DUMPED:
            lines.append(f"  and {len(tickets) - _MOST_DUMPED} more")
        return "\n".join(lines)

    def request_stop(self) -> None:
        """Tell the workers to leave when the queue is empty; does not wait. Nothing submitted later will run."""
        self._stopping = True
        if os.getpid() == self._pid:
            self._wake.put(None)

    def stop_soon(self) -> None:
        """Cancel queued tickets and let running ones end; does not wait."""
        self.request_stop()
        for ticket in self.unfinished():
            ticket.cancel()

    def stop(self, timeout_s: float) -> None:
        """Cancel queued tickets, wait for running ones, join the threads (except the calling one).

        Raises:
            TimeoutError: A transfer is still running after ``timeout_s`` seconds.
        """
        self.stop_soon()
        if os.getpid() != self._pid:  # a forked child has no such threads
            return
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread is threading.current_thread():
                continue
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive() and not self.unfinished():
                thread.join(_LEAVE_S)  # it is on its last lines, or in a caller's callback
        if any(thread.is_alive() for thread in self._threads if thread is not threading.current_thread()):
            raise TimeoutError(
                f"close: transfers still running after {timeout_s:g} s; {self.describe_queue()}. "
                "Nothing new will start and the files stay open until they end: check the device, then close again"
            )

    def take(self) -> tuple[list[QueuedTicket], bool] | None:
        """Claim the best ticket this worker may start now, with those that join it, and whether they are background."""
        with self._lock:
            while self._inbox:
                entry = self._inbox.popleft()
                heapq.heappush(self._background_writes if _is_background_write(entry[3]) else self._foreground, entry)
            claimed = self._claim_best()
            more = bool(self._foreground) or (bool(self._background_writes) and self._background_allowed())
        if claimed is not None and more:
            # This worker may have swallowed the wake-up meant for another one: pass it on.
            self._wake.put(None)
        return claimed

    def _claim_best(self) -> tuple[list[QueuedTicket], bool] | None:
        """Pop entries until one can be claimed; stale ones (cancelled, or queued twice) drop out here."""
        while True:
            candidates = [self._foreground] if self._foreground else []
            if self._background_writes and self._background_allowed():
                candidates.append(self._background_writes)
            if not candidates:
                return None
            heap = min(candidates, key=lambda heap: heap[0])
            ticket = heapq.heappop(heap)[3]
            work = ticket.work
            if ticket.claim() and work is not None:
                background = _is_background_write(ticket)
                self._num_background_running += background
                return [ticket, *_claim_joining(heap, work)], background

    def _background_allowed(self) -> bool:
        return self._num_background_running < max(1, self.num_workers - 1)

    def run(self, tickets: list[QueuedTicket], *, background: bool) -> None:
        """Run claimed tickets' work and finish them with its outcome; both arguments as ``take`` gave them."""
        errors = _outcomes(tickets)
        if background:
            with self._lock:
                self._num_background_running -= 1  # this worker looks for the next one itself
        for ticket, error in zip(tickets, errors, strict=True):
            ticket.finish(error)

    def wait_for_work(self) -> bool:
        """Sleep until something was handed over; False when the worker should leave."""
        if self._stopping and not self._inbox:
            self._wake.put(None)  # let the next worker see it too
            return False
        try:
            self._wake.get(timeout=_IDLE_WAKE_S)
            while True:
                self._wake.get_nowait()
        except queue.Empty:
            return True


def _claim_joining(heap: list[_Entry], work: Work) -> list[QueuedTicket]:
    """Claim what stands next in line, for as long as one system call could carry it behind the one before."""
    joining: list[QueuedTicket] = []
    works = [work]
    while heap and (following := heap[0][3].work) is not None and work.joins(works, following):
        ticket = heapq.heappop(heap)[3]
        if ticket.claim():
            joining.append(ticket)
            works.append(following)
    return joining


def _outcomes(tickets: list[QueuedTicket]) -> list[BaseException | None]:
    """Run the works; what they raised, holding on to no frame and so to no buffer."""
    errors: list[BaseException | None] = [None] * len(tickets)
    works = [ticket.begin() for ticket in tickets]
    try:
        if len(works) == 1:
            works[0]()
        else:
            errors = works[0].run_together(works)
    except BaseException as error:  # whatever a transfer raises belongs to its ticket; the worker lives on
        errors = [error] * len(tickets)
    works.clear()  # the frames below this one stay with an error, and they lead to this one
    for raised in errors:
        if raised is not None:
            _release_frames(raised)
    return errors


def _release_frames(error: BaseException) -> None:
    """Keep the line numbers of a traceback and drop the locals, for the whole chain of causes."""
    own = error.__traceback__
    error.__traceback__ = own.tb_next if own is not None else None  # without the caller's frame, which still runs
    seen: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop()
        if link is not None and link not in seen:
            seen.append(link)
            traceback.clear_frames(link.__traceback__)
            pending += [link.__cause__, link.__context__]


def _is_background_write(ticket: QueuedTicket) -> bool:
    return ticket.operation == "write" and ticket.priority == Priority.BACKGROUND


def _work_until_stopped(pool: WorkerPool) -> None:
    """Body of a worker thread. Holds no ticket, and so no store, while it sleeps."""
    while True:
        try:
            if not _run_next(pool) and not pool.wait_for_work():
                return
        except BaseException:
            _logger.exception("unexpected error in an I/O worker; it goes on")


def _run_next(pool: WorkerPool) -> bool:
    claimed = pool.take()
    if claimed is None:
        return False
    tickets, background = claimed
    pool.run(tickets, background=background)
    return True
