"""Running transfers: what one is, what is checked around it, and several in one call.

Covers the record of an extent, refusing to read what was never written, checksums, counting, and typed errors. How
bytes move is the `Transport`'s business, when the queue's (``queued_store``, ``workers``).

Rule: a transfer that ends well has moved every byte, and a read has passed its check; anything else is an error.
"""

from __future__ import annotations

import dataclasses
import logging
import mmap
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from io_backend import integrity
from io_backend.errors import CorruptExtentError, map_os_error
from io_backend.meter import Meter, TransferOutcome

if TYPE_CHECKING:
    from io_backend.buffers import Memory
    from io_backend.queued_ticket import QueuedTicket, Work
    from io_backend.store import Extent, Operation

_logger = logging.getLogger(__name__)
NO_PATH = "none"
"""What a transfer of no bytes went through."""


class Transport(Protocol):
    """What moves bytes, on workers; no method is called under a lock."""

    meter: Meter
    verify: bool

    def move(self, operation: Operation, extent: Extent, memory: Memory) -> TransferOutcome:
        """Move ``extent.nbytes`` bytes, more than 0, blocking."""
        ...

    def goes_with(self, transfers: Sequence[Transfer], following: Transfer) -> bool:
        """Whether `following` could go behind `transfers` in one call of `move_together`."""
        ...

    def move_together(self, operation: Operation, pieces: Sequence[tuple[Extent, Memory]]) -> list[TransferOutcome]:
        """Move neighbouring extents in one call; any of the bytes may have moved when it raises ``OSError``."""
        ...

    def sums(self, memory: Memory) -> tuple[int, ...]:
        """Checksums of the bytes, by chunk."""
        ...

    def location(self, extent: Extent) -> str:
        """The path for error messages."""
        ...

    def maintain(self) -> None:
        """What is best done between transfers."""
        ...


@dataclasses.dataclass(slots=True, eq=False)
class ExtentRecord:
    """What a store remembers about one live extent."""

    extent: Extent
    filled: bool = False
    """Written by a transfer or mapped: a read makes sense."""
    last_write: QueuedTicket | None = None
    pending: list[QueuedTicket] = dataclasses.field(default_factory=list)
    """Oldest first; done ones are pruned now and then."""
    mappings: list[weakref.ref[mmap.mmap]] = dataclasses.field(default_factory=list)
    sums: tuple[int, ...] | None = None
    """Checksums of the last write that ended well; none when it is mapped, or was mapped since."""

    def unfinished(self) -> tuple[QueuedTicket, ...]:
        """Transfers queued or running, oldest first."""
        self.pending = [ticket for ticket in self.pending if not ticket.done()]
        return tuple(self.pending)

    def mapped(self) -> bool:
        """Whether a mapping of it is open."""
        return any((mapping := reference()) is not None and not mapping.closed for reference in self.mappings)

    def busy(self) -> bool:
        """Whether a transfer or a mapping still uses the space."""
        return self.mapped() or bool(self.unfinished())


