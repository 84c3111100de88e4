"""What every store must do, run on each of them.

Covers round trips, order within an extent, priorities, cancelling, freeing, closing. Does not cover what only files can
do wrong (`test_direct_io`, `test_spill_file`). The rule: races are provoked by events, never by sleeping.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from io_backend import BackendConfig, BackendError, BackendUnavailableError, CorruptExtentError, Priority, Store

if TYPE_CHECKING:
    from conftest import Case

MIB = 1 << 20
SIZES = (0, 1, 511, 512, 513, 4095, 4096, 4097, MIB + 12, 20 * MIB + 1)
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
TIMEOUT_S = 20.0


class Gate:
    """An ``after`` that stops its worker until opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.opened.wait(TIMEOUT_S)


def block_workers(case: Case, num_workers: int) -> list[Gate]:
    """Occupy that many workers with urgent writes until their gates open."""
    gates = []
    for _ in range(num_workers):
        gate = Gate()
        case.store.write(np.zeros(8, np.uint8), case.store.allocate(8), priority=Priority.URGENT, after=gate)
        assert gate.reached.wait(TIMEOUT_S)
        gates.append(gate)
    return gates


def test_is_a_store(case: Case) -> None:
    assert isinstance(case.store, Store)
    assert "\n" not in case.store.describe()
    assert case.store.staging_nbytes >= 0


def test_round_trips_of_all_sizes(case: Case) -> None:
    written = []
    for nbytes in SIZES:
        extent = case.store.allocate(nbytes)
        assert extent.nbytes == nbytes
        assert extent.capacity_nbytes >= nbytes
        data = case.random(nbytes)
        written.append((extent, data, case.store.write(data, extent)))
    for extent, data, _ in written:
        back = case.empty(extent.nbytes)
        case.store.read(extent, back).wait(TIMEOUT_S)
        assert np.array_equal(back, data)
    for extent, _, ticket in written:
        ticket.wait(TIMEOUT_S)
        case.store.free(extent)
    statistics = case.store.statistics()
    assert statistics.written_nbytes == statistics.read_nbytes == sum(SIZES)
    assert statistics.num_writes == statistics.num_reads == len(SIZES)
    assert sum(statistics.paths.values()) == 2 * sum(SIZES)
    assert statistics.live_nbytes == 0
    assert statistics.high_water_nbytes >= sum(SIZES)
    assert statistics.queued == 0
    assert statistics.write_busy_s > 0
    assert statistics.read_busy_s > 0


def test_reads_touch_no_byte_beyond_the_buffer(case: Case) -> None:
    for nbytes in (1, 511, 4097, MIB + 12):
        extent = case.store.allocate(nbytes)
        data = case.random(nbytes)
        case.store.write(data, extent)
        around = case.empty(nbytes + 8192)
        around[:] = 0xA5
        case.store.read(extent, around[4096 : 4096 + nbytes]).wait(TIMEOUT_S)
        assert np.array_equal(around[4096 : 4096 + nbytes], data)
        assert (around[:4096] == 0xA5).all()
        assert (around[4096 + nbytes :] == 0xA5).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(case: Case, dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, (257, 3, 8), dtype=torch.uint8).to(dtype)
    nbytes = tensor.numel() * tensor.element_size()
    extent = case.store.allocate(nbytes)
    case.store.write(tensor, extent)
    back = torch.empty_like(tensor)
    case.store.read(extent, back).wait(TIMEOUT_S)
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_every_kind_of_buffer(case: Case) -> None:
    data = bytes(range(100))
    extent = case.store.allocate(len(data))
    sources = (
        data,
        bytearray(data),
        memoryview(data),
        np.frombuffer(data, np.complex64 if len(data) % 8 == 0 else np.uint16),
        np.frombuffer(data, np.uint8).reshape(10, 10),
        torch.tensor(list(data), dtype=torch.uint8),
        torch.tensor(list(data), dtype=torch.uint8).untyped_storage(),
    )
    for source in sources:
        case.store.write(source, extent)
        target = bytearray(len(data))
        storage = torch.UntypedStorage(len(data))
        case.store.read(extent, target).wait(TIMEOUT_S)
        case.store.read(extent, storage).wait(TIMEOUT_S)
        assert target == data
        assert bytes(storage.tolist()) == data


def test_parameters_and_views_of_storages(case: Case) -> None:
    parameter = torch.nn.Parameter(torch.randn(64, 64))
    extent = case.store.allocate(parameter.nbytes)
    case.store.write(parameter, extent).wait(TIMEOUT_S)
    with torch.no_grad():
        expected = parameter.clone()
        parameter.zero_()
    case.store.read(extent, parameter.untyped_storage()).wait(TIMEOUT_S)
    assert torch.equal(parameter, expected)


@pytest.mark.parametrize(
    "buffer",
    [
        np.zeros(16, np.uint8),
        np.zeros((16, 2), np.uint8)[:, 0],
        torch.zeros(4, 4).t()[:2],
        torch.zeros(8, device="meta"),
        torch.zeros(8).to_sparse(),
    ],
    ids=["size", "strided-array", "strided-tensor", "meta", "sparse"],
)
def test_wrong_buffers_are_refused(case: Case, buffer: object) -> None:
    extent = case.store.allocate(32)
    with pytest.raises(ValueError, match=r"bytes|contiguous|CPU|layout"):
        case.store.write(buffer, extent)  # type: ignore[arg-type]
    assert case.store.statistics().queued == 0


def test_a_read_only_buffer_cannot_be_read_into(case: Case) -> None:
    extent = case.store.allocate(4)
    with pytest.raises(ValueError, match="read-only"):
        case.store.read(extent, b"abcd")
    with pytest.raises(TypeError):
        case.store.write(3, extent)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="-1"):
        case.store.allocate(-1)


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
    gates = block_workers(case, 1)
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
    gates = block_workers(case, 1)
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
    gates = block_workers(case, 1)
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
    gates = block_workers(case, 1)
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
    gates = block_workers(case, 1)
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
    gates = block_workers(case, 1)
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


def test_concurrent_use(case: Case) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(30):
                data = rng.integers(0, 256, int(rng.integers(1, 20000)), dtype=np.uint8)
                extent = case.store.allocate(data.nbytes)
                case.store.write(data, extent)
                back = np.zeros_like(data)
                case.store.read(extent, back, priority=Priority.URGENT).wait(TIMEOUT_S)
                assert np.array_equal(back, data)
                case.store.free(extent)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert case.store.statistics().live_nbytes == 0


def test_zero_bytes_complete_at_once(narrow_case: Case) -> None:
    case = narrow_case
    gates = block_workers(case, 1)
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
