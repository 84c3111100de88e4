"""The stores that the contract suite runs on, and buffers as each of them should meet them.

Covers building and closing stores in a temporary directory. Does not cover what they must do: the tests say that.
The rule: growth steps and reserves are small here, so that no test depends on how full the machine's disk is.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from io_backend import BackendConfig, Store, open_store
from io_backend.buffers import aligned_memory
from io_backend.host_store import HostStore
from io_backend.testing import FaultStore, MemoryStore

# Under ``python -O`` too the asserts of these run.
pytest.register_assert_rewrite("tests.io_backend.scripted_run", "tests.io_backend.disk_images")

MIB = 1 << 20
ONE_QUEUE = ("posix-direct", "posix-buffered", "posix-misaligned", "memory", "fault", "host")
KINDS = (*ONE_QUEUE, "posix-two-directories")
STAND_IN_DRIVER = os.environ.get("TERAIO_TEST_STAND_IN_DRIVER")
"""A library to load as the CUDA driver: the whole run is then about KvikIO alone (`test_kvikio` starts such runs)."""
if STAND_IN_DRIVER:
    ctypes.CDLL(STAND_IN_DRIVER, mode=ctypes.RTLD_GLOBAL)
    ONE_QUEUE = KINDS = ("kvikio",)


def make_config(**changes: object) -> BackendConfig:
    """Settings with small steps; ``changes`` override them."""
    values: dict[str, object] = {"growth_nbytes": 4 * MIB, "bounce_nbytes": MIB, "reserve_free_nbytes": 0, **changes}
    return BackendConfig(**values)  # type: ignore[arg-type]


@dataclass
class Case:
    """One store and the kind of memory to use with it."""

    kind: str
    store: Store
    filler: np.random.Generator

    def empty(self, nbytes: int) -> np.ndarray:
        """A zeroed buffer, page-aligned or off by 13 bytes."""
        if self.kind == "posix-misaligned":
            return np.zeros(nbytes + 13, np.uint8)[13:]
        if nbytes == 0:
            return np.zeros(0, np.uint8)
        memory = aligned_memory(nbytes)
        return np.frombuffer(memory.owner, np.uint8)

    def random(self, nbytes: int) -> np.ndarray:
        """A buffer with random content."""
        buffer = self.empty(nbytes)
        buffer[:] = self.filler.integers(0, 256, nbytes, dtype=np.uint8)
        return buffer


def build(kind: str, path: Path, **changes: object) -> Store:
    """A store of one of the ``KINDS``."""
    if kind == "memory":
        return MemoryStore(make_config(**changes))
    if kind == "fault":
        return FaultStore(MemoryStore(make_config(**changes)))
    if kind == "host":
        return HostStore(make_config(**changes), capacity_nbytes=1 << 30)
    if kind == "posix-two-directories":
        return open_store([path / "one", path / "two"], config=make_config(**changes))
    if kind == "kvikio":
        return open_store(path, backend="kvikio", config=make_config(**changes))
    return open_store(path, config=make_config(direct_io=kind != "posix-buffered", **changes))


@pytest.fixture
def make_case(tmp_path: Path) -> Iterator[Callable[..., Case]]:
    """Build stores that are closed at the end of the test."""
    stores: list[Store] = []

    def make(kind: str = "posix-direct", **changes: object) -> Case:
        store = build(kind, tmp_path, **changes)
        stores.append(store)
        return Case(kind, store, np.random.default_rng(0))

    yield make
    for store in stores:
        store.close()


@pytest.fixture(params=KINDS)
def case(request: pytest.FixtureRequest, make_case: Callable[..., Case]) -> Case:
    """Every store in turn, with two workers per directory."""
    return make_case(request.param)


@pytest.fixture(params=ONE_QUEUE)
def narrow_case(request: pytest.FixtureRequest, make_case: Callable[..., Case]) -> Case:
    """Every store that has one queue, with one worker: what is told of order holds for each device by itself."""
    return make_case(request.param, num_workers=1)
