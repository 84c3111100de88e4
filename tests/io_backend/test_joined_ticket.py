"""One ticket for the parts of an extent that lies on several devices.

Covers cancelling all or nothing, priorities, callbacks, failures of one part, waiting. The rule: a joined ticket is
done when its last part is, and not before.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest

from io_backend import BackendConfig, BackendError, CorruptExtentError, Priority
from io_backend.joined_ticket import JoinedTicket
from io_backend.striped_store import StripedStore
from io_backend.testing import MemoryStore
from tests.io_backend.gates import TIMEOUT_S, Gate, block_workers

NBYTES = (16 << 20) + 5


class Member(MemoryStore):
    """A member whose transfers of large parts wait for its event, then raise what it holds."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.opened.set()
        self.reached = threading.Event()
        self.failure: BaseException | None = None
        super().__init__(BackendConfig(num_workers=1))

    def move(self, operation: Any, extent: Any, memory: Any) -> Any:
        if extent.nbytes > 1 << 20:
            self.reached.set()
            assert self.opened.wait(TIMEOUT_S)
            if self.failure is not None:
                raise self.failure
        return super().move(operation, extent, memory)


class Pair:
    """Two devices."""

    def __init__(self) -> None:
        self.members = Member(), Member()
        self.store = StripedStore(self.members, names=["ssd0", "ssd1"], on_event=print)
        self.extent = self.store.allocate(NBYTES)
        self.data = np.random.default_rng(0).integers(0, 256, NBYTES, dtype=np.uint8)

    def write(self, **options: Any) -> JoinedTicket:
        ticket = self.store.write(self.data, self.extent, **options)
        assert isinstance(ticket, JoinedTicket)
        return ticket

    def check(self) -> None:
        back = np.zeros_like(self.data)
        self.store.read(self.extent, back).wait(TIMEOUT_S)
        assert np.array_equal(back, self.data)


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.store.close()


def test_round_trip(pair: Pair) -> None:
    ticket = pair.write()
    ticket.wait(TIMEOUT_S)
    pair.check()
    assert ticket.state == "done"
    assert ticket.nbytes == NBYTES
    assert ticket.elapsed_s >= ticket.transfer_s > 0
    statistics = pair.store.statistics()
    assert (statistics.num_writes, statistics.num_reads) == (1, 1)
    assert statistics.written_nbytes == NBYTES


def test_cancel_takes_all_parts_back(pair: Pair) -> None:
    gates = [gate for member in pair.members for gate in block_workers(member, 1)]
    called: list[object] = []
    ticket = pair.write()
    ticket.add_done_callback(called.append)
    assert ticket.state == "queued"
    assert ticket.cancel()
    assert ticket.cancel()
    assert ticket.cancelled
    assert ticket.done()
    assert ticket.state == "cancelled"
    assert called == [ticket]
    with pytest.raises(CancelledError):
        ticket.wait(TIMEOUT_S)
    for gate in gates:
        gate.opened.set()
    with pytest.raises(CorruptExtentError, match="cancelled"):
        pair.check()


@pytest.mark.parametrize("started", [0, 1])
def test_cancel_takes_none_back_when_one_has_started(pair: Pair, started: int) -> None:
    running, waiting = pair.members[started], pair.members[1 - started]
    running.opened.clear()
    gate = block_workers(waiting, 1)[0]
    ticket = pair.write()
    assert running.reached.wait(TIMEOUT_S)
    assert not ticket.cancel()
    assert not ticket.cancelled
    assert ticket.started
    assert ticket.state == "running"
    gate.opened.set()
    assert waiting.reached.wait(TIMEOUT_S)  # the part that was claimed for a moment still runs
    running.opened.set()
    ticket.wait(TIMEOUT_S)
    assert not ticket.cancel()
    pair.check()


