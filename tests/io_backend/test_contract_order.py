"""In which order every store carries out what it was asked for.

Covers order within an extent, priorities, failures and what depends on them, cancelling, waiting, callbacks. The rule:
races are provoked by events, never by sleeping.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

import numpy as np
import pytest

from io_backend import BackendConfig, BackendError, CorruptExtentError, Priority
from tests.io_backend.gates import TIMEOUT_S, Gate, block_workers

if TYPE_CHECKING:
    from conftest import Case


def test_a_read_waits_for_its_write(case: Case) -> None:
    gate = Gate()
    old, new = case.random(5000), case.random(5000)
    extent = case.store.allocate(5000)
    case.store.write(old, extent).wait(TIMEOUT_S)
    write = case.store.write(new, extent, after=gate)
    back = case.empty(5000)
    read = case.store.read(extent, back, priority=Priority.URGENT)
    assert gate.reached.wait(TIMEOUT_S)
    assert not read.started
    gate.opened.set()
    read.wait(TIMEOUT_S)
    assert write.done()
    assert np.array_equal(back, new)


def test_a_write_waits_for_earlier_reads(case: Case) -> None:
    gate = Gate()
    old, new = case.random(5000), case.random(5000)
    extent = case.store.allocate(5000)
    case.store.write(old, extent)
    back = case.empty(5000)
    read = case.store.read(extent, back, after=gate)
    write = case.store.write(new, extent, priority=Priority.URGENT)
    assert gate.reached.wait(TIMEOUT_S)
    assert not write.started
    gate.opened.set()
    write.wait(TIMEOUT_S)
    assert read.done()
    assert np.array_equal(back, old)


def test_many_rewrites_of_one_extent_keep_their_order(case: Case) -> None:
    extent = case.store.allocate(4096)
    buffers = [case.empty(4096) for _ in range(50)]
    for value, buffer in enumerate(buffers):
        buffer[:] = value
        case.store.write(buffer, extent, priority=Priority(value % 3))
    back = case.empty(4096)
    case.store.read(extent, back).wait(TIMEOUT_S)
    assert (back == 49).all()


def test_an_urgent_read_raises_the_write_it_needs(narrow_case: Case) -> None:
    case = narrow_case
    gates = block_workers(case.store, 1)
    order: list[str] = []
    other, extent = case.store.allocate(16), case.store.allocate(16)
    case.store.write(case.random(16), other, after=lambda: order.append("other"))
    data = case.random(16)
    case.store.write(data, extent, after=lambda: order.append("needed"))
    back = case.empty(16)
    case.store.read(extent, back, priority=Priority.URGENT)
    last = case.store.read(other, case.empty(16))
    gates[0].opened.set()  # one worker only: two would note their starts in any order
    last.wait(TIMEOUT_S)
    for gate in gates:
        gate.opened.set()
    assert order == ["needed", "other"]
    assert np.array_equal(back, data)


def test_a_read_of_an_unwritten_extent_fails(case: Case) -> None:
    ticket = case.store.read(case.store.allocate(100), case.empty(100))
    with pytest.raises(CorruptExtentError, match="nothing was ever written"):
        ticket.wait(TIMEOUT_S)


def test_a_read_after_a_failed_write_fails(case: Case) -> None:
    def broken() -> None:
        raise OSError(5, "no")

    extent = case.store.allocate(100)
    write = case.store.write(case.random(100), extent, after=broken)
    read = case.store.read(extent, case.empty(100))
    with pytest.raises(BackendError, match="write of 100 bytes"):
        write.wait(TIMEOUT_S)
    assert write.exception().errno == 5  # type: ignore[union-attr]
    with pytest.raises(CorruptExtentError, match="did not succeed"):
        read.wait(TIMEOUT_S)
    case.store.write(case.random(100), extent)
    case.store.read(extent, case.empty(100)).wait(TIMEOUT_S)


def test_after_keeps_its_own_exception(case: Case) -> None:
    def broken() -> None:
        raise RuntimeError("device lost")

    ticket = case.store.write(case.random(100), case.store.allocate(100), after=broken)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="device lost"):
            ticket.wait(TIMEOUT_S)
    assert ticket.state == "failed"
    assert case.store.statistics().written_nbytes == 0


def test_priorities_then_submission_order(narrow_case: Case) -> None:
    case = narrow_case
    gates = block_workers(case.store, 1)
    # With several workers only the first starts are ordered: hold all but one of them until the end.
    order: list[str] = []
    lock = threading.Lock()

    def note(name: str) -> Callable[[], None]:
        def append() -> None:
            with lock:
                order.append(name)

        return append

    tickets = []
    for name in ("b1", "d1", "u1", "b2", "d2", "u2"):
        priority = {"u": Priority.URGENT, "d": Priority.DEADLINE, "b": Priority.BACKGROUND}[name[0]]
        data = case.random(16)
        extent = case.store.allocate(16)
        tickets.append(case.store.write(data, extent, priority=priority, after=note(name)))
    assert case.store.statistics().queued == 6
    tickets[3].raise_priority(Priority.URGENT)
    tickets[3].raise_priority(Priority.BACKGROUND)
    gates[0].opened.set()
    expected = ["u1", "b2", "u2", "d1", "d2", "b1"]
    if len(gates) > 1:  # one of two workers is held: the other may not take background writes
        tickets[4].wait(TIMEOUT_S)
        gates[1].opened.set()
    for ticket in tickets:
        ticket.wait(TIMEOUT_S)
    assert order == expected


def test_background_writes_leave_one_worker_free(case: Case) -> None:
    gates = [Gate() for _ in range(6)]
    for gate in gates:
        case.store.write(case.random(16), case.store.allocate(16), after=gate)
    assert gates[0].reached.wait(TIMEOUT_S)
    extent = case.store.allocate(16)
    data, back = case.random(16), case.empty(16)
    case.store.write(data, extent, priority=Priority.URGENT)
    case.store.read(extent, back).wait(TIMEOUT_S)
    assert np.array_equal(back, data)
    workers = BackendConfig().num_workers * (2 if case.kind == "posix-two-directories" else 1)
    assert sum(gate.reached.is_set() for gate in gates) <= workers - 1
    for gate in gates:
        gate.opened.set()


def test_cancel_before_the_start(narrow_case: Case) -> None:
    case = narrow_case
    gates = block_workers(case.store, 1)
    extent = case.store.allocate(16)
    write = case.store.write(case.random(16), extent)
    read = case.store.read(extent, case.empty(16))
    called: list[object] = []
    write.add_done_callback(called.append)
    assert write.cancel()
    assert write.cancel()
    assert called == [write]
    assert write.cancelled
    assert write.done()
    with pytest.raises(CancelledError):
        write.wait(TIMEOUT_S)
    for gate in gates:
        gate.opened.set()
    with pytest.raises(CorruptExtentError, match="cancelled"):
        read.wait(TIMEOUT_S)


def test_cancel_after_the_start_is_refused(case: Case) -> None:
    gate = Gate()
    ticket = case.store.write(case.random(16), case.store.allocate(16), after=gate)
    assert gate.reached.wait(TIMEOUT_S)
    assert ticket.started
    assert not ticket.cancel()
    gate.opened.set()
    ticket.wait(TIMEOUT_S)
    assert not ticket.cancel()
    assert not ticket.cancelled


def test_wait_times_out_with_the_whole_story(case: Case) -> None:
    gate = Gate()
    extent = case.store.allocate(777)
    ticket = case.store.write(case.random(777), extent, after=gate)
    assert gate.reached.wait(TIMEOUT_S)
    with pytest.raises(TimeoutError) as caught:
        ticket.wait(0.01)
    for part in ("write", f"#{extent.serial}", "777 bytes", "running", "0 waiting, 1 running"):
        assert part in str(caught.value)
    gate.opened.set()
    ticket.wait(TIMEOUT_S)
    assert ticket.elapsed_s >= ticket.transfer_s > 0


def test_callbacks(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    ticket = case.store.write(case.random(16), case.store.allocate(16), after=gate)
    threads: list[str] = []
    done = threading.Event()

    def broken(_: object) -> None:
        raise RuntimeError("callback broke")

    ticket.add_done_callback(broken)
    ticket.add_done_callback(lambda _: threads.append(threading.current_thread().name))
    ticket.add_done_callback(lambda _: done.set())
    gate.opened.set()
    assert done.wait(TIMEOUT_S)
    assert threads[0].startswith("teraio-io-")
    assert "callback broke" in caplog.text
    ticket.add_done_callback(lambda _: threads.append(threading.current_thread().name))
    assert threads[1] == threading.current_thread().name
