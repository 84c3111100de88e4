"""One store over several devices, each with a store of its own.

Covers dividing space by how fast the devices are, one ticket for several parts, and taking out a device that fails or
lags. It moves nothing and knows no file: the members do.

Rules:
- Each device has its own queue and workers, so that a slow one never holds up the others.
- Large extents lie on all devices in proportion to their speed, so that all parts end together; small ones on one.
- A device that was taken out gets nothing new. What is on it is still read from it: only a read says what is lost.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import logging
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from io_backend.errors import BackendError, BackendUnavailableError, StorageFullError
from io_backend.joined_ticket import JoinedTicket, Once
from io_backend.store import DeviceStatistics, Extent, Priority, StoreStatistics

if TYPE_CHECKING:
    from io_backend.buffers import Memory
    from io_backend.queued_store import QueuedStore
    from io_backend.queued_ticket import QueuedTicket
    from io_backend.store import BufferLike, Operation
    from io_backend.ticket import Ticket

_logger = logging.getLogger(__name__)
_MIB = 1 << 20
_PART_UNIT_NBYTES = 1 * _MIB
_LEAST_PART_NBYTES = 4 * _MIB  # below this a call costs more than a second device gains
_FAILURES = frozenset(
    {errno.EIO, errno.EROFS, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.EREMOTEIO}
)
_SAMPLES_NEEDED = 8
_SAMPLE_WEIGHT = 0.2
_LEAST_SAMPLE_NBYTES = 256 << 10
_SLOW_FACTOR = 8.0  # as many times slower than the best, in proportion to what it was known for
_SILENT_S = 15.0


class _Part(NamedTuple):
    """A piece of an extent on one device."""

    member: int
    extent: Extent
    start: int
    """Where in the caller's buffer."""


@dataclasses.dataclass(eq=False, slots=True)
class _Member:
    """One device."""

    store: QueuedStore
    name: str
    weight: float
    """Bytes per second, or any other scale that all members share."""
    planned_s: float = 0.0
    """Time that what was ever put on it takes at its weight: the least one is next."""
    out: str = ""
    """Why it gets nothing new; empty while it does."""
    rate: float = 0.0
    """Bytes per second of its transfers lately."""
    num_samples: int = 0


