"""What every store must do with bytes: give them back.

Covers sizes, types and kinds of buffers, and those that are refused. Does not cover what only files can do wrong
(`test_direct_io`, `test_spill_file`). The rule: not one byte differs, and none beyond a buffer is touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from io_backend import Store
from tests.io_backend.gates import TIMEOUT_S

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
