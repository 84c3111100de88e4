"""Where each saved storage is: its states, the table of legal moves between them, and its one record.

Covers the life cycle; it does no I/O (``engine`` does) and knows no plan. The rule: the bytes are in memory, or on the
SSD, or both; never in neither. A failed write goes back to `State.RESIDENT`, a failed read back to `State.OFFLOADED`.
"""

import itertools
import mmap
import sys
import weakref
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import torch

from io_backend import Extent, Ticket
from lifetime.buffers import announce_storage_on_buffer
from teraio.errors import InternalError
from teraio.runtime.swap import exchange_memory

if TYPE_CHECKING:
    from teraio.runtime.engine import Engine


class State(Enum):
    """Life of a saved storage."""

    RESIDENT = "resident"
    """In memory only."""
    OFFLOADING = "offloading"
    """In memory, being written."""
    CLEAN = "clean"
    """In memory, with a valid copy on the SSD."""
    OFFLOADED = "offloaded"
    """On the SSD only."""
    RELOADING = "reloading"
    """On the SSD; memory is set aside and being filled."""


TRANSITIONS: dict[tuple[State, State], str] = {
    (State.RESIDENT, State.OFFLOADING): "a write was started",
    (State.OFFLOADING, State.CLEAN): "the write ended",
    (State.OFFLOADING, State.RESIDENT): "the write failed or was cancelled",
    (State.CLEAN, State.OFFLOADED): "the memory was given back",
    (State.OFFLOADED, State.RELOADING): "a read was started",
    (State.RELOADING, State.CLEAN): "the read ended",
    (State.RELOADING, State.OFFLOADED): "the read failed",
    (State.CLEAN, State.RESIDENT): "it was written to: the copy is stale",
}
"""Every legal move, with what causes it."""

_HISTORY_LENGTH = 8
_HOLDERS_OF_STATE = 2
"""The tensor and the storage's own Python object."""
_serials = itertools.count(1)

MapExtent = Callable[[Extent], mmap.mmap]
CountHolders = Callable[[int], int]
"""Number of holders of the storage at an address."""


class Remains(NamedTuple):
    """What a dead record leaves to be tidied: its space on the SSD and its place in the books."""

    extent: Extent | None
    ticket: Ticket | None
    nbytes: int
    absent: bool
    tracked: int
    cdata: int
    serial: int
    memory: weakref.ref[torch.UntypedStorage] | None
    """Of a storage that was being written, else None: the write alone may keep it now."""


class _Slot:
    """Holds one object, as a record holds its storage."""

    __slots__ = ("storage",)

    def __init__(self, storage: object) -> None:
        self.storage = storage


def _references(slot: "_Slot | Record") -> int:
    """References to what a slot holds, as seen from here."""
    return sys.getrefcount(slot.storage)


# What `_references` gives when the slot is the only holder; it differs between versions of Python.
_OWN_REFERENCES = _references(_Slot(object()))