class StripedStore:
    """See the ``Store`` protocol. Extents may lie on several devices.

    Thread safety and invariants: as the protocol says. The lock guards the members' books, never a call of a store.
    """

    def __init__(
        self,
        members: Sequence[QueuedStore],
        *,
        names: Sequence[str],
        on_event: Callable[[str], object],
        weights: Sequence[float] | None = None,
    ) -> None:
        """Put stores side by side.

        Args:
            members: At least one, all of one class; owned from here on.
            names: For messages, one a member.
            on_event: Told, from any thread, when a device is taken out.
            weights: How fast each is, on any scale, as measured before; ``None``: alike until measured.
        """
        speeds = [1.0] * len(members) if weights is None else list(weights)
        if not len(members) == len(names) == len(speeds) or not members or min(speeds) <= 0:
            raise ValueError(f"expected a name and a positive weight for each of {len(members)} stores")
        self._members = [_Member(*each) for each in zip(members, names, speeds, strict=True)]
        self._parts: dict[int, tuple[_Part, ...]] = {}
        self._on_event = on_event
        self._lock = threading.Lock()
        self._looked_s = 0.0
        self._measured = False
        self._closed = False
        self.config = members[0].config

    # --- space -------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, *, contiguous: bool = False) -> Extent:
        """See :meth:`Store.allocate`."""
        if nbytes < 0:
            raise ValueError(f"cannot allocate {nbytes} bytes")
        self._members[0].store.check_usable("allocate")  # in a forked child, before the lock: its holder may be gone
        self._look_for_silence()
        with self._lock:
            in_use = [number for number, member in enumerate(self._members) if not member.out]
            shares = self._shares(nbytes, in_use, whole=contiguous)
        parts: list[_Part] = []
        try:
            self._allocate_parts(nbytes, shares, in_use, parts, whole=contiguous)
        except BaseException:
            for part in parts:
                self._members[part.member].store.free(part.extent)
            raise
        first = parts[0]
        extent = dataclasses.replace(first.extent, file_index=first.member)  # the same serial: one name in messages
        if len(parts) > 1:
            capacity_nbytes = sum(part.extent.capacity_nbytes for part in parts)
            extent = Extent(first.member, first.extent.offset, nbytes, capacity_nbytes)
        self._parts[extent.serial] = tuple(parts)
        return extent

    def _shares(self, nbytes: int, in_use: list[int], *, whole: bool) -> list[tuple[int, int]]:
        """(member, bytes) to ask for; call under the lock."""
        members = self._members
        total_weight = sum(members[number].weight for number in in_use)
        shares = []
        if not whole and nbytes >= 2 * _LEAST_PART_NBYTES:
            left_nbytes = nbytes
            for number in sorted(in_use, key=lambda number: members[number].weight):
                exact_nbytes = nbytes * members[number].weight / total_weight
                share_nbytes = min(left_nbytes, int(exact_nbytes) // _PART_UNIT_NBYTES * _PART_UNIT_NBYTES)
                if share_nbytes >= _LEAST_PART_NBYTES:
                    shares.append([number, share_nbytes])
                    left_nbytes -= share_nbytes
            if shares:
                shares[-1][1] += left_nbytes  # the fastest takes what rounding left
        if not shares:
            soonest = min(in_use, key=lambda number: members[number].planned_s + nbytes / members[number].weight)
            shares = [[soonest, nbytes]]
        for number, share_nbytes in shares:
            members[number].planned_s += share_nbytes / members[number].weight
        return [(number, share_nbytes) for number, share_nbytes in shares]

    def _allocate_parts(
        self, nbytes: int, shares: list[tuple[int, int]], in_use: list[int], parts: list[_Part], *, whole: bool
    ) -> None:
        """Fill `parts` by `shares`; where a device is full or fails, another takes its share over."""
        start = 0
        for number, share_nbytes in shares:
            failure: BackendError | None = None
            for candidate in (number, *(other for other in in_use if other != number)):
                member = self._members[candidate]
                try:
                    extent = member.store.allocate(share_nbytes)
                except StorageFullError as error:
                    failure = error
                    continue
                except BackendError as error:
                    if error.errno not in _FAILURES:
                        raise
                    failure = error
                    self._take_out(member, f"it failed: {error}")
                    continue
                parts.append(_Part(candidate, extent, start))
                break
            else:
                assert failure is not None
                raise failure
            start += share_nbytes
        if start != nbytes:
            raise AssertionError(f"shares of {start} bytes for {nbytes}")

    def free(self, extent: Extent) -> None:
        """See :meth:`Store.free`."""
        parts = self._parts.pop(extent.serial, None)
        if parts is None:
            _logger.warning("ignored the free of %s: it is not live in this store (freed twice?)", extent)
            return
        for part in parts:
            self._members[part.member].store.free(part.extent)

    def map(self, extent: Extent) -> mmap.mmap:
        """See :meth:`Store.map`."""
        parts = self._live_parts(extent)
        if len(parts) > 1:
            raise ValueError(f"cannot map {extent}: it lies on {len(parts)} devices; allocate it with contiguous=True")
        return self._members[parts[0].member].store.map(parts[0].extent)

    def _live_parts(self, extent: Extent) -> tuple[_Part, ...]:
        parts = self._parts.get(extent.serial)
        if self._closed:
            raise BackendUnavailableError("this store is closed; open a new one")
        if parts is None:
            raise ValueError(f"{extent} is not live in this store: freed already, or allocated by another store")
        return parts

    # --- transfers ---------------------------------------------------------------------------------------------------

    def write(
        self,
        buffer: BufferLike,
        extent: Extent,
        *,
        priority: Priority = Priority.BACKGROUND,
        after: Callable[[], object] | None = None,
    ) -> Ticket:
        """See :meth:`Store.write`."""
        return self._submit("write", extent, buffer, priority, after)

    def read(
        self,
        extent: Extent,
        buffer: BufferLike,
        *,
        priority: Priority = Priority.DEADLINE,
        after: Callable[[], object] | None = None,
    ) -> Ticket:
        """See :meth:`Store.read`."""
        return self._submit("read", extent, buffer, priority, after)

    def _submit(
        self,
        operation: Operation,
        extent: Extent,
        buffer: BufferLike,
        priority: Priority,
        after: Callable[[], object] | None,
    ) -> Ticket:
        parts = self._live_parts(extent)
        memory = self._members[0].store.resolve(buffer, operation, extent)
        once = after if after is None or len(parts) == 1 else Once(after)
        tickets: list[QueuedTicket] = []
        for part in parts:
            member = self._members[part.member]
            piece = self._piece(memory, part)
            try:
                ticket = member.store.submit(operation, part.extent, piece, priority, once, counted=part.start == 0)
            except BaseException:
                for earlier in tickets:
                    earlier.cancel()
                raise
            ticket.add_done_callback(functools.partial(self._watch, member))
            tickets.append(ticket)
        if len(tickets) == 1:
            return tickets[0]
        return JoinedTicket(operation, extent, priority, tickets, default_timeout_s=self.config.io_timeout_s)

    def _piece(self, memory: Memory, part: _Part) -> Memory:
        return memory.part(part.start, part.extent.nbytes)

    # --- health ------------------------------------------------------------------------------------------------------

    def _watch(self, member: _Member, ticket: Ticket) -> None:
        """A part has ended; called on a worker."""
        error = ticket.exception()
        if error is None:
            if ticket.nbytes >= _LEAST_SAMPLE_NBYTES and ticket.transfer_s > 0:
                self._sample(member, ticket.nbytes / ticket.transfer_s)
        elif isinstance(error, BackendError) and error.errno in _FAILURES:
            self._take_out(member, f"it failed: {error}")

    def _sample(self, member: _Member, rate: float) -> None:
        with self._lock:
            share = max(_SAMPLE_WEIGHT, 1 / (member.num_samples + 1))
            member.rate += share * (rate - member.rate)
            member.num_samples += 1
            in_use = [each for each in self._members if not each.out]
            if member.out or any(each.num_samples < _SAMPLES_NEEDED for each in in_use):
                return
            best = max(each.rate for each in in_use)
            lags = member.rate < best / _SLOW_FACTOR
            for each in in_use:
                each.weight = each.rate
                if not self._measured:  # the scale changes
                    each.planned_s = 0.0
            self._measured = True
        if lags:
            self._take_out(
                member, f"it moves {member.rate / 1e6:.0f} MB/s a transfer where the best moves {best / 1e6:.0f}"
            )

    def _look_for_silence(self) -> None:
        """Take out devices that do not answer; looks at most once a second."""
        now_s = time.monotonic()
        if now_s - self._looked_s < 1.0:
            return
        self._looked_s = now_s
        for member in self._members:
            if not member.out and (silent_s := member.store.oldest_running_s()) > _SILENT_S:
                self._take_out(member, f"a transfer has been running for {silent_s:.0f} s")

    def _take_out(self, member: _Member, reason: str) -> None:
        """Give it nothing new, unless it is the last one."""
        with self._lock:
            others = [each for each in self._members if not each.out and each is not member]
            if member.out or not others:
                return
            member.out = reason
        number = self._members.index(member)
        on_it = [part.extent for parts in self._all_parts() for part in parts if part.member == number]
        self._on_event(
            f"spill device {member.name} was taken out: {reason}. {len(on_it)} live extents of "
            f"{sum(extent.nbytes for extent in on_it)} bytes are still on it and are read from it when they are "
            f"needed; new ones go to {', '.join(each.name for each in others)}"
        )

    def _all_parts(self) -> list[tuple[_Part, ...]]:
        while True:
            try:
                return list(self._parts.values())
            except RuntimeError:  # changed while being copied, by a collection in this very call
                continue

    # --- the rest ----------------------------------------------------------------------------------------------------

    def statistics(self) -> StoreStatistics:
        """See :meth:`Store.statistics`. Busy times are those of the busiest device."""
        each = [member.store.statistics() for member in self._members]
        paths: dict[str, int] = {}
        for statistics in each:
            for path, nbytes in statistics.paths.items():
                paths[path] = paths.get(path, 0) + nbytes
        devices = tuple(
            dataclasses.replace(device, name=member.name, weight=member.weight, out=member.out)
            for member, statistics in zip(self._members, each, strict=True)
            for device in statistics.devices or (DeviceStatistics(member.name, *_moved(statistics)),)
        )
        return StoreStatistics(
            written_nbytes=sum(s.written_nbytes for s in each),
            read_nbytes=sum(s.read_nbytes for s in each),
            write_busy_s=max(s.write_busy_s for s in each),
            read_busy_s=max(s.read_busy_s for s in each),
            paths=paths,
            num_writes=sum(s.num_writes for s in each),
            num_reads=sum(s.num_reads for s in each),
            live_nbytes=sum(s.live_nbytes for s in each),
            high_water_nbytes=sum(s.high_water_nbytes for s in each),
            file_nbytes=sum(s.file_nbytes for s in each),
            largest_free_nbytes=max(s.largest_free_nbytes for s in each),
            queued=sum(s.queued for s in each),
            bounced_nbytes=sum(s.bounced_nbytes for s in each),
            devices=devices,
        )

    @property
    def staging_nbytes(self) -> int:
        """See :meth:`Store.staging_nbytes`."""
        return sum(member.store.staging_nbytes for member in self._members)

    def describe(self) -> str:
        """See :meth:`Store.describe`."""
        return "; ".join(member.store.describe() for member in self._members)

    def close(self, timeout_s: float = 30.0) -> None:
        """See :meth:`Store.close`."""
        self._closed = True
        deadline_s = time.monotonic() + timeout_s
        failure: TimeoutError | None = None
        for member in self._members:  # all of them first: none goes on while another is waited for
            member.store.close_soon()
        for member in self._members:
            try:
                member.store.close(max(0.0, deadline_s - time.monotonic()))
            except TimeoutError as error:
                failure = error
        if failure is not None:
            raise failure


def _moved(statistics: StoreStatistics) -> tuple[int, int]:
    return statistics.written_nbytes, statistics.read_nbytes
