"""The tier in host memory: how much it may take, slabs used again, pinning that fails.

The rule: idle slabs count, and go before a new one is refused.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from io_backend import BackendConfig, BackendUnavailableError, StorageFullError
from io_backend.host_memory import HostLimit, host_limit
from io_backend.host_store import HostStore

MIB = 1 << 20


@pytest.fixture
def make() -> Iterator[Callable[..., HostStore]]:
    stores: list[HostStore] = []

    def build(**arguments: object) -> HostStore:
        stores.append(HostStore(BackendConfig(), **{"capacity_nbytes": 8 * MIB, **arguments}))  # type: ignore[arg-type]
        return stores[-1]

    yield build
    for store in stores:
        store.close()


def test_slabs_are_exact_and_used_again(make: Callable[..., HostStore]) -> None:
    store = make()
    extent = store.allocate(3 * MIB + 1)
    assert extent.capacity_nbytes == 3 * MIB + 4096
    address = store._slabs[extent.offset].address
    store.free(extent)
    assert store.statistics().live_nbytes == 0
    assert store.statistics().largest_free_nbytes == 3 * MIB + 4096
    again = store.allocate(3 * MIB + 4096)  # as many pages
    assert store._slabs[again.offset].address == address
    assert store.statistics().high_water_nbytes == 3 * MIB + 4096


def test_idle_slabs_go_before_a_new_one_is_refused(make: Callable[..., HostStore]) -> None:
    store = make()
    store.free(store.allocate(6 * MIB))
    kept = store.allocate(4 * MIB)  # not beside the idle 6
    assert store.statistics().largest_free_nbytes == 0
    with pytest.raises(StorageFullError, match=r"8388608 bytes has 4194304 left, 5242880 are needed: raise"):
        store.allocate(5 * MIB)
    data, back = np.arange(4 * MIB, dtype=np.uint8), np.zeros(4 * MIB, np.uint8)
    store.write(data, kept)
    store.read(kept, back).wait(20)
    assert np.array_equal(data, back)


def test_the_machine_may_allow_less(make: Callable[..., HostStore]) -> None:
    left = [3 * MIB]
    store = make(limit=lambda: HostLimit(left[0], "the container's memory limit"))
    extent = store.allocate(2 * MIB)
    left[0] = MIB
    with pytest.raises(StorageFullError, match="2097152 bytes more, but the container's memory limit allows 1048"):
        store.allocate(2 * MIB)
    store.free(extent)
    store.allocate(2 * MIB)  # the idle slab
    assert "the container's memory limit allows 1048576 more" in store.describe()


def test_the_limit_is_the_least_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_limit(pinned=False, cgroup_root=tmp_path).reason == "free memory of the machine"
    monkeypatch.setattr("io_backend.host_memory.container_free_nbytes", lambda root: 8 * MIB)
    assert host_limit(pinned=False, local_ranks=4) == HostLimit(2 * MIB, "the container's memory limit")
    monkeypatch.setattr(resource, "getrlimit", lambda what: (MIB, MIB))
    assert host_limit(pinned=False, local_ranks=4).nbytes == 2 * MIB
    assert host_limit(pinned=True, local_ranks=4) == HostLimit(MIB, "the limit of locked memory (`ulimit -l`)")


class Cudart:
    """CUDA's registration of host memory, which refuses from some size on."""

    def __init__(self, most_nbytes: int) -> None:
        self.most_nbytes = most_nbytes
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        if nbytes > self.most_nbytes:
            return 2
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0


def test_slabs_are_pinned_until_that_fails(make: Callable[..., HostStore], monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = Cudart(2 * MIB)
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(cudart=lambda: cudart))
    events: list[str] = []
    store = make(pinned=True, on_event=events.append, limit=lambda: HostLimit(1 << 40, "nothing"))
    store.allocate(MIB)
    store.free(store.allocate(2 * MIB))
    assert sorted(cudart.registered.values()) == [MIB, 2 * MIB]
    assert "pinned" in store.describe()
    store.allocate(3 * MIB)
    (event,) = events
    assert "3145728 bytes of host memory could not be pinned (cudaHostRegister gave 2)" in event
    assert "pageable" in store.describe()
    store.allocate(4 * MIB)  # takes the room of the idle slab, which is unpinned first
    assert sorted(cudart.registered.values()) == [MIB]
    store.close()
    assert not cudart.registered


def test_wrong_calls(make: Callable[..., HostStore]) -> None:
    with pytest.raises(ValueError, match="capacity_nbytes is -1"):
        make(capacity_nbytes=-1)
    store = make()
    with pytest.raises(BackendUnavailableError, match="no file to map"):
        store.map(store.allocate(4096))
