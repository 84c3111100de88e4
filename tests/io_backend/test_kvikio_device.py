"""Device memory through the KvikIO store, posed by a stand-in driver: run by `test_kvikio` in a process of its own.

Covers bytes of odd sizes at odd places, many at once, errors, and that they went through KvikIO's staging.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

from io_backend import BackendError
from io_backend.buffers import aligned_memory

if TYPE_CHECKING:
    from conftest import Case

STAND_IN_DRIVER = os.environ.get("TERAIO_STAND_IN_DRIVER", "")
if not STAND_IN_DRIVER:
    pytest.skip(
        "needs the stand-in driver, which test_kvikio provides in a process of its own", allow_module_level=True
    )

MIB = 1 << 20
SIZES = (1, 511, 4096, 4097, MIB + 12, 20 * MIB + 1)
_driver = ctypes.CDLL(STAND_IN_DRIVER)
_driver.stand_in_device_range.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_driver.stand_in_copied_nbytes.restype = ctypes.c_ulonglong
_ranges = []  # a range stays declared, so its memory must stay too


class DeviceArray:
    """Bytes that pose as device memory."""

    def __init__(self, nbytes: int, offset: int = 0) -> None:
        memory = aligned_memory(nbytes + offset)
        _ranges.append(memory)
        self.bytes = np.frombuffer(memory.view(), np.uint8)[offset:]
        address = memory.address + offset
        assert _driver.stand_in_device_range(address, nbytes) == 0
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


@pytest.mark.parametrize("offset", [0, 256])
def test_round_trips(make_case: Callable[..., Case], offset: int) -> None:
    store = make_case("kvikio").store
    copied_nbytes = _driver.stand_in_copied_nbytes()
    for nbytes in SIZES:
        source, target = DeviceArray(nbytes, offset), DeviceArray(nbytes)
        source.bytes[:] = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
        extent = store.allocate(nbytes)
        store.write(source, extent)  # type: ignore[arg-type]
        store.read(extent, target).wait(20)  # type: ignore[arg-type]
        assert np.array_equal(source.bytes, target.bytes)
        on_host = np.zeros(nbytes, np.uint8)
        store.read(extent, on_host).wait(20)
        assert np.array_equal(source.bytes, on_host)
    assert _driver.stand_in_copied_nbytes() - copied_nbytes == 2 * sum(SIZES)
    assert store.statistics().paths == {"kvikio-compat": 3 * sum(SIZES)}


def test_many_at_once(make_case: Callable[..., Case]) -> None:
    store = make_case("kvikio").store
    failures: list[str] = []

    def work(seed: int) -> None:
        source, target = DeviceArray(MIB + seed), DeviceArray(MIB + seed)
        source.bytes[:] = seed
        extent = store.allocate(MIB + seed)
        for _ in range(5):
            store.write(source, extent)  # type: ignore[arg-type]
            target.bytes[:] = 0
            store.read(extent, target).wait(20)  # type: ignore[arg-type]
            if not (target.bytes == seed).all():
                failures.append(f"{seed}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures


def test_a_file_cut_short_is_a_typed_error(make_case: Callable[..., Case]) -> None:
    case = make_case("kvikio")
    extent = case.store.allocate(5 * MIB)
    case.store.write(case.random(5 * MIB), extent).wait(20)
    os.ftruncate(case.store.file.fd, 4096)  # type: ignore[attr-defined]
    with pytest.raises(BackendError) as caught:
        case.store.read(extent, DeviceArray(5 * MIB)).wait(20)  # type: ignore[arg-type]
    assert caught.value.errno is not None
    assert "teraio-" in str(caught.value)


def test_strides_are_refused(make_case: Callable[..., Case]) -> None:
    store = make_case("kvikio").store
    array = DeviceArray(4096)
    array.__cuda_array_interface__["strides"] = (2,)
    with pytest.raises(ValueError, match="contiguous"):
        store.write(array, store.allocate(4096))  # type: ignore[arg-type]
