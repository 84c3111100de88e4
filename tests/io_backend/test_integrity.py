"""``verify=True``: what changes on the device is noticed when it is read.

Covers flipped bytes, after single and joint writes, reads into every kind of buffer, and extents that were mapped. The
rule: the file is changed behind the store's back, by its own descriptor.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from io_backend import CorruptExtentError
from io_backend.integrity import CHUNK_NBYTES
from tests.io_backend.gates import TIMEOUT_S, block_workers

if TYPE_CHECKING:
    from conftest import Case

KINDS = ("posix-direct", "posix-buffered", "posix-misaligned")


@pytest.fixture(params=KINDS)
def case(request: pytest.FixtureRequest, make_case: Callable[..., Case]) -> Case:
    return make_case(request.param, verify=True, num_workers=1)


def flip(store: Any, extent: Any, position: int) -> None:
    """Change one byte of an extent on disk."""
    at = extent.offset + position
    byte = os.pread(store.file.fd, 1, at)
    os.pwrite(store.file.fd, bytes([byte[0] ^ 1]), at)
    os.fdatasync(store.file.fd)


@pytest.mark.parametrize("nbytes", [1, 4096, 100_001, 2 * CHUNK_NBYTES + 5])
def test_a_flipped_byte_is_found(case: Case, nbytes: int) -> None:
    extent = case.store.allocate(nbytes)
    data, back = case.random(nbytes), case.empty(nbytes)
    case.store.write(data, extent)
    case.store.read(extent, back).wait(TIMEOUT_S)
    assert np.array_equal(back, data)
    flip(case.store, extent, nbytes - 1)
    with pytest.raises(CorruptExtentError) as caught:
        case.store.read(extent, back).wait(TIMEOUT_S)
    start = (nbytes - 1) // CHUNK_NBYTES * CHUNK_NBYTES
    text = str(caught.value)
    assert case.store.file.name in text  # type: ignore[attr-defined]
    assert f"bytes {start} to {nbytes} " in text
    assert f"file offset {extent.offset + start}." in text
    sums = re.findall(r"(?:xxh3|written) ([0-9a-f]{16})", text)
    assert len(set(sums)) == 2
    flip(case.store, extent, nbytes - 1)
    case.store.read(extent, back).wait(TIMEOUT_S)
    assert np.array_equal(back, data)


def test_after_joint_writes_only_the_changed_one_fails(case: Case) -> None:
    gates = block_workers(case.store, 1)
    extents = [case.store.allocate(3000 + number) for number in range(20)]
    buffers = [case.random(extent.nbytes) for extent in extents]
    writes = [case.store.write(data, extent) for data, extent in zip(buffers, extents, strict=True)]
    gates[0].opened.set()
    for ticket in writes:
        ticket.wait(TIMEOUT_S)
    flip(case.store, extents[7], 0)
    gates = block_workers(case.store, 1)
    backs = [case.empty(extent.nbytes) for extent in extents]
    reads = [case.store.read(extent, back) for back, extent in zip(backs, extents, strict=True)]
    gates[0].opened.set()
    for number, ticket in enumerate(reads):
        if number == 7:
            with pytest.raises(CorruptExtentError, match="not what was written"):
                ticket.wait(TIMEOUT_S)
        else:
            ticket.wait(TIMEOUT_S)
            assert np.array_equal(backs[number], buffers[number])


def test_a_new_write_has_a_new_sum(case: Case) -> None:
    extent = case.store.allocate(5000)
    case.store.write(case.random(5000), extent).wait(TIMEOUT_S)
    flip(case.store, extent, 17)
    data, back = case.random(5000), case.empty(5000)
    case.store.write(data, extent)
    case.store.read(extent, back).wait(TIMEOUT_S)
    assert np.array_equal(back, data)


def test_a_mapped_extent_has_no_sum(case: Case) -> None:
    extent = case.store.allocate(5000)
    back = case.empty(5000)
    case.store.write(case.random(5000), extent)
    mapping = case.store.map(extent)
    mapping[:5] = b"hello"
    case.store.read(extent, back).wait(TIMEOUT_S)
    assert back[:5].tobytes() == b"hello"
    case.store.write(case.random(5000), extent).wait(TIMEOUT_S)
    mapping[:5] = b"world"  # the caller's right for as long as the mapping is open
    case.store.read(extent, back).wait(TIMEOUT_S)
    assert back[:5].tobytes() == b"world"
    mapping.close()
    case.store.write(case.random(5000), extent).wait(TIMEOUT_S)
    flip(case.store, extent, 4999)
    with pytest.raises(CorruptExtentError):
        case.store.read(extent, back).wait(TIMEOUT_S)


def test_without_verify_nothing_is_summed(make_case: Callable[..., Case]) -> None:
    case = make_case("posix-direct")
    extent = case.store.allocate(5000)
    case.store.write(case.random(5000), extent).wait(TIMEOUT_S)
    flip(case.store, extent, 17)
    case.store.read(extent, case.empty(5000)).wait(TIMEOUT_S)
