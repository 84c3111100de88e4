"""The host tier: what it may take, what it recycles, and how it goes on without pinned memory.

Covers capacity, the machine's limit, recycling by size, pinning. The contract is tested in `test_contract_round_trips`
and its neighbours. The rule: no test asks the real machine what is free.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from io_backend import BackendUnavailableError, HostStore, StorageFullError, host_store
from io_backend.host_memory import HostLimit
from tests.io_backend.conftest import make_config
from tests.io_backend.gates import TIMEOUT_S, Gate

PAGE = mmap.PAGESIZE
MIB = 1 << 20


class Machine:
    """A limit that tests set, and a CUDA runtime that pins or does not."""

    def __init__(self) -> None:
        self.free_nbytes = 1 << 40
        self.status = 0
        self.failure: Exception | None = None
        self.pinned: dict[int, int] = {}

    def limit(self) -> HostLimit:
        return HostLimit(self.free_nbytes, "the container's memory limit")

    def cudart(self) -> Any:
        if self.failure is not None:
            raise self.failure
        return SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister)

    def _register(self, address: int, nbytes: int, flags: int) -> int:
        if self.status == 0:
            self.pinned[address] = nbytes
        return self.status

    def _unregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(torch.cuda, "cudart", machine.cudart)
    return machine


@pytest.fixture
def make(machine: Machine) -> Iterator[Callable[..., HostStore]]:
    made: list[HostStore] = []

    def build(capacity_nbytes: int, **options: Any) -> HostStore:
        made.append(HostStore(make_config(), capacity_nbytes=capacity_nbytes, limit=machine.limit, **options))
        return made[-1]

    yield build
    for store in made:
        store.close()


def round_trip(store: HostStore, extent: Any) -> None:
    data, back = bytes([extent.serial % 251]) * extent.nbytes, bytearray(extent.nbytes)
    store.write(data, extent)
    store.read(extent, back).wait(TIMEOUT_S)
    assert back == data


def test_capacity(make: Callable[..., HostStore]) -> None:
    store = make(10 * PAGE)
    extents = [store.allocate(5 * PAGE - 100), store.allocate(4 * PAGE)]
    with pytest.raises(StorageFullError, match=f"{10 * PAGE} bytes has {PAGE} left, {2 * PAGE} are needed") as caught:
        store.allocate(PAGE + 1)
    assert caught.value.errno == errno.ENOSPC
    extents.append(store.allocate(1))
    for extent in extents:
        round_trip(store, extent)
    assert store.statistics().live_nbytes == 10 * PAGE
    with pytest.raises(StorageFullError):
        store.allocate(1)
    store.free(extents[0])
    round_trip(store, store.allocate(5 * PAGE))
    with pytest.raises(ValueError, match="-1"):
        make(-1)
    with pytest.raises(StorageFullError):
        make(0).allocate(1)
    make(0).allocate(0)


def test_what_the_machine_allows(make: Callable[..., HostStore], machine: Machine) -> None:
    store = make(1 << 30)
    kept = store.allocate(MIB)
    machine.free_nbytes = MIB - 1
    with pytest.raises(StorageFullError, match="the container's memory limit allows 1048575") as caught:
        store.allocate(MIB)
    assert caught.value.errno == errno.ENOMEM
    assert f"allows {MIB - 1} more" in store.describe()
    assert store.statistics().live_nbytes == MIB
    round_trip(store, kept)
    machine.free_nbytes = MIB
    round_trip(store, store.allocate(MIB))


def test_slabs_are_recycled_by_size(make: Callable[..., HostStore], machine: Machine) -> None:
    store = make(1 << 30)
    first = store.allocate(3 * PAGE)
    address = store._slabs[first.offset].address
    store.free(first)
    assert store.statistics().largest_free_nbytes == 3 * PAGE
    machine.free_nbytes = 0  # nothing new can be had
    again = store.allocate(2 * PAGE + 1)
    assert store._slabs[again.offset].address == address
    with pytest.raises(StorageFullError):
        store.allocate(PAGE)
    assert store.statistics().high_water_nbytes == 3 * PAGE


def test_idle_slabs_make_room_for_other_sizes(make: Callable[..., HostStore], machine: Machine) -> None:
    store = make(10 * PAGE, pinned=True)
    extents = [store.allocate(nbytes * PAGE) for nbytes in (6, 1, 1, 1)]
    for extent in extents:
        store.free(extent)
    kept = store.allocate(PAGE)
    wide = store.allocate(7 * PAGE)  # the idle six pages go, the single ones may stay
    round_trip(store, wide)
    round_trip(store, kept)
    assert sum(machine.pinned.values()) <= 10 * PAGE
    assert store.statistics().live_nbytes == 8 * PAGE


def test_a_busy_slab_is_not_recycled(make: Callable[..., HostStore]) -> None:
    store, gate = make(2 * PAGE), Gate()
    extent = store.allocate(PAGE)
    ticket = store.write(b"x" * PAGE, extent, after=gate)
    store.free(extent)
    other = store.allocate(PAGE)
    with pytest.raises(StorageFullError):
        store.allocate(PAGE)
    gate.opened.set()
    ticket.wait(TIMEOUT_S)
    round_trip(store, store.allocate(PAGE))
    round_trip(store, other)


def test_pinned_slabs(make: Callable[..., HostStore], machine: Machine) -> None:
    store = make(1 << 30, pinned=True)
    extents = [store.allocate(PAGE), store.allocate(MIB)]
    assert sorted(machine.pinned.values()) == [PAGE, MIB]
    store.free(extents[0])
    round_trip(store, store.allocate(PAGE))
    assert len(machine.pinned) == 2
    assert "pinned" in store.describe()
    store.close()
    assert machine.pinned == {}


@pytest.mark.parametrize(
    ("status", "failure", "reason"),
    [
        (2, None, "cudaHostRegister gave 2"),
        (0, RuntimeError("no device\nand more"), "no device"),
        (0, AssertionError("Torch not compiled with CUDA enabled"), "not compiled"),
    ],
)
def test_without_pinning_the_tier_goes_on(
    make: Callable[..., HostStore], machine: Machine, status: int, failure: Exception | None, reason: str
) -> None:
    events: list[str] = []
    store = make(1 << 30, pinned=True, on_event=events.append)
    pinned = store.allocate(PAGE)
    machine.status, machine.failure = status, failure
    extents = [pinned, store.allocate(PAGE), store.allocate(PAGE)]
    assert len(events) == 1
    assert reason in events[0]
    assert "pageable" in store.describe()
    for extent in extents:
        round_trip(store, extent)
    machine.status, machine.failure = 0, None
    store.close()
    assert machine.pinned == {}


def test_a_system_without_memory(make: Callable[..., HostStore], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(nbytes: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    store = make(1 << 30)
    with monkeypatch.context() as patch:
        patch.setattr(host_store, "aligned_memory", refuses)
        with pytest.raises(StorageFullError, match="refuses") as caught:
            store.allocate(PAGE)
    assert caught.value.errno == errno.ENOMEM
    assert store.statistics().live_nbytes == 0
    round_trip(store, store.allocate(PAGE))


def test_there_is_no_file_to_map(make: Callable[..., HostStore]) -> None:
    store = make(1 << 30)
    with pytest.raises(BackendUnavailableError, match="no file"):
        store.map(store.allocate(PAGE))
