"""Memory for storages that come back: page-aligned slabs on huge pages, recycled.

Covers CPU slabs. It does not decide when memory may be taken (``engine`` does). The rules: a slab belongs to exactly
one storage or to the free list; it returns when the storage dies, whoever held it last; every slab counts, used or
idle. Recycling matters because the first touch of fresh memory costs more than the read that fills it.
"""

import mmap
import weakref
from collections import deque

import numpy as np
import torch

from lifetime.buffers import announce_buffer, announce_storage_on_buffer

_PAGE_NBYTES = mmap.PAGESIZE


class SlabPool:
    """Slabs of one device.

    Thread safety: slabs may return from any thread; everything else from the thread that holds the engine's lock.

    Invariants: ``total_nbytes`` is the sum of all slabs that exist; ``idle_nbytes`` of those on the free list.
    """

    def __init__(self) -> None:
        self._idle: dict[int, list[mmap.mmap]] = {}
        self._returned: deque[mmap.mmap] = deque()
        self._leases: dict[int, weakref.ref[np.ndarray]] = {}
        self.total_nbytes = 0
        self.idle_nbytes = 0

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """A storage of exactly `nbytes` bytes with undefined content, on a recycled slab where one fits."""
        self.drain()
        slab = self._take(capacity_nbytes(nbytes)) or self._create(capacity_nbytes(nbytes))
        array = np.frombuffer(slab, dtype=np.uint8, count=nbytes)
        key, leases, returned = id(array), self._leases, self._returned

        def give_back(_: object) -> None:
            leases.pop(key, None)
            returned.append(slab)

        leases[key] = weakref.ref(array, give_back)
        # frombuffer, not from_numpy: it is no operation, so that no recorder sees the storage before it is announced
        storage = torch.frombuffer(array, dtype=torch.uint8).untyped_storage()
        announce_storage_on_buffer(storage)
        return storage

    def drain(self) -> None:
        """Move slabs that have come back to the free list."""
        while self._returned:
            slab = self._returned.popleft()
            self._idle.setdefault(len(slab), []).append(slab)
            self.idle_nbytes += len(slab)

    def trim(self, nbytes: int) -> int:
        """Give at least `nbytes` of idle slabs back to the system, or all there are; gives the bytes freed."""
        freed = 0
        for capacity in sorted(self._idle, reverse=True):
            slabs = self._idle[capacity]
            while slabs and freed < nbytes:
                slabs.pop()
                freed += capacity
        self._idle = {capacity: slabs for capacity, slabs in self._idle.items() if slabs}
        self.idle_nbytes -= freed
        self.total_nbytes -= freed
        return freed

    def idle_fits(self, nbytes: int) -> bool:
        """Whether a storage of `nbytes` would take an idle slab, and so no new memory."""
        return bool(self._idle.get(capacity_nbytes(nbytes)))

    def _take(self, capacity: int) -> mmap.mmap | None:
        slabs = self._idle.get(capacity)
        if not slabs:
            return None
        self.idle_nbytes -= capacity
        return slabs.pop()

    def _create(self, capacity: int) -> mmap.mmap:
        slab = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            slab.madvise(mmap.MADV_HUGEPAGE)
        self.total_nbytes += capacity
        announce_buffer(slab, capacity)
        return slab


def capacity_nbytes(nbytes: int) -> int:
    """Size of the slab that a storage of `nbytes` takes: whole pages."""
    return max(1, -(-nbytes // _PAGE_NBYTES)) * _PAGE_NBYTES