def test_all_parts_are_raised(pair: Pair) -> None:
    gates = [gate for member in pair.members for gate in block_workers(member, 1)]
    order: list[str] = []
    others = []
    for member in pair.members:
        extent = member.allocate(8)
        others.append(member.write(b"12345678", extent, after=lambda: order.append("other")))
    ticket = pair.write()
    ticket.raise_priority(Priority.URGENT)
    ticket.raise_priority(Priority.BACKGROUND)
    assert ticket.priority == Priority.URGENT
    for member in pair.members:
        member.opened.clear()
    for gate in gates:
        gate.opened.set()
    for member in pair.members:
        assert member.reached.wait(TIMEOUT_S)
    assert order == []
    for member in pair.members:
        member.opened.set()
    for other in (*others, ticket):
        other.wait(TIMEOUT_S)


def test_callbacks_run_once(pair: Pair) -> None:
    for member in pair.members:
        member.opened.clear()
    ticket = pair.write()
    called: list[object] = []
    done = threading.Event()
    ticket.add_done_callback(called.append)
    ticket.add_done_callback(lambda _: done.set())
    pair.members[0].opened.set()
    pair.members[0].write(b"x", pair.members[0].allocate(1)).wait(TIMEOUT_S)  # behind its part
    assert not ticket.done()
    assert called == []
    pair.members[1].opened.set()
    assert done.wait(TIMEOUT_S)
    ticket.wait(TIMEOUT_S)
    ticket.add_done_callback(called.append)
    assert called == [ticket, ticket]


@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize("failure", [OSError(errno.EIO, "broken"), RuntimeError("broken")], ids=["typed", "foreign"])
def test_one_part_fails(pair: Pair, broken: int, failure: Exception) -> None:
    good = pair.members[1 - broken]
    pair.members[broken].failure = failure
    good.opened.clear()
    ticket = pair.write()
    pair.members[broken].write(b"x", pair.members[broken].allocate(1)).wait(TIMEOUT_S)  # behind the part that fails
    with pytest.raises(TimeoutError):  # the other part still moves the buffer
        ticket.wait(0.01)
    assert not ticket.done()
    assert ticket.exception() is None
    good.opened.set()
    expected = BackendError if isinstance(failure, OSError) else RuntimeError
    for _ in range(2):
        with pytest.raises(expected, match=r"broken|Input/output error"):
            ticket.wait(TIMEOUT_S)
    assert ticket.state == "failed"
    pair.members[broken].failure = None
    with pytest.raises(CorruptExtentError):
        pair.check()
    pair.write()
    pair.check()


def test_wait_times_out_as_one(pair: Pair) -> None:
    gates = [gate for member in pair.members for gate in block_workers(member, 1)]
    ticket = pair.write()
    with pytest.raises(TimeoutError, match="queued"):
        ticket.wait(0.01)
    for gate in gates:
        gate.opened.set()
    ticket.wait(TIMEOUT_S)


def test_after_runs_once_and_holds_all_parts(pair: Pair) -> None:
    gate, runs = Gate(), []

    def after() -> None:
        runs.append(threading.current_thread().name)
        gate()

    ticket = pair.write(after=after)
    assert gate.reached.wait(TIMEOUT_S)
    assert not any(member.reached.is_set() for member in pair.members)
    gate.opened.set()
    ticket.wait(TIMEOUT_S)
    assert len(runs) == 1
    pair.check()


@pytest.mark.parametrize("failure", [RuntimeError("device lost"), SystemExit(3)], ids=["error", "exit"])
def test_no_byte_moves_when_after_raises(pair: Pair, failure: BaseException) -> None:
    def broken() -> None:
        raise failure

    ticket = pair.write(after=broken)
    with pytest.raises(type(failure)):
        ticket.wait(TIMEOUT_S)
    assert not any(member.reached.is_set() for member in pair.members)


def test_close_cancels_every_device_before_it_waits(pair: Pair) -> None:
    gates = [gate for member in pair.members for gate in block_workers(member, 1)]
    ticket = pair.write()
    with pytest.raises(TimeoutError, match="still running"):
        pair.store.close(0.0)
    assert ticket.cancelled
    for gate in gates:
        gate.opened.set()
    pair.store.close()


def test_close_of_idle_devices_needs_no_time(pair: Pair) -> None:
    pair.write().wait(TIMEOUT_S)
    pair.store.close(0.0)