class Record:
    """One storage that autograd saved, for as long as something may still unpack it.

    Saved tensors hold the record; the record holds the memory. When the last saved tensor goes, so does the record, and
    with it the memory and the space on the SSD, whatever the reason: the node ran, the loss was dropped, an exception.

    Thread safety: changed only under the engine's lock. It may die on any thread, even inside the engine: dying only
    appends to the engine's list of remains.
    """

    is_mapped = False
    """Whether its space on the SSD will be mapped into memory."""

    __slots__ = (
        "__weakref__", "_history", "absent", "cdata", "dtype", "engine", "extent", "nbytes",
        "on_slab", "order", "release_wanted", "serial", "state", "storage", "ticket", "tracked", "unwritable",
    )  # fmt: skip

    def __init__(self, engine: "Engine", storage: torch.UntypedStorage, nbytes: int, dtype: torch.dtype) -> None:
        self.engine = engine
        self.serial = next(_serials)
        self.storage: torch.UntypedStorage | None = storage
        self.cdata: int = storage._cdata
        self.nbytes = nbytes
        self.dtype = dtype
        self.state = State.RESIDENT
        self.extent: Extent | None = None
        self.ticket: Ticket | None = None
        self.absent = False
        """Whether the memory that the program itself allocated for it is gone; it may be back on a slab."""
        self.on_slab = False
        self.tracked = -1
        """Its number with the recorder, or in the trace of the plan being carried out."""
        self.order = 0
        """Position among the packs of the iteration: the larger, the sooner it is used again."""
        self.release_wanted = False
        """Give the memory back as soon as a copy is on the SSD and nothing else holds it."""
        self.unwritable = False
        """A write of it failed: leave it in memory."""
        self._history: deque[str] = deque(maxlen=_HISTORY_LENGTH)

    def move_to(self, state: State) -> None:
        """The one place where the state changes.

        Raises:
            InternalError: The table does not allow it; the message shows the record's recent moves.
        """
        if (self.state, state) not in TRANSITIONS:
            raise InternalError(f"{self}: illegal move {self.state.value} -> {state.value}; history: {self.history()}")
        self._history.append(f"{self.state.value}->{state.value}")
        self.state = state

    def history(self) -> str:
        """Recent moves, oldest first."""
        return ", ".join(self._history) or "none"

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"saved storage #{self.serial} ({self.nbytes} bytes of {dtype}, {self.state.value})"

    def is_free(self, count_holders: CountHolders | None) -> bool:
        """Whether nothing but the record holds the storage, so that its memory can be given back.

        Where this torch cannot count a storage's holders the answer is a guess; `give_up_memory` then finds out.
        """
        storage = self.storage
        if storage is None:
            return False
        if count_holders is None:
            return True
        if count_holders(storage._cdata) > 1:
            return False
        del storage
        return _references(self) <= _OWN_REFERENCES

    def give_up_memory(self, map_copy: MapExtent, count_holders: CountHolders | None) -> bool:
        """Let go of the memory, by dropping it; gives False, and keeps it, when something else still holds it."""
        storage = self.storage
        if storage is None:
            return False
        watch = weakref.ref(storage)
        self.storage = None
        del storage
        self.storage = watch()
        return self.storage is None

    def take_memory(self, memory: torch.UntypedStorage) -> None:
        """The bytes are back, on `memory`."""
        self.storage = memory
        self.cdata = memory._cdata

    def __del__(self) -> None:
        storage, written = self.storage, self.state is State.OFFLOADING
        memory = weakref.ref(storage) if storage is not None and written else None
        self.engine.remains.append(
            Remains(self.extent, self.ticket, self.nbytes, self.absent, self.tracked, self.cdata, self.serial, memory)
        )


class StateRecord(Record):
    """A long-lived tensor of the program's, whose memory is given back in place: the tensor stays.

    ``storage`` is the memory being read into while RELOADING; otherwise the tensor's own storage.
    """

    is_mapped = True

    __slots__ = ("_substitute", "tensor", "version")

    def __init__(self, engine: "Engine", tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        super().__init__(engine, storage, storage.nbytes(), tensor.dtype)
        self.tensor = tensor
        self.version: int = tensor._version
        self._substitute: torch.UntypedStorage | None = None

    def is_free(self, count_holders: CountHolders | None) -> bool:
        """Whether nobody borrowed the memory: an array or another library would keep the old address."""
        if count_holders is None:
            return True
        return count_holders(self.tensor.untyped_storage()._cdata) <= _HOLDERS_OF_STATE

    def give_up_memory(self, map_copy: MapExtent, count_holders: CountHolders | None) -> bool:
        """Let go of the memory, with the file's own pages in its place, unless the copy is stale or it is lent."""
        if self.tensor._version != self.version or not self.is_free(count_holders):
            return False
        if self._substitute is None:
            assert self.extent is not None
            pages = map_copy(self.extent)
            self._substitute = torch.frombuffer(pages, dtype=torch.uint8, count=self.nbytes).untyped_storage()
        self.storage = None
        former = exchange_memory(self.tensor, self._substitute)
        self._substitute = None
        del former  # the memory goes with it
        announce_storage_on_buffer(self.tensor.untyped_storage())
        return True

    def take_memory(self, memory: torch.UntypedStorage) -> None:
        """The bytes are back: put the tensor onto them, and keep the mapping for the next time.

        Where the program wrote to the tensor meanwhile, it wrote to the mapping, and the read may have come too early.
        """
        if self.tensor._version != self.version:
            twin = torch.empty(0, dtype=self.tensor.dtype)
            twin.set_(memory, 0, self.tensor.size(), self.tensor.stride()).copy_(self.tensor.detach())
        self._substitute = exchange_memory(self.tensor, memory)
        self.storage = self.tensor.untyped_storage()
        self.version = self.tensor._version
