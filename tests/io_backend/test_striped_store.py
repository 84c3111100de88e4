"""Several devices as one: shares, and devices that fail, lag or fall silent.

Covers where extents go and which devices are taken out. Does not cover tickets of several parts (`test_joined_ticket`).
The rule: devices are members in memory that fail on command; how fast they are is told to the store, not measured.
"""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from io_backend import BackendConfig, BackendError, BackendUnavailableError, Extent, StorageFullError, striped_store
from io_backend.striped_store import StripedStore
from io_backend.testing import MemoryStore
from tests.io_backend.gates import TIMEOUT_S

MIB = 1 << 20
KIB = 1 << 10


class FailingMember(MemoryStore):
    """A member that fails while it has an error number, and holds its transfers while it has a gate."""

    def __init__(self, **options: Any) -> None:
        self.move_code = 0
        self.claim_code = 0
        self.opened = threading.Event()
        self.opened.set()
        super().__init__(BackendConfig(num_workers=1), **options)

    def move(self, operation: Any, extent: Any, memory: Any) -> Any:
        assert self.opened.wait(TIMEOUT_S)
        if self.move_code and operation == "write":
            raise OSError(self.move_code, "the device is gone")
        return super().move(operation, extent, memory)

    def _claim_space(self, nbytes: int) -> Extent:
        if self.claim_code:
            raise BackendError(self.claim_code, "the file cannot grow")
        return super()._claim_space(nbytes)


@pytest.fixture
def events() -> list[str]:
    return []


@pytest.fixture
def make(events: list[str]) -> Iterator[Callable[..., StripedStore]]:
    made: list[StripedStore] = []

    def build(*members: MemoryStore, **options: Any) -> StripedStore:
        names = [f"ssd{number}" for number in range(len(members))]
        made.append(StripedStore(members, names=names, on_event=events.append, **options))
        return made[-1]

    yield build
    for store in made:
        store.close()


def parts_of(store: StripedStore, extent: Extent) -> dict[int, int]:
    """Bytes of an extent by device."""
    return {part.member: part.extent.nbytes for part in store._parts[extent.serial]}


def outs(store: StripedStore) -> list[bool]:
    return [bool(device.out) for device in store.statistics().devices]


def round_trip(store: StripedStore, nbytes: int) -> None:
    data, back = np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8), np.zeros(nbytes, np.uint8)
    extent = store.allocate(nbytes)
    store.write(data, extent)
    store.read(extent, back).wait(TIMEOUT_S)
    assert np.array_equal(back, data)
    store.free(extent)


def test_large_extents_lie_on_all_devices_by_weight(make: Callable[..., StripedStore]) -> None:
    store = make(FailingMember(), FailingMember(), FailingMember(), weights=[1.0, 3.0, 2.0])
    extent = store.allocate(60 * MIB + 5)
    assert parts_of(store, extent) == {0: 10 * MIB, 1: 30 * MIB + 5, 2: 20 * MIB}
    assert sorted(part.start for part in store._parts[extent.serial])[0] == 0
    assert extent.capacity_nbytes >= extent.nbytes
    assert store.statistics().live_nbytes == extent.capacity_nbytes


def test_no_part_is_small(make: Callable[..., StripedStore]) -> None:
    store = make(FailingMember(), FailingMember(), weights=[1.0, 9.0])
    assert parts_of(store, store.allocate(16 * MIB)) == {1: 16 * MIB}
    assert len(parts_of(store, store.allocate(8 * MIB - 1))) == 1
    assert len(parts_of(store, store.allocate(40 * MIB))) == 2
    contiguous = store.allocate(40 * MIB, contiguous=True)
    assert len(parts_of(store, contiguous)) == 1


def test_small_extents_take_turns_by_weight(make: Callable[..., StripedStore]) -> None:
    store = make(FailingMember(), FailingMember(), weights=[1.0, 3.0])
    counts = Counter(store.allocate(64 * KIB).file_index for _ in range(400))
    assert counts == {0: 100, 1: 300}


def test_what_was_measured_becomes_the_weight(make: Callable[..., StripedStore]) -> None:
    store = make(FailingMember(), FailingMember())
    tell_rates(store, [100e6, 300e6])
    assert [device.weight for device in store.statistics().devices] == pytest.approx([100e6, 300e6])
    assert parts_of(store, store.allocate(64 * MIB)) == {0: 16 * MIB, 1: 48 * MIB}
    assert outs(store) == [False, False]


def tell_rates(store: StripedStore, rates: list[float], times: int = 10) -> None:
    """Transfers of a megabyte that went at these rates, as far as the store can see."""
    for _ in range(times):
        for member, rate in zip(store._members, rates, strict=True):
            ended: Any = SimpleNamespace(nbytes=MIB, transfer_s=MIB / rate, exception=lambda: None)
            store._watch(member, ended)