@dataclasses.dataclass(slots=True, eq=False)
class Transfer:
    """What a ticket runs; see `queued_ticket.Work`. It holds the buffer and the store."""

    transport: Transport
    operation: Operation
    record: ExtentRecord
    memory: Memory
    after: Callable[[], object] | None
    source: QueuedTicket | None
    """The write that a read depends on."""
    filled: bool
    """Whether the extent held bytes when this was submitted."""
    counted: bool
    """Whether it counts in the number of transfers."""

    @property
    def extent(self) -> Extent:
        """Where on the device."""
        return self.record.extent

    def __call__(self) -> None:
        """Run it, on a worker."""
        transport, operation, extent = self.transport, self.operation, self.extent
        self._check_source()
        outcome = None
        try:
            if self.after is not None:
                self.after()
            transport.meter.begin(operation)
            try:
                outcome = self._move() if extent.nbytes else TransferOutcome(NO_PATH)
            finally:
                transport.meter.end(operation, extent.nbytes, outcome, counted=self.counted)
        except OSError as error:
            path = transport.location(extent)
            raise map_os_error(
                error, operation=operation, path=path, offset=extent.offset, nbytes=extent.nbytes
            ) from error
        transport.maintain()

    def joins(self, works: Sequence[Work], following: Work) -> bool:
        """Whether the transport would move `following` in one call behind `works`."""
        transfers = [work for work in works if isinstance(work, Transfer)]
        return (
            isinstance(following, Transfer)
            and following.transport is self.transport
            and self.transport.goes_with(transfers, following)
        )

    def run_together(self, works: Sequence[Work]) -> list[BaseException | None]:
        """Run several without ``after``: in one call, or each by itself where that fails."""
        transfers = [work for work in works if isinstance(work, Transfer)]
        meter, operation = self.transport.meter, self.operation
        outcomes: list[TransferOutcome] = []
        for _ in transfers:
            meter.begin(operation)
        try:
            outcomes = self._move_together(transfers)
        except OSError as error:
            _logger.debug("%d transfers in one call failed, each is tried by itself: %s", len(transfers), error)
        finally:
            for number, transfer in enumerate(transfers):
                outcome = outcomes[number] if outcomes else None
                meter.end(operation, transfer.extent.nbytes, outcome, counted=transfer.counted)
        if not outcomes:
            return [_error_of(transfer) for transfer in transfers]
        self.transport.maintain()
        return [None] * len(transfers)

    def _move(self) -> TransferOutcome:
        """Move the bytes and, where asked for, make or check their sums."""
        record, memory, transport = self.record, self.memory, self.transport
        if self.operation == "read":
            outcome = transport.move("read", record.extent, memory)
            self._check_sums()
            return outcome
        record.sums = None
        sums = self._sums()
        outcome = transport.move("write", record.extent, memory)
        record.sums = sums
        return outcome

    def _move_together(self, transfers: Sequence[Transfer]) -> list[TransferOutcome]:
        """As `_move`, for several; when one is not as it should be, none counts as moved."""
        transport = self.transport
        pieces = [(transfer.extent, transfer.memory) for transfer in transfers]
        if self.operation == "read":
            for transfer in transfers:
                transfer._check_source()
            outcomes = transport.move_together("read", pieces)
            for transfer in transfers:
                transfer._check_sums()
            return outcomes
        sums = [transfer._sums() for transfer in transfers]
        for transfer in transfers:
            transfer.record.sums = None
        outcomes = transport.move_together("write", pieces)
        for transfer, each in zip(transfers, sums, strict=True):
            transfer.record.sums = each
        return outcomes

    def _sums(self) -> tuple[int, ...] | None:
        """What to check later reads by; none where the caller may change the bytes through a mapping."""
        if not self.transport.verify or self.record.mapped():
            return None
        return self.transport.sums(self.memory)

    def _check_source(self) -> None:
        """Refuse to read what was never, or not successfully, written: the space may hold a former owner's bytes."""
        if self.operation == "write" or self.extent.nbytes == 0:
            return
        reason = self.source.exception() if self.source is not None else None
        if self.filled and reason is None:
            return
        what = f"read of {self.extent} in {self.transport.location(self.extent)}"
        if not self.filled:
            raise CorruptExtentError(f"{what}: nothing was ever written to it")
        raise CorruptExtentError(
            f"{what}: the write before it did not succeed, so it holds no valid bytes. The write's error: {reason}"
        ) from reason

    def _check_sums(self) -> None:
        expected, extent = self.record.sums, self.extent
        if expected is not None:
            integrity.check(expected, self.transport.sums(self.memory), extent, self.transport.location(extent))


def _error_of(transfer: Transfer) -> BaseException | None:
    """What one transfer raises when it runs."""
    try:
        transfer()
    except BaseException as error:  # it belongs to the ticket
        return error
    return None
