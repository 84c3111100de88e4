"""Where each saved storage is: its states, the table of legal moves between them, and its one record.

Covers the life cycle; it does no I/O (``engine`` does) and knows no plan. The rule: the bytes are in memory, or on the
SSD, or both; never in neither. A failed write goes back to `State.RESIDENT`, a failed read back to `State.OFFLOADED`.
"""

import itertools
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import torch

from io_backend import Extent, Ticket
from teraio.errors import InternalError

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
}
"""Every legal move, with what causes it."""

_HISTORY_LENGTH = 8
_serials = itertools.count(1)


class Remains(NamedTuple):
    """What a dead record leaves to be tidied: its space on the SSD and its place in the books."""

    extent: Extent | None
    ticket: Ticket | None
    nbytes: int
    absent: bool
    tracked: int
    cdata: int
    serial: int
    state: State


class Record:
    """One storage that autograd saved, for as long as something may still unpack it.

    Saved tensors hold the record; the record holds the memory. When the last saved tensor goes, so does the record, and
    with it the memory and the space on the SSD, whatever the reason: the node ran, the loss was dropped, an exception.

    Thread safety: changed only under the engine's lock. It may die on any thread, even inside the engine: dying only
    appends to the engine's list of remains.
    """

    __slots__ = (
        "__weakref__", "_history", "absent", "cdata", "checksum", "dtype", "engine", "extent", "nbytes",
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
        self.checksum: int | None = None
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

    def __del__(self) -> None:
        self.engine.remains.append(
            Remains(
                self.extent, self.ticket, self.nbytes, self.absent, self.tracked, self.cdata, self.serial, self.state
            )
        )