def test_a_device_that_lags_is_taken_out(make: Callable[..., StripedStore], events: list[str]) -> None:
    store = make(FailingMember(), FailingMember(), FailingMember())
    kept = [store.allocate(KIB) for _ in range(3)]
    tell_rates(store, [1e9, 100e6, 1e9])
    assert outs(store) == [False, True, False]
    assert len(events) == 1
    for part in ("ssd1", "100 MB/s", "1000", "1 live extents of 1024 bytes", "ssd0, ssd2"):
        assert part in events[0]
    assert {store.allocate(KIB).file_index for _ in range(20)} == {0, 2}
    assert set(parts_of(store, store.allocate(24 * MIB))) == {0, 2}
    for extent in kept:  # what is on it can still be used
        back = bytearray(KIB)
        store.write(b"x" * KIB, extent)
        store.read(extent, back).wait(TIMEOUT_S)
        assert back == b"x" * KIB


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.ESTALE, errno.ENODEV])
def test_a_device_that_fails_is_taken_out(make: Callable[..., StripedStore], events: list[str], code: int) -> None:
    broken = FailingMember()
    store = make(FailingMember(), broken)
    healthy_extent, extent = store.allocate(KIB), store.allocate(KIB)
    assert [healthy_extent.file_index, extent.file_index] == [0, 1]
    store.write(b"x" * KIB, extent).wait(TIMEOUT_S)
    other = store.allocate(KIB, contiguous=True)
    other = other if other.file_index else store.allocate(KIB, contiguous=True)
    broken.move_code = code
    with pytest.raises(BackendError) as caught:
        store.write(b"y" * KIB, other).wait(TIMEOUT_S)
    assert caught.value.errno == code
    assert outs(store) == [False, True]
    assert len(events) == 1
    assert "ssd1 was taken out: it failed" in events[0]
    back = bytearray(KIB)
    store.read(extent, back).wait(TIMEOUT_S)
    assert back == b"x" * KIB
    for _ in range(3):
        round_trip(store, 20 * MIB)
        round_trip(store, KIB)
    assert len(events) == 1


def test_a_full_device_is_no_failing_one(make: Callable[..., StripedStore], events: list[str]) -> None:
    store = make(FailingMember(capacity_nbytes=5 * MIB), FailingMember())
    assert [store.allocate(4 * MIB).file_index for _ in range(4)] == [0, 1, 1, 1]
    assert parts_of(store, store.allocate(16 * MIB)) == {1: 8 * MIB}  # both halves
    assert len(store._parts) == 5
    assert events == []
    assert outs(store) == [False, False]


def test_a_file_that_cannot_grow_takes_its_device_out(make: Callable[..., StripedStore], events: list[str]) -> None:
    broken = FailingMember()
    broken.claim_code = errno.EROFS
    store = make(broken, FailingMember())
    assert store.allocate(KIB).file_index == 1
    assert outs(store) == [True, False]
    assert len(events) == 1
    round_trip(store, 20 * MIB)


def test_the_last_device_stays(make: Callable[..., StripedStore], events: list[str]) -> None:
    members = FailingMember(), FailingMember()
    store = make(*members)
    for member in members:
        member.claim_code = errno.EIO
    with pytest.raises(BackendError, match="cannot grow") as caught:
        store.allocate(KIB)
    assert caught.value.errno == errno.EIO
    assert sum(outs(store)) == 1
    for member in members:
        member.claim_code = 0
    round_trip(store, KIB)
    assert store.statistics().live_nbytes == 0


def test_when_one_part_finds_no_room_the_others_are_given_back(make: Callable[..., StripedStore]) -> None:
    store = make(FailingMember(capacity_nbytes=6 * MIB), FailingMember(capacity_nbytes=6 * MIB))
    with pytest.raises(StorageFullError):
        store.allocate(16 * MIB)
    assert store.statistics().live_nbytes == 0
    round_trip(store, 10 * MIB)


def test_a_silent_device_is_taken_out(
    make: Callable[..., StripedStore], events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = FailingMember()
    store = make(silent, FailingMember())
    extent = store.allocate(KIB)
    assert extent.file_index == 0
    silent.opened.clear()
    started = threading.Event()
    ticket = store.write(b"x" * KIB, extent, after=started.set)
    assert started.wait(TIMEOUT_S)
    monkeypatch.setattr(striped_store, "_SILENT_S", 0.0)
    store._looked_s = 0.0
    assert store.allocate(KIB).file_index == 1
    assert "a transfer has been running" in events[0]
    silent.opened.set()
    ticket.wait(TIMEOUT_S)
    assert outs(store) == [True, False]


def test_arguments(make: Callable[..., StripedStore]) -> None:
    member = FailingMember()
    for names, weights in ((["a", "b"], None), (["a"], [0.0]), (["a"], [1.0, 2.0])):
        with pytest.raises(ValueError, match="positive weight"):
            StripedStore([member], names=names, on_event=print, weights=weights)
    store = make(member, FailingMember())
    with pytest.raises(ValueError, match="contiguous"):
        store.map(store.allocate(20 * MIB))
    store.close()
    with pytest.raises(BackendUnavailableError, match="closed"):
        store.allocate(1)
