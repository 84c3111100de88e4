"""Memory for storages that come back: from torch's allocator where that recycles, else slabs of our own.

Covers CPU memory. It does not decide when memory may be taken (``engine`` does). The rules: a slab belongs to exactly
one storage or to the free list; it returns when the storage dies, whoever held it last; every slab counts, used or
idle. Recycling matters because the first touch of fresh memory costs more than the read that fills it.
"""

import ctypes
import mmap
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from lifetime.buffers import announce_buffer, announce_storage_on_buffer
from teraio.runtime.recycler.library import Library

_PAGE_NBYTES = mmap.PAGESIZE


class ReloadMemory(Protocol):
    """Where the memory for reloads comes from, and the account of it."""

    total_nbytes: int
    """Bytes that exist, in use or idle."""
    idle_nbytes: int
    """Those of them that nothing uses."""

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """A storage of exactly `nbytes` bytes with undefined content."""

    def drain(self) -> None:
        """Take what has come back into the account."""

    def trim(self, nbytes: int) -> int:
        """Give at least `nbytes` of idle memory back to the system, or all there is; gives the bytes freed."""

    def idle_fits(self, nbytes: int) -> bool:
        """Whether a storage of `nbytes` would take idle memory, and so nothing new."""


class RecycledMemory:
    """Storages from the recycler, which torch's own allocations come from too: nothing is idle here.

    Thread safety: as `SlabPool`.
    """

    idle_nbytes = 0

    def __init__(self, library: Library) -> None:
        self._library = library
        self._dead: deque[int] = deque()
        self.total_nbytes = 0

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """A storage of exactly `nbytes` bytes with undefined content.

        Raises:
            MemoryError: The system has no more.
        """
        self.drain()
        capacity, library, dead = capacity_nbytes(nbytes), self._library, self._dead
        # Not torch.empty, which is an operation, nor torch.UntypedStorage, which asks torch's original allocator.
        address = library.allocate(capacity)
        array = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))

        def give_back() -> None:
            library.free(address)
            dead.append(capacity)

        self.total_nbytes += capacity
        announce_buffer(array, capacity)
        return _lend(array, give_back)

    def drain(self) -> None:
        """Take storages that have died out of the account."""
        while self._dead:
            self.total_nbytes -= self._dead.popleft()

    def trim(self, nbytes: int) -> int:
        """Nothing is idle here; the recycler gives way by itself."""
        return 0

    def idle_fits(self, nbytes: int) -> bool:
        """Never: what is idle in the recycler was given back already, and counts anew."""
        return False


class SlabPool:
    """Slabs of one device.

    Thread safety: slabs may return from any thread; everything else from the thread that holds the engine's lock.

    Invariants: ``total_nbytes`` is the sum of all slabs that exist; ``idle_nbytes`` of those on the free list.
    """

    def __init__(self) -> None:
        self._idle: dict[int, list[mmap.mmap]] = {}
        self._returned: deque[mmap.mmap] = deque()
        self.total_nbytes = 0
        self.idle_nbytes = 0

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """A storage of exactly `nbytes` bytes with undefined content, on a recycled slab where one fits."""
        self.drain()
        slab = self._take(capacity_nbytes(nbytes)) or self._create(capacity_nbytes(nbytes))
        array = np.frombuffer(slab, dtype=np.uint8, count=nbytes)
        returned = self._returned
        return _lend(array, lambda: returned.append(slab))

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


def _lend(array: np.ndarray, give_back: Callable[[], object]) -> torch.UntypedStorage:
    """A storage on the memory of `array`; `give_back` is called once nothing uses it any more, on any thread.

    Also when whoever lent it is long gone: a moved optimizer's state may outlive its session.
    """
    weakref.finalize(array, give_back).atexit = False
    # frombuffer, not from_numpy: it is no operation, so that no recorder sees the storage before it is announced
    storage = torch.frombuffer(array, dtype=torch.uint8).untyped_storage()
    announce_storage_on_buffer(storage)
    return storage


def capacity_nbytes(nbytes: int) -> int:
    """Size of the slab that a storage of `nbytes` takes: whole pages."""
    return max(1, -(-nbytes // _PAGE_NBYTES)) * _PAGE_NBYTES
