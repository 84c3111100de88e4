"""Several devices as one store: shares by speed, one ticket for several parts, devices that are taken out.

The rules: bytes come back whatever the division; a part that fails fails the whole; a device that was taken out gets
nothing new and is still read.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

import numpy as np
import pytest

from io_backend import BackendConfig, BackendError, Extent, Priority, StorageFullError
from io_backend.striped_store import StripedStore
from io_backend.testing import MemoryStore

if TYPE_CHECKING:
    from io_backend.buffers import Memory
    from io_backend.meter import TransferOutcome
    from io_backend.store import Operation

MIB = 1 << 20
TIMEOUT_S = 20.0


class Device(MemoryStore):
    """A device that fails, is slow or waits when told to."""

    def __init__(self, *, num_workers: int = 2, capacity_nbytes: int | None = None) -> None:
        super().__init__(BackendConfig(num_workers=num_workers), capacity_nbytes=capacity_nbytes)
        self.error: OSError | None = None
        self.pause_s = 0.0
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Event()

    def move(self, operation: Operation, extent: Extent, memory: Memory) -> TransferOutcome:
        self.reached.set()
        assert self.gate.wait(TIMEOUT_S)
        time.sleep(self.pause_s)
        if self.error is not None:
            raise self.error
        return super().move(operation, extent, memory)


class Array:
    """A striped store, its devices and what it said."""

    def __init__(self, devices: list[Device], weights: list[float] | None = None) -> None:
        self.devices = devices
        self.events: list[str] = []
        names = [f"disk{number}" for number in range(len(devices))]
        self.store = StripedStore(devices, names=names, weights=weights, on_event=self.events.append)

    def live_nbytes(self) -> list[int]:
        return [device.statistics().live_nbytes for device in self.devices]

    def block(self) -> list[threading.Event]:
        """Let the workers wait in their next transfer."""
        for device in self.devices:
            device.gate.clear()
            device.reached.clear()
        return [device.gate for device in self.devices]


@pytest.fixture
def make() -> Iterator[Callable[..., Array]]:
    arrays: list[Array] = []

    def build(*devices: Device, weights: list[float] | None = None) -> Array:
        arrays.append(Array(list(devices) or [Device(), Device()], weights))
        return arrays[-1]

    yield build
    for array in arrays:
        for device in array.devices:
            device.gate.set()
        array.store.close()


def data(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.mark.parametrize("nbytes", [8 * MIB, 20 * MIB + 1, 64 * MIB + 12])
def test_large_extents_lie_on_all_devices_in_proportion(make: Callable[..., Array], nbytes: int) -> None:
    array = make(weights=[1.0, 1.0] if nbytes == 8 * MIB else [3.0, 1.0])
    extent = array.store.allocate(nbytes)
    first, second = array.live_nbytes()
    assert first + second == extent.capacity_nbytes >= nbytes
    if nbytes > 60 * MIB:
        assert first / second == pytest.approx(3.0, rel=0.1)
    elif nbytes == 8 * MIB:
        assert first == second
    source, back = data(nbytes), np.zeros(nbytes, np.uint8)
    write = array.store.write(source, extent)
    array.store.read(extent, back).wait(TIMEOUT_S)
    assert write.done()
    assert np.array_equal(source, back)
    statistics = array.store.statistics()
    assert (statistics.num_writes, statistics.num_reads) == (1, 1)
    assert statistics.written_nbytes == statistics.read_nbytes == nbytes
    array.store.free(extent)
    assert array.live_nbytes() == [0, 0]


def test_small_extents_lie_on_one_device_in_turn_by_weight(make: Callable[..., Array]) -> None:
    array = make(weights=[3.0, 1.0])
    extents = [array.store.allocate(MIB) for _ in range(40)]
    assert [sum(extent.file_index == number for extent in extents) for number in (0, 1)] == [30, 10]


def test_what_is_to_be_mapped_stays_whole(make: Callable[..., Array]) -> None:
    array = make()
    array.store.allocate(32 * MIB, contiguous=True)
    assert sorted(array.live_nbytes()) == [0, 32 * MIB]
    with pytest.raises(ValueError, match="2 devices; allocate it with contiguous=True"):
        array.store.map(array.store.allocate(32 * MIB))


def test_a_full_device_leaves_its_share_to_the_other(make: Callable[..., Array]) -> None:
    array = make(Device(capacity_nbytes=MIB), Device(capacity_nbytes=40 * MIB))
    extent = array.store.allocate(32 * MIB)
    assert array.live_nbytes() == [0, 32 * MIB]
    with pytest.raises(StorageFullError):
        array.store.allocate(32 * MIB)
    assert array.live_nbytes() == [0, 32 * MIB]
    array.store.free(extent)
    array.store.allocate(32 * MIB)


def test_a_joined_ticket_is_cancelled_whole_or_not_at_all(make: Callable[..., Array]) -> None:
    array = make(Device(num_workers=1), Device(num_workers=1))
    blocked, wanted = array.store.allocate(16 * MIB), array.store.allocate(16 * MIB)
    array.block()
    array.store.write(data(16 * MIB), blocked, priority=Priority.URGENT)
    for device in array.devices:
        assert device.reached.wait(TIMEOUT_S)
    ticket = array.store.write(data(16 * MIB), wanted)
    assert (ticket.state, ticket.started) == ("queued", False)
    done: list[str] = []
    ticket.add_done_callback(lambda each: done.append(each.state))
    assert ticket.cancel()
    assert (ticket.state, done) == ("cancelled", ["cancelled"])
    with pytest.raises(CancelledError):
        ticket.wait(TIMEOUT_S)

    second = array.store.write(data(16 * MIB), wanted)
    array.devices[1].reached.clear()
    array.devices[1].gate.set()  # its part starts (and ends); that of the other device waits
    assert array.devices[1].reached.wait(TIMEOUT_S)
    while not second.started:
        time.sleep(0.001)
    assert not second.cancel()
    with pytest.raises(TimeoutError):
        second.wait(0.01)
    second.raise_priority(Priority.URGENT)
    assert second.priority is Priority.URGENT
    array.devices[0].gate.set()
    second.wait(TIMEOUT_S)
    back = np.zeros(16 * MIB, np.uint8)
    array.store.read(wanted, back).wait(TIMEOUT_S)
    assert np.array_equal(back, data(16 * MIB))


def test_one_part_that_fails_fails_the_whole(make: Callable[..., Array]) -> None:
    array = make()
    extent = array.store.allocate(16 * MIB)
    array.devices[1].error = OSError(errno.EINVAL, "no")
    ticket = array.store.write(data(16 * MIB), extent)
    with pytest.raises(BackendError, match="Invalid argument"):
        ticket.wait(TIMEOUT_S)
    assert ticket.state == "failed"
    assert not array.events  # a refused call is not the device's end
    array.devices[1].error = None
    with pytest.raises(BackendError, match="did not succeed"):
        array.store.read(extent, np.zeros(16 * MIB, np.uint8)).wait(TIMEOUT_S)
    array.store.write(data(16 * MIB), extent).wait(TIMEOUT_S)


def test_the_preparation_runs_once_for_all_parts(make: Callable[..., Array]) -> None:
    array = make()
    extent = array.store.allocate(16 * MIB)
    calls: list[int] = []
    array.store.write(data(16 * MIB), extent, after=lambda: calls.append(1)).wait(TIMEOUT_S)
    assert calls == [1]

    def refuse() -> None:
        raise OSError(errno.EINTR, "not now")

    with pytest.raises(BackendError):
        array.store.write(data(16 * MIB), extent, after=refuse).wait(TIMEOUT_S)


def test_a_failing_device_is_taken_out_and_still_read(make: Callable[..., Array]) -> None:
    array = make()
    kept = [array.store.allocate(MIB) for _ in range(4)]
    for number, extent in enumerate(kept):
        array.store.write(data(MIB, number), extent).wait(TIMEOUT_S)
    array.devices[0].error = OSError(errno.EIO, "broken")
    with pytest.raises(BackendError, match="Input/output error"):
        array.store.write(data(16 * MIB), array.store.allocate(16 * MIB)).wait(TIMEOUT_S)
    while not array.events:  # it is said after the ticket is done
        time.sleep(0.001)
    (event,) = array.events
    assert "disk0 was taken out" in event
    assert "Input/output error" in event
    assert "3 live extents of" in event
    assert "go to disk1" in event
    first, second = array.store.statistics().devices
    assert "Input/output" in first.out
    assert not second.out
    before = array.live_nbytes()[0]
    for _ in range(5):
        extent = array.store.allocate(16 * MIB)
        array.store.write(data(16 * MIB), extent).wait(TIMEOUT_S)
        array.store.free(extent)
    assert array.live_nbytes()[0] == before
    array.devices[0].error = None  # some blocks of a failing disk can still be read
    for number, extent in enumerate(kept):
        back = np.zeros(MIB, np.uint8)
        array.store.read(extent, back).wait(TIMEOUT_S)
        assert np.array_equal(back, data(MIB, number))


def test_the_last_device_stays_whatever_it_does(make: Callable[..., Array]) -> None:
    array = make(Device())
    array.devices[0].error = OSError(errno.EIO, "broken")
    with pytest.raises(BackendError):
        array.store.write(data(MIB), array.store.allocate(MIB)).wait(TIMEOUT_S)
    array.devices[0].error = None
    array.store.write(data(MIB), array.store.allocate(MIB)).wait(TIMEOUT_S)
    assert not array.events


def test_a_lagging_device_is_taken_out(make: Callable[..., Array]) -> None:
    array = make()
    array.devices[1].pause_s = 0.05
    for _ in range(60):
        extent = array.store.allocate(MIB)
        array.store.write(data(MIB), extent).wait(TIMEOUT_S)
        array.store.free(extent)
        if array.events:
            break
    (event,) = array.events
    assert "disk1 was taken out: it moves" in event


def test_weights_follow_what_is_measured(make: Callable[..., Array]) -> None:
    array = make()
    array.devices[0].pause_s, array.devices[1].pause_s = 0.004, 0.012
    for _ in range(40):
        extent = array.store.allocate(MIB)
        array.store.write(data(MIB), extent).wait(TIMEOUT_S)
        array.store.free(extent)
    first, second = array.store.statistics().devices
    assert first.weight > second.weight
    assert not array.events


def test_a_silent_device_is_taken_out(make: Callable[..., Array], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("io_backend.striped_store._SILENT_S", 0.0)
    array = make()
    extents = [array.store.allocate(MIB) for _ in range(2)]
    array.devices[0].gate.clear()
    ticket = array.store.write(data(MIB), extents[0])
    assert array.devices[0].reached.wait(TIMEOUT_S)
    array.store._looked_s = 0.0
    array.store.allocate(MIB)
    (event,) = array.events
    assert "disk0 was taken out: a transfer has been running for" in event
    array.devices[0].gate.set()
    ticket.wait(TIMEOUT_S)
    back = np.zeros(MIB, np.uint8)
    array.store.read(extents[0], back).wait(TIMEOUT_S)
    assert np.array_equal(back, data(MIB))


def test_wrong_members() -> None:
    with pytest.raises(ValueError, match="a name and a positive weight for each of 0 stores"):
        StripedStore([], names=[], on_event=print)
