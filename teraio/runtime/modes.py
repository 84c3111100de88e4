"""How moves are decided: what all modes share, and the careful mode for when nothing is known.

Covers the interface between hooks and decisions. `AdmissionMode` (its own module) learns an unknown iteration,
`PlannedMode` (its own module) carries out a plan, `ReactiveMode` gets an iteration home safely after a mismatch, and
`PassiveMode` serves saved tensors outside any iteration. The rule: whatever the mode, every unpack gets the right
bytes; modes differ in speed and memory only.
"""

import weakref
from collections.abc import Callable
from typing import Protocol

from lifetime import EventKind
from teraio.runtime.engine import Engine
from teraio.runtime.residency import Record

_NOISE_NBYTES = 64 << 20
"""What kernels and the interpreter take beside tensors, at most, by experience."""


class Mode(Protocol):
    """Told of every tick of the event clock."""

    learns: bool
    """Whether what it lets through is not known yet."""

    def packed(self, record: Record | None, nbytes: int, dtype: str) -> None:
        """Autograd saved a tensor; `record` is None when its storage stays resident."""

    def unpacking(self, record: Record | None, nbytes: int, dtype: str) -> None:
        """Autograd is about to use a saved tensor."""

    def unpacked(self, record: Record) -> None:
        """The storage of `record` is in memory and in use."""

    def tick(self, kind: EventKind, nbytes: int) -> None:
        """Any other event."""

    def make_room(self, nbytes: int) -> None:
        """`nbytes` of new memory are about to be taken for a reload."""

    def expect(self, nbytes: int, what: str) -> None:
        """`what` is about to begin and will take up to `nbytes`; refuse it now rather than half done."""


class PassiveMode:
    """No iteration is running: keep, and read back on demand."""

    learns = False

    def packed(self, record: Record | None, nbytes: int, dtype: str) -> None:
        """Nothing to decide."""

    def unpacking(self, record: Record | None, nbytes: int, dtype: str) -> None:
        """Nothing to decide."""

    def unpacked(self, record: Record) -> None:
        """Nothing to decide."""

    def tick(self, kind: EventKind, nbytes: int) -> None:
        """Nothing to decide."""

    def make_room(self, nbytes: int) -> None:
        """Nothing is known of the level: take it."""

    def expect(self, nbytes: int, what: str) -> None:
        """Nothing is known of the level: let it begin."""


class ReactiveMode:
    """What happens is not what was learnt: every storage that nothing else holds leaves at once, before going on.

    It knows no memory level: it keeps the lowest that hooks alone can reach, and takes the peak from the process.
    """

    learns = False

    def __init__(self, engine: Engine, grown_nbytes: Callable[[], int]) -> None:
        self._engine = engine
        self._grown_nbytes = grown_nbytes
        self._waiting: list[weakref.ref[Record]] = [weakref.ref(record) for record in engine.all_records()]

    def packed(self, record: Record | None, nbytes: int, dtype: str) -> None:
        """Offload whatever is free now."""
        if record is not None:
            self._waiting.append(weakref.ref(record))
        self._evict()

    def unpacking(self, record: Record | None, nbytes: int, dtype: str) -> None:
        """Offload whatever is free, except what is about to be used."""
        self._evict(keep=record)

    def unpacked(self, record: Record) -> None:
        """It may leave again if it outlives this use."""
        self._waiting.append(weakref.ref(record))

    def tick(self, kind: EventKind, nbytes: int) -> None:
        """Offload whatever is free now."""
        self._evict()

    def make_room(self, nbytes: int) -> None:
        """Idle slabs are the only memory that is certainly not needed."""
        self._engine.pool.trim(nbytes)

    def expect(self, nbytes: int, what: str) -> None:
        """No level is known: let it begin."""

    def _evict(self, keep: Record | None = None) -> None:
        engine = self._engine
        engine.tidy()
        still_waiting = []
        for ref in self._waiting:
            record = ref()
            if record is None or record.unwritable:
                continue
            if record is keep or not engine.start_offload(record, release=True):
                still_waiting.append(ref)
        self._waiting = still_waiting
        while engine.wait_for_one_offload():
            pass
        grown_nbytes = self._grown_nbytes()
        engine.peak_nbytes = max(engine.peak_nbytes, grown_nbytes)
        if grown_nbytes > engine.budget_nbytes + _NOISE_NBYTES:
            engine.log.add(
                "the budget was exceeded in the safe mode, which knows no operation before it runs", level=30
            )
