"""The extent allocator against a recount, over random sequences of requests.

Covers overlap, accounting, best fit and coalescing. The rule: the model is a plain list of what is live.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from io_backend.extents import ExtentAllocator

GRANULE = 4096


def check(allocator: ExtentAllocator, live: list[tuple[int, int]]) -> None:
    """Live and free ranges must tile the file exactly, with no two free neighbours."""
    taken = sorted((offset, allocator.round_up(nbytes)) for offset, nbytes in live if nbytes)
    free = allocator.free_ranges()
    position = 0
    for offset, length in sorted(taken + free):
        assert offset == position
        assert offset % GRANULE == 0
        position += length
    assert position == allocator.size_nbytes
    assert all(a + length < b for (a, length), (b, _) in itertools.pairwise(free))
    assert allocator.live_nbytes == sum(length for _, length in taken)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40_000)), max_size=60), st.randoms(use_true_random=False))
def test_random_sequences(steps: list[tuple[bool, int]], random: object) -> None:
    allocator = ExtentAllocator(GRANULE)
    live: list[tuple[int, int]] = []
    high_water_nbytes = 0
    for is_free, nbytes in steps:
        if is_free and live:
            allocator.free(*live.pop(nbytes % len(live)))
        else:
            shortfall = allocator.shortfall_nbytes(nbytes)
            assert (shortfall == 0) == (nbytes == 0 or any(n >= nbytes for _, n in allocator.free_ranges()))
            if shortfall:
                assert allocator.allocate(nbytes) is None
                allocator.grow(allocator.size_nbytes + shortfall)
            offset = allocator.allocate(nbytes)
            assert offset is not None
            live.append((offset, nbytes))
        check(allocator, live)
        high_water_nbytes = max(high_water_nbytes, allocator.live_nbytes)
    assert allocator.high_water_nbytes == high_water_nbytes
    while live:
        allocator.free(*live.pop())
    expected = [(0, allocator.size_nbytes)] if allocator.size_nbytes else []
    assert allocator.free_ranges() == expected
    assert allocator.live_nbytes == 0


def test_best_fit_takes_the_smallest_range_that_fits() -> None:
    allocator = ExtentAllocator(GRANULE)
    allocator.grow(16 * GRANULE)
    offsets = {name: allocator.allocate(count * GRANULE) for name, count in (("a", 4), ("b", 1), ("c", 2), ("d", 1))}
    allocator.free(offsets["a"] or 0, 4 * GRANULE)
    allocator.free(offsets["c"] or 0, 2 * GRANULE)
    assert allocator.allocate(2 * GRANULE - 5) == offsets["c"]
    assert allocator.allocate(3 * GRANULE) == offsets["a"]


def test_growth_counts_the_free_tail() -> None:
    allocator = ExtentAllocator(GRANULE)
    allocator.grow(4 * GRANULE)
    allocator.allocate(3 * GRANULE)
    assert allocator.shortfall_nbytes(4 * GRANULE) == 3 * GRANULE


def test_misuse_is_refused() -> None:
    allocator = ExtentAllocator(GRANULE)
    allocator.grow(4 * GRANULE)
    offset = allocator.allocate(GRANULE)
    assert offset == 0
    for bad in ((GRANULE, GRANULE), (0, 2 * GRANULE), (1, GRANULE), (-GRANULE, GRANULE), (8 * GRANULE, GRANULE)):
        with pytest.raises(ValueError, match="not live"):
            allocator.free(*bad)
    allocator.free(0, GRANULE)
    with pytest.raises(ValueError, match="not live"):
        allocator.free(0, GRANULE)
    with pytest.raises(ValueError, match="cannot grow"):
        allocator.grow(0)
    with pytest.raises(ValueError, match="granule"):
        ExtentAllocator(0)
