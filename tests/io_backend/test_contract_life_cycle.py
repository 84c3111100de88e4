"""What every store does from the first extent to its end.

Covers freeing, what tickets hold, garbage collection in the middle, closing. The rule: races are provoked by events,
never by sleeping.
"""

from __future__ import annotations

import gc
import threading
import weakref
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from io_backend import BackendUnavailableError, CorruptExtentError
from tests.io_backend.gates import TIMEOUT_S, Gate, block_workers

if TYPE_CHECKING:
    from conftest import Case


def test_free_during_io_defers_reuse(case: Case) -> None:
    gate = Gate()
    nbytes = 4096
    data = case.random(nbytes)
    extent = case.store.allocate(nbytes)
    ticket = case.store.write(data, extent, after=gate)
    back = case.empty(nbytes)
    read = case.store.read(extent, back)
    case.store.free(extent)
    assert case.store.statistics().live_nbytes == 4096
    others = [case.store.allocate(nbytes) for _ in range(4)]
    assert all((other.file_index, other.offset) != (extent.file_index, extent.offset) for other in others)
    with pytest.raises(ValueError, match="not live"):
        case.store.read(extent, back)
    gate.opened.set()
    read.wait(TIMEOUT_S)
    ticket.wait(TIMEOUT_S)
    assert np.array_equal(back, data)
    assert case.store.statistics().live_nbytes == 4 * 4096


def test_foreign_and_double_frees_are_ignored(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    extent, other = case.store.allocate(10), case.store.allocate(10)
    case.store.free(extent)
    case.store.free(extent)
    assert case.store.statistics().live_nbytes == other.capacity_nbytes
    assert "freed twice" in caplog.text


def test_the_ticket_holds_the_buffer_until_done(case: Case) -> None:
    gate = Gate()
    tensor = torch.arange(5000, dtype=torch.int32)
    expected = tensor.clone()
    reference = weakref.ref(tensor)
    extent = case.store.allocate(20000)
    ticket = case.store.write(tensor, extent, after=gate)
    del tensor
    gc.collect()
    assert reference() is not None
    gate.opened.set()
    ticket.wait(TIMEOUT_S)
    back = torch.empty_like(expected)
    case.store.read(extent, back).wait(TIMEOUT_S)
    assert torch.equal(back, expected)
    assert reference() is None


def test_a_failed_ticket_drops_the_buffer(case: Case) -> None:
    tensor = torch.zeros(100)
    reference = weakref.ref(tensor)
    done = threading.Event()
    ticket = case.store.read(case.store.allocate(400), tensor)
    del tensor
    ticket.add_done_callback(lambda _: done.set())
    assert done.wait(TIMEOUT_S)  # not ticket.wait(), which takes the traceback away
    error = ticket.exception()
    assert isinstance(error, CorruptExtentError)
    assert error.__traceback__ is not None
    assert reference() is None


def test_a_cancelled_ticket_drops_the_buffer(narrow_case: Case) -> None:
    case = narrow_case
    gates = block_workers(case.store, 1)
    tensor = torch.zeros(100)
    reference = weakref.ref(tensor)
    ticket = case.store.write(tensor, case.store.allocate(400))
    del tensor
    assert ticket.cancel()
    assert reference() is None
    for gate in gates:
        gate.opened.set()


def test_free_from_a_finalizer_during_allocate(case: Case) -> None:
    class Packed:
        def __init__(self) -> None:
            self.extent = case.store.allocate(100)
            self.me = self  # only the cycle collector can end it

        def __del__(self) -> None:
            case.store.free(self.extent)

    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)  # collect inside every allocation, also those under the store's lock
    try:
        for _ in range(200):
            Packed()
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert case.store.statistics().live_nbytes == 0


def test_cancel_and_free_from_a_finalizer(case: Case) -> None:
    class Packed:
        def __init__(self) -> None:
            self.extent = case.store.allocate(100)
            self.ticket = case.store.write(np.zeros(100, np.uint8), self.extent)
            self.me = self

        def __del__(self) -> None:
            self.ticket.cancel()
            case.store.free(self.extent)

    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for _ in range(100):
            Packed()
            case.store.statistics()
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    extent = case.store.allocate(1)
    case.store.write(b"x", extent).wait(TIMEOUT_S)


def test_close_twice_and_use_afterwards(case: Case) -> None:
    extent = case.store.allocate(16)
    case.store.write(case.random(16), extent).wait(TIMEOUT_S)
    case.store.close()
    case.store.close()
    case.store.free(extent)
    for use in (
        lambda: case.store.allocate(1),
        lambda: case.store.write(b"x" * 16, extent),
        lambda: case.store.read(extent, bytearray(16)),
        lambda: case.store.map(extent),
    ):
        with pytest.raises(BackendUnavailableError, match="closed"):
            use()
    assert case.store.statistics().written_nbytes == 16


def test_close_with_many_transfers_of_one_extent(narrow_case: Case) -> None:
    case = narrow_case
    gates = block_workers(case.store, 1)
    extent = case.store.allocate(16)
    tickets = [case.store.write(case.random(16), extent) for _ in range(300)]
    tickets += [case.store.read(extent, case.empty(16)) for _ in range(300)]
    with pytest.raises(TimeoutError):
        case.store.close(timeout_s=0.0)
    assert all(ticket.cancelled for ticket in tickets)
    for gate in gates:
        gate.opened.set()


def test_close_with_io_in_flight(narrow_case: Case) -> None:
    case = narrow_case
    gates = block_workers(case.store, 1)
    extent = case.store.allocate(16)
    write = case.store.write(case.random(16), extent)
    read = case.store.read(extent, case.empty(16))
    with pytest.raises(TimeoutError, match="still running"):
        case.store.close(timeout_s=0.01)
    assert write.cancelled
    assert read.cancelled
    for gate in gates:
        gate.opened.set()
    case.store.close()


def test_close_from_a_callback(case: Case) -> None:
    closed = threading.Event()

    def close(_: object) -> None:
        case.store.close()
        closed.set()

    gate = Gate()
    ticket = case.store.write(case.random(16), case.store.allocate(16), after=gate)
    ticket.add_done_callback(close)
    gate.opened.set()
    assert closed.wait(TIMEOUT_S)
    case.store.close()


def test_zero_bytes_complete_at_once(narrow_case: Case) -> None:
    case = narrow_case
    gates = block_workers(case.store, 1)
    extent = case.store.allocate(0)
    assert case.store.write(b"", extent).done()
    assert case.store.read(extent, bytearray()).done()
    ran = threading.Event()
    ticket = case.store.write(b"", extent, after=ran.set)
    assert not ticket.done()
    for gate in gates:
        gate.opened.set()
    ticket.wait(TIMEOUT_S)
    assert ran.is_set()
    with pytest.raises(ValueError, match="empty"):
        case.store.map(extent)
