"""Device memory by way of KvikIO, as far as the stand-in driver has it; `test_kvikio` starts this in its own process.

Covers round trips of odd sizes and places, several threads, failures. The rule: what is declared as device memory to
the stand-in goes the way that device memory goes, through KvikIO's staging.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from io_backend import BackendConfig, BackendError, open_store
from tests.io_backend.conftest import STAND_IN_DRIVER

MIB = 1 << 20
TIMEOUT_S = 20.0
if STAND_IN_DRIVER is None:
    pytest.skip("runs in a process with the stand-in driver only", allow_module_level=True)
driver = ctypes.CDLL(STAND_IN_DRIVER)
driver.stand_in_device_range.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
driver.stand_in_copied_nbytes.restype = ctypes.c_ulonglong


class DeviceArray:
    """Bytes that the stand-in driver takes for a device's."""

    def __init__(self, nbytes: int, start: int = 0) -> None:
        self.whole = np.zeros(nbytes + start + 64, np.uint8)
        assert driver.stand_in_device_range(self.whole.ctypes.data, self.whole.nbytes) == 0
        _kept.append(self.whole)  # a declared range stays one: its memory must not become anything else
        self.bytes = self.whole[start : start + nbytes]
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": self.bytes.shape,
            "typestr": "|u1",
            "data": (self.bytes.ctypes.data, False),
            "strides": None,
            "version": 3,
        }

    def fill(self, seed: int) -> DeviceArray:
        self.bytes[:] = np.random.default_rng(seed).integers(0, 256, self.bytes.nbytes, dtype=np.uint8)
        return self


_kept: list[np.ndarray] = []


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Any]:
    config = BackendConfig(growth_nbytes=4 * MIB, reserve_free_nbytes=0, chunk_nbytes=MIB)
    with contextlib.closing(open_store(tmp_path, backend="kvikio", config=config)) as store:
        yield store


@pytest.mark.parametrize("nbytes", [1, 511, 4096, 4097, MIB + 12, 5 * MIB + 1])
@pytest.mark.parametrize("start", [0, 1, 13])
def test_round_trips(store: Any, nbytes: int, start: int) -> None:
    source, target = DeviceArray(nbytes, start).fill(nbytes), DeviceArray(nbytes, 64 - start)
    copied = driver.stand_in_copied_nbytes()
    extent = store.allocate(nbytes)
    store.write(source, extent)
    store.read(extent, target).wait(TIMEOUT_S)
    assert np.array_equal(source.bytes, target.bytes)
    assert driver.stand_in_copied_nbytes() - copied >= 2 * nbytes
    assert not target.whole[64 - start + nbytes :].any()
    assert store.statistics().paths == {"kvikio-compat": 2 * nbytes}


def test_between_host_and_device(store: Any) -> None:
    source, target = DeviceArray(100_001).fill(1), bytearray(100_001)
    extent = store.allocate(100_001)
    store.write(source, extent)
    store.read(extent, target).wait(TIMEOUT_S)
    assert target == source.bytes.tobytes()


def test_several_threads(store: Any) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for number in range(8):
                nbytes = 1 + 37_003 * number + seed
                source, target = DeviceArray(nbytes).fill(seed), DeviceArray(nbytes)
                extent = store.allocate(nbytes)
                store.write(source, extent)
                store.read(extent, target).wait(TIMEOUT_S)
                assert np.array_equal(source.bytes, target.bytes)
                store.free(extent)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert store.statistics().live_nbytes == 0


def test_a_truncated_file_is_a_typed_error(store: Any) -> None:
    source, target = DeviceArray(3 * MIB).fill(2), DeviceArray(3 * MIB)
    extent = store.allocate(3 * MIB)
    store.write(source, extent).wait(TIMEOUT_S)
    os.ftruncate(store.file.fd, 4096)
    with pytest.raises(BackendError) as caught:
        store.read(extent, target).wait(TIMEOUT_S)
    assert caught.value.errno in (errno.EIO, None)
    os.ftruncate(store.file.fd, store.file.nbytes)
    store.write(source, extent)
    store.read(extent, target).wait(TIMEOUT_S)
    assert np.array_equal(source.bytes, target.bytes)


def test_what_is_refused(store: Any) -> None:
    extent = store.allocate(32)
    strided = DeviceArray(32)
    strided.__cuda_array_interface__["strides"] = (2,)
    with pytest.raises(ValueError, match="contiguous"):
        store.write(strided, extent)
    with pytest.raises(ValueError, match="32"):
        store.write(DeviceArray(31), extent)
    read_only = DeviceArray(32)
    read_only.__cuda_array_interface__["data"] = (read_only.bytes.ctypes.data, True)
    with pytest.raises(ValueError, match="read-only"):
        store.read(extent, read_only)


def test_the_proof_leaves_no_trace(store: Any) -> None:
    statistics = store.statistics()
    assert statistics.written_nbytes == statistics.read_nbytes == statistics.high_water_nbytes == 0
    assert statistics.paths == {}
    assert "kvikio-compat" in store.describe()
