"""Which byte ranges of a file are in use.

Covers best-fit allocation, coalescing of free neighbours, growth, and the accounting of live bytes.
It does no I/O: the spill file grows the real file and tells the allocator the new size.

Rule: free ranges never touch each other and never overlap a live one; live bytes plus free bytes is the size.
"""

from __future__ import annotations

import bisect


class ExtentAllocator:
    """A map of one file's free ranges.

    Best fit keeps the large ranges for the large requests: a training step asks for the same few sizes again and again,
    so exact fits are the common case.

    Thread safety: none; the store calls it under its lock.
    """

    def __init__(self, granule_nbytes: int) -> None:
        if granule_nbytes < 1:
            raise ValueError(f"granule_nbytes is {granule_nbytes}, expected at least 1 byte")
        self.granule_nbytes = granule_nbytes
        self.size_nbytes = 0
        """Bytes managed: the size of the file."""
        self.live_nbytes = 0
        """Bytes handed out and not returned."""
        self.high_water_nbytes = 0
        """The most ``live_nbytes`` has been."""
        self._offsets: list[int] = []  # of the free ranges, sorted
        self._free: dict[int, int] = {}  # offset -> length of the free ranges
        self._by_length: list[tuple[int, int]] = []  # (length, offset) of the free ranges, sorted

    @property
    def free_nbytes(self) -> int:
        """Bytes not handed out."""
        return self.size_nbytes - self.live_nbytes

    @property
    def largest_free_nbytes(self) -> int:
        """Length of the largest free range: what fits without growing. Far below ``free_nbytes`` means fragmented."""
        return self._by_length[-1][0] if self._by_length else 0

    def round_up(self, nbytes: int) -> int:
        """The bytes a request of ``nbytes`` really takes."""
        return -(-nbytes // self.granule_nbytes) * self.granule_nbytes

    def free_ranges(self) -> list[tuple[int, int]]:
        """(offset, length) of each free range, in the order of the file."""
        return [(offset, self._free[offset]) for offset in self._offsets]

    def shortfall_nbytes(self, nbytes: int) -> int:
        """By how much the file must grow so that ``allocate(nbytes)`` succeeds for certain; 0 if it does now."""
        wanted = self.round_up(nbytes)
        if not wanted or (self._by_length and self._by_length[-1][0] >= wanted):
            return 0
        last = self._offsets[-1] if self._offsets else None
        tail_nbytes = self._free[last] if last is not None and last + self._free[last] == self.size_nbytes else 0
        return wanted - tail_nbytes

    def grow(self, size_nbytes: int) -> None:
        """The file has become larger: the new bytes are free."""
        added = size_nbytes - self.size_nbytes
        if added < 0 or added % self.granule_nbytes:
            raise ValueError(
                f"cannot grow from {self.size_nbytes} to {size_nbytes} bytes in granules of {self.granule_nbytes}"
            )
        offset, self.size_nbytes = self.size_nbytes, size_nbytes
        if added:
            self._insert(offset, added)

    def allocate(self, nbytes: int) -> int | None:
        """Offset of a range of ``round_up(nbytes)`` bytes, or ``None`` if no free range is large enough.

        A request of 0 bytes takes nothing and gets offset 0.
        """
        wanted = self.round_up(nbytes)
        if wanted == 0:
            return 0
        index = bisect.bisect_left(self._by_length, (wanted, 0))
        if index == len(self._by_length):
            return None
        length, offset = self._by_length[index]
        self._remove(offset)
        if length > wanted:
            self._add(offset + wanted, length - wanted)
        self.live_nbytes += wanted
        self.high_water_nbytes = max(self.high_water_nbytes, self.live_nbytes)
        return offset

    def free(self, offset: int, nbytes: int) -> None:
        """Return the range that ``allocate(nbytes)`` gave at ``offset``.

        Raises:
            ValueError: The range overlaps a free one or leaves the file. Nothing changed.
        """
        length = self.round_up(nbytes)
        if length == 0:
            return
        self._check_live(offset, length)
        self.live_nbytes -= length
        self._insert(offset, length)

    def _check_live(self, offset: int, length: int) -> None:
        index = bisect.bisect_right(self._offsets, offset)
        before = self._offsets[index - 1] if index else None
        after = self._offsets[index] if index < len(self._offsets) else self.size_nbytes
        overlaps = (before is not None and before + self._free[before] > offset) or after < offset + length
        if overlaps or offset < 0 or offset % self.granule_nbytes:
            raise ValueError(f"range at {offset} of {length} bytes is not live: freed twice, or never allocated here")

    def _insert(self, offset: int, length: int) -> None:
        """Add a free range, merged with the free ranges it touches."""
        index = bisect.bisect_left(self._offsets, offset)
        after = self._offsets[index] if index < len(self._offsets) else None
        before = self._offsets[index - 1] if index else None
        if after is not None and offset + length == after:
            length += self._free[after]
            self._remove(after)
        if before is not None and before + self._free[before] == offset:
            length += self._free[before]
            self._remove(before)
            offset = before
        self._add(offset, length)

    def _add(self, offset: int, length: int) -> None:
        self._free[offset] = length
        bisect.insort(self._offsets, offset)
        bisect.insort(self._by_length, (length, offset))

    def _remove(self, offset: int) -> None:
        length = self._free.pop(offset)
        del self._offsets[bisect.bisect_left(self._offsets, offset)]
        del self._by_length[bisect.bisect_left(self._by_length, (length, offset))]
