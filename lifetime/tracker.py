"""Births and deaths of storages, seen through weak references.

Covers identity (one number a storage, whatever views are made of it), live bytes and their peak. It does not watch
operations (``recorder`` does). The rule: a storage is known by its object, never by an address that may be reused; the
weak reference on the storage fires exactly when the memory dies, whoever held it last.

A runtime that moves a storage away *detains* it: the death of its memory is then not the death of the storage, which
lives on as the same number until it is let go.
"""

import threading
import weakref
from typing import Any

import torch

from lifetime.events import StorageKind
from lifetime.strings import StringTable

ALIVE = -2
"""Value of ``death_op`` while a storage lives."""


class _Watch(weakref.ref[torch.UntypedStorage]):
    """A weak reference that knows what it watches."""

    __slots__ = ("cdata", "index")

    cdata: int
    index: int


class StorageTracker:
    """The storages of one recording.

    Thread safety: deaths may be reported from any thread; everything else from the recording thread.

    Invariants: ``live_nbytes`` equals the sum over storages whose ``death_op`` is `ALIVE`; a storage that is alive has
    at least one memory or is detained.
    """

    def __init__(self, strings: StringTable) -> None:
        self._strings = strings
        self.name: list[int] = []
        self.kind: list[StorageKind] = []
        self.nbytes: list[int] = []
        self.dtype: list[int] = []
        self.birth_op: list[int] = []
        self.death_op: list[int] = []
        self.freeable_event: list[int] = []
        self.shape: list[tuple[int, ...]] = []
        self.num_ops = 0
        """Operations begun so far: the moment that a birth or a death is stamped with."""
        self.live_nbytes = 0
        self.peak_nbytes = 0
        self.dead_nbytes = 0
        """Bytes of all storages that have died."""
        self._dtype_numbers: dict[torch.dtype, int] = {}
        self._index_by_cdata: dict[int, int] = {}
        self._watches: dict[int, _Watch] = {}
        self._num_memories: list[int] = []  # memories that carry the storage now: two while it is read back early
        self._detained: set[int] = set()
        self._uncounted: set[int] = set()
        self._filled_at: dict[int, int] = {}  # cdata of an emptied memory -> operations begun when it grew again
        self._watching = True
        self._lock = threading.RLock()  # a death may come while the same thread holds it
        self._on_death = self._memory_died

    def index(self, storage: torch.UntypedStorage) -> int | None:
        """Number of a storage that is known and alive, else None."""
        return self._index_by_cdata.get(storage._cdata)

    def add(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        birth_op: int,
        kind: StorageKind,
        *,
        nbytes: int,
        counted: bool = True,
    ) -> int:
        """Register a storage that is not known yet; `tensor` gives its dtype and shape.

        Args:
            tensor: Any tensor on it.
            storage: Not known yet.
            birth_op: The operation that made it, -1 when it existed before.
            kind: What it holds, as far as known.
            nbytes: Its size, 0 when it is not counted.
            counted: Whether its bytes count, now and when it grows.
        """
        dtype = self._dtype_numbers.get(tensor.dtype)
        if dtype is None:
            dtype = self._strings.number(str(tensor.dtype).removeprefix("torch."))
            self._dtype_numbers[tensor.dtype] = dtype
        with self._lock:
            if self._filled_at:
                filled_at = self._filled_at.pop(storage._cdata, -1)
                if birth_op < 0 <= filled_at:
                    birth_op, kind = filled_at, StorageKind.TEMPORARY
            index = self._append(nbytes, birth_op, kind, dtype, () if tensor.is_nested else tuple(tensor.shape))
            if not counted:
                self._uncounted.add(index)
            self._watch(storage, index)
        return index

    def add_absent(self, nbytes: int, kind: StorageKind, dtype: str) -> int:
        """Register a detained storage whose memory is elsewhere: it lives, and is counted, without a memory here."""
        with self._lock:
            index = self._append(nbytes, -1, kind, self._strings.number(dtype), ())
            self._detained.add(index)
        return index

    def detain(self, index: int) -> None:
        """From now on the death of the memory of `index` is not the death of the storage."""
        with self._lock:
            if index >= 0 and self.death_op[index] == ALIVE:
                self._detained.add(index)

    def rebind(self, index: int, storage: torch.UntypedStorage) -> None:
        """The detained storage `index` has a new memory, whatever that memory was known as before.

        Raises:
            ValueError: The storage has died, so nothing can carry it on.
        """
        with self._lock:
            if self.death_op[index] != ALIVE:
                raise ValueError(f"storage {index} died at operation {self.death_op[index]}: it takes no new memory")
            self._detained.add(index)
            self._watch(storage, index)

    def let_go(self, index: int) -> None:
        """End the detention: the storage dies now if its memory is gone, else with its memory."""
        with self._lock:
            if index in self._detained:
                self._detained.remove(index)
                if self._num_memories[index] == 0:
                    self._bury(index)

    def end(self, index: int, cdata: int) -> None:
        """End the detention and the life of `index`, although something keeps its last memory, at `cdata`, for a while.

        Should the program use that memory after all, it becomes known anew, as a storage that existed before.
        """
        with self._lock:
            self._detained.discard(index)
            if self._index_by_cdata.get(cdata) == index:
                self._forget(cdata, index)
            elif self._num_memories[index] == 0:
                self._bury(index)

    def counted_elsewhere(self, storage: torch.UntypedStorage) -> None:
        """The bytes of `storage` are counted on a buffer from now on: it goes on living with 0 bytes."""
        with self._lock:
            index = self._index_by_cdata.get(storage._cdata)
            if index is not None and self.death_op[index] == ALIVE:
                self.live_nbytes -= self.nbytes[index]
                self.nbytes[index] = 0
                self._uncounted.add(index)

    def has_grown(self, index: int, storage: torch.UntypedStorage) -> None:
        """Compare the size of the memory with the one last seen, and count what was added."""
        growth = storage.nbytes() - self.nbytes[index]
        if growth > 0 and index not in self._uncounted:
            with self._lock:
                self.nbytes[index] += growth
                if self.death_op[index] == ALIVE:
                    self.live_nbytes += growth
                    self.peak_nbytes = max(self.peak_nbytes, self.live_nbytes)

    def resized(self, storage: torch.UntypedStorage, old_nbytes: int) -> None:
        """The program resized the memory of `storage`, which no operation shows.

        Shrinking ends the storage's life; what grows from a shrunk or an empty memory is born then.
        """
        cdata, nbytes = storage._cdata, storage.nbytes()
        with self._lock:
            index = self._index_by_cdata.get(cdata)
            if index is None:
                is_new = old_nbytes == 0 and nbytes > 0
            elif nbytes >= old_nbytes:
                self.has_grown(index, storage)
                is_new = False
            else:
                is_new = index not in self._detained and nbytes > 0
                if index not in self._detained:
                    self._forget(cdata, index)
            if is_new:
                self._filled_at[cdata] = self.num_ops

    def level_since(self, dead_nbytes: int) -> int:
        """Bytes of the storages that were live at any time since ``dead_nbytes`` was as given; counts for the peak."""
        level = self.live_nbytes + self.dead_nbytes - dead_nbytes
        if level > self.peak_nbytes:
            self.peak_nbytes = level
        return level

    def stop(self) -> None:
        """Stop watching: no callback fires after this."""
        with self._lock:
            self._watching = False
            self._watches.clear()
            self._index_by_cdata.clear()

    def _append(self, nbytes: int, birth_op: int, kind: StorageKind, dtype: int, shape: tuple[int, ...]) -> int:
        index = len(self.nbytes)
        self.name.append(0)
        self.kind.append(kind)
        self.nbytes.append(nbytes)
        self.dtype.append(dtype)
        self.birth_op.append(birth_op)
        self.death_op.append(ALIVE)
        self.freeable_event.append(-1)
        self.shape.append(shape)
        self._num_memories.append(0)
        self.live_nbytes += nbytes
        if self.live_nbytes > self.peak_nbytes:
            self.peak_nbytes = self.live_nbytes
        return index

    def _watch(self, storage: torch.UntypedStorage, index: int) -> None:
        if not self._watching:
            return
        cdata = storage._cdata
        before = self._index_by_cdata.get(cdata)
        if before == index:
            return
        watch = _Watch(storage, self._on_death)
        watch.cdata, watch.index = cdata, index
        self._watches[cdata] = watch
        self._index_by_cdata[cdata] = index
        self._num_memories[index] += 1
        if before is not None:  # its weak reference was just replaced, so its callback will not come
            self._lose_memory(before)

    def _memory_died(self, watch: Any) -> None:
        cdata, index = watch.cdata, watch.index
        with self._lock:
            self._forget(cdata, index)

    def _forget(self, cdata: int, index: int) -> None:
        if self._index_by_cdata.get(cdata) == index:
            del self._index_by_cdata[cdata], self._watches[cdata]
        self._lose_memory(index)

    def _lose_memory(self, index: int) -> None:
        self._num_memories[index] -= 1
        if self._num_memories[index] == 0 and index not in self._detained:
            self._bury(index)

    def _bury(self, index: int) -> None:
        if self.death_op[index] == ALIVE:
            self.death_op[index] = self.num_ops
            self.live_nbytes -= self.nbytes[index]
            self.dead_nbytes += self.nbytes[index]
