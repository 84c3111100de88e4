"""Every store under load: large, many, at odd places, from many threads; and all stores alike.

Covers sizes beyond a chunk and a bounce buffer, neighbours that go in one call, concurrent users, byte-equality of
stores. The rule: what goes together is what would go alone, byte for byte.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from io_backend import Priority
from tests.io_backend.conftest import KINDS
from tests.io_backend.gates import TIMEOUT_S, Gate, block_workers

if TYPE_CHECKING:
    from conftest import Case

MIB = 1 << 20
NUM_SMALL = 2000
POSIX_ALONE = ("posix-direct", "posix-buffered", "posix-misaligned")


def small_sizes() -> list[int]:
    return [int(nbytes) for nbytes in np.random.default_rng(5).integers(100, 20_000, NUM_SMALL)]


def test_a_large_odd_size(make_case: Callable[..., Case]) -> None:
    case = make_case(KINDS[0])
    nbytes = 64 * MIB + 1
    data, back = case.random(nbytes), case.empty(nbytes)
    extent = case.store.allocate(nbytes)
    case.store.write(data, extent)
    case.store.read(extent, back).wait(60)
    assert np.array_equal(back, data)


def test_thousands_of_small_ones(case: Case) -> None:
    written = []
    for nbytes in small_sizes():
        extent = case.store.allocate(nbytes)
        data = case.random(nbytes)
        written.append((extent, data, case.store.write(data, extent)))
    read = []
    for extent, _, _ in written:
        back = case.empty(extent.nbytes)
        read.append((back, case.store.read(extent, back)))
    for (_, data, _), (back, ticket) in zip(written, read, strict=True):
        ticket.wait(60)
        assert np.array_equal(back, data)
    assert case.store.statistics().num_writes == case.store.statistics().num_reads == NUM_SMALL


@pytest.mark.skipif("kvikio" in KINDS, reason="KvikIO moves each by itself")
@pytest.mark.parametrize("kind", POSIX_ALONE)
def test_small_neighbours_go_together(
    make_case: Callable[..., Case], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    case = make_case(kind, num_workers=1)
    counts = {"pwritev": 0, "preadv": 0}

    def counted(name: str) -> Callable[..., int]:
        real: Callable[..., int] = getattr(os, name)

        def call(*args: Any) -> int:
            counts[name] += 1
            return real(*args)

        return call

    extents = [case.store.allocate(nbytes) for nbytes in small_sizes()[:500]]
    gates = block_workers(case.store, 1)
    for name in counts:
        monkeypatch.setattr(os, name, counted(name))
    buffers = [case.random(extent.nbytes) for extent in extents]
    writes = [case.store.write(data, extent) for data, extent in zip(buffers, extents, strict=True)]
    gates[0].opened.set()
    for ticket in writes:
        ticket.wait(TIMEOUT_S)
    gates = block_workers(case.store, 1)
    before = counts["preadv"]
    backs = [case.empty(extent.nbytes) for extent in extents]
    reads = [case.store.read(extent, back) for back, extent in zip(backs, extents, strict=True)]
    gates[0].opened.set()
    for ticket in reads:
        ticket.wait(TIMEOUT_S)
    assert all(np.array_equal(back, data) for back, data in zip(backs, buffers, strict=True))
    assert counts["pwritev"] < len(extents) // 10
    assert counts["preadv"] - before < len(extents) // 10
    statistics = case.store.statistics()
    assert statistics.num_writes == len(extents) + 2  # and the two that held the worker
    assert statistics.num_reads == len(extents)


def test_one_of_those_that_go_together_fails_alone(narrow_case: Case) -> None:
    case = narrow_case
    gates = block_workers(case.store, 1)
    extents = [case.store.allocate(5000) for _ in range(10)]
    buffers = [case.random(5000) for _ in extents]
    for number, (data, extent) in enumerate(zip(buffers, extents, strict=True)):
        if number != 4:  # the fifth is never written
            case.store.write(data, extent)
    backs = [case.empty(5000) for _ in extents]
    reads = [case.store.read(extent, back) for back, extent in zip(backs, extents, strict=True)]
    gates[0].opened.set()
    for number, ticket in enumerate(reads):
        if number == 4:
            with pytest.raises(OSError, match="nothing was ever written"):
                ticket.wait(TIMEOUT_S)
        else:
            ticket.wait(TIMEOUT_S)
            assert np.array_equal(backs[number], buffers[number])


def test_odd_places_in_a_larger_buffer(case: Case) -> None:
    large, back = case.random(3 * MIB), case.empty(3 * MIB)
    ranges = [(1, 100), (511, 4096), (4095, 8193), (4096, 4096), (100_001, MIB), (2 * MIB + 7, 300_001)]
    for start, nbytes in ranges:
        extent = case.store.allocate(nbytes)
        case.store.write(large[start : start + nbytes], extent)
        back[:] = 0
        case.store.read(extent, back[start : start + nbytes]).wait(TIMEOUT_S)
        assert np.array_equal(back[start : start + nbytes], large[start : start + nbytes])
        assert not back[:start].any()
        assert not back[start + nbytes :].any()


def test_all_stores_hold_the_same_bytes(make_case: Callable[..., Case]) -> None:
    sizes = [1, 4095, 4096, 77_777, 9 * MIB + 5]
    contents = [np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8) for nbytes in sizes]
    first: list[bytes] | None = None
    for kind in KINDS:
        case = make_case(kind)
        extents = [case.store.allocate(nbytes) for nbytes in sizes]
        for content, extent in zip(contents, extents, strict=True):
            data = case.empty(content.nbytes)
            data[:] = content
            case.store.write(data, extent)
        found = []
        for extent in extents:
            back = case.empty(extent.nbytes)
            case.store.read(extent, back).wait(TIMEOUT_S)
            found.append(back.tobytes())
        first = first if first is not None else found
        assert found == first == [content.tobytes() for content in contents], kind


@pytest.mark.skipif("kvikio" in KINDS, reason="one kind of file only")
@pytest.mark.parametrize("kind", POSIX_ALONE)
def test_what_lies_in_the_file_is_what_was_written(make_case: Callable[..., Case], kind: str, tmp_path: Path) -> None:
    case = make_case(kind)
    for nbytes in (1, 4097, MIB + 3):
        extent = case.store.allocate(nbytes)
        data = case.random(nbytes)
        case.store.write(data, extent).wait(TIMEOUT_S)
        assert os.pread(case.store.file.fd, nbytes, extent.offset) == data.tobytes()  # type: ignore[attr-defined]


def test_readers_and_writers_in_eight_threads(case: Case) -> None:
    failures: list[BaseException] = []
    shared = [(case.store.allocate(30_000), np.full(30_000, number, np.uint8)) for number in range(4)]
    for extent, data in shared:
        case.store.write(data, extent).wait(TIMEOUT_S)
    start = Gate()

    def write(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(25):
            data = rng.integers(0, 256, int(rng.integers(1, 60_000)), dtype=np.uint8)
            extent = case.store.allocate(data.nbytes)
            ticket = case.store.write(data, extent, priority=Priority(int(rng.integers(0, 3))))
            back = np.zeros_like(data)
            case.store.read(extent, back).wait(TIMEOUT_S)
            assert ticket.done()
            assert np.array_equal(back, data)
            case.store.free(extent)

    def read(seed: int) -> None:
        for number in range(25):
            extent, data = shared[(seed + number) % len(shared)]
            back = np.zeros_like(data)
            case.store.read(extent, back, priority=Priority(number % 3)).wait(TIMEOUT_S)
            assert np.array_equal(back, data)

    def work(seed: int) -> None:
        try:
            start()
            (write if seed % 2 else read)(seed)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    start.opened.set()
    for thread in threads:
        thread.join(60)
    assert failures == []
    for extent, _ in shared:
        case.store.free(extent)
    assert case.store.statistics().live_nbytes == 0
