"""Carrying out a plan in an iteration that is known.

Covers the cursor over the learnt events, the moves fired by them, and the guard that holds the budget. Nothing is done
per operation: the work is a few comparisons a saved tensor. The rule: before the program goes on after event ``k``,
what is resident plus what segment ``k`` is known to need fits the budget; if writes are late, the program waits.
"""

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from io_backend import Priority
from lifetime import EventKind
from teraio.planner.plan import Move, MoveKind, Plan
from teraio.runtime.engine import Engine
from teraio.runtime.residency import Record, State


@dataclass(eq=False)
class Learnt:
    """An iteration that has been recorded, with the plan for it, as the runtime reads it."""

    expected: list[tuple[int, int, str]]
    """(kind, bytes, dtype) of each event."""
    storages: list[int]
    """Number of the storage concerned in the trace, -1 for none, for each event."""
    needs_nbytes: list[int]
    """What the program holds at most from each event to the next when nothing is offloaded."""
    moves: list[list[Move]]
    """Moves that each event triggers."""
    plan: Plan
    persistent_nbytes: int
    """Bytes of model and optimizer when it was recorded."""
    carried: tuple[int, int]
    """Count and bytes of saved storages that were alive when it began."""
    overshot: bool = False


class PlannedMode:
    """One run through a learnt iteration."""

    learns = False

    def __init__(
        self, engine: Engine, learnt: Learnt, *, offset_nbytes: int, on_mismatch: Callable[[str], None]
    ) -> None:
        self._engine = engine
        self._learnt = learnt
        self._offset_nbytes = offset_nbytes
        self._on_mismatch = on_mismatch
        self._bound: dict[int, weakref.ref[Record]] = {}
        self._offloads: list[weakref.ref[Record]] = []
        self._reloads: deque[tuple[weakref.ref[Record], int]] = deque()
        self._level_nbytes = 0
        self.cursor = 0

    @property
    def complete(self) -> bool:
        """Whether every learnt event has happened."""
        return self.cursor == len(self._learnt.expected)

    # --- events ------------------------------------------------------------------------------------------------------

    def packed(self, record: Record | None, nbytes: int, dtype: str) -> None:
        """Tie the record to its storage in the trace, then fire."""
        if not self._matches(EventKind.PACK, nbytes, dtype):
            return
        storage = self._learnt.storages[self.cursor]
        if (storage >= 0) != (record is not None):
            self._mismatch("a storage that was to stay may leave, or the other way round")
            return
        if record is not None:
            bound = self._bound.get(storage)
            if bound is None:
                self._bound[storage] = weakref.ref(record)
                record.tracked = storage
            elif bound() is not record:
                self._mismatch("tensors that shared a storage no longer do")
                return
        self._fire(None)

    def unpacking(self, record: Record | None, nbytes: int, dtype: str) -> None:
        """Check that the expected storage is asked for, then fire."""
        if not self._matches(EventKind.UNPACK, nbytes, dtype):
            return
        if record is not None and record.tracked != self._learnt.storages[self.cursor]:
            self._mismatch("saved tensors are used in another order")
            return
        self._fire(record)

    def unpacked(self, record: Record) -> None:
        """Nothing to decide: the plan knows."""

    def tick(self, kind: EventKind, nbytes: int) -> None:
        """Any other event."""
        if self._matches(kind, nbytes, ""):
            self._fire(None)

    def _matches(self, kind: EventKind, nbytes: int, dtype: str) -> bool:
        expected = self._learnt.expected
        if self.cursor < len(expected) and expected[self.cursor] == (kind, nbytes, dtype):
            return True
        known = expected[self.cursor] if self.cursor < len(expected) else None
        what = f"{EventKind(known[0]).name.lower()} of {known[1]} bytes {known[2]}" if known else "the end"
        self._mismatch(f"expected {what}, found {kind.name.lower()} of {nbytes} bytes {dtype}")
        return False

    def _mismatch(self, what: str) -> None:
        self._on_mismatch(f"event {self.cursor} of {len(self._learnt.expected)}: {what}")

    # --- moves -------------------------------------------------------------------------------------------------------

    def _fire(self, in_use: Record | None) -> None:
        k = self.cursor
        self.cursor = k + 1
        engine = self._engine
        engine.tidy()
        self._level_nbytes = self._learnt.needs_nbytes[k] + self._offset_nbytes
        for move in self._learnt.moves[k]:
            ref = self._bound.get(move.storage)
            if ref is None or ref() is None:
                continue
            if move.kind is MoveKind.RELOAD:
                self._reloads.append((ref, move.deadline))
            else:
                self._offloads.append(ref)
        if self._offloads:
            self._offloads = [ref for ref in self._offloads if not self._leaves(ref)]
        if self._reloads:
            self._start_reloads(k)
        self._hold_budget(0, in_use)
        engine.note_peak(self._level_nbytes)

    def _leaves(self, ref: weakref.ref[Record]) -> bool:
        """Whether a storage that is to leave is on its way, or never will be: held ones are tried again later."""
        record = ref()
        return record is None or self._engine.start_offload(record, release=True) or record.unwritable

    def _start_reloads(self, k: int) -> None:
        """Start the reloads whose memory fits beside what this segment needs; the rest waits for the next event."""
        engine = self._engine
        while self._reloads:
            ref, deadline = self._reloads[0]
            record = ref()
            if record is not None and record.state is State.OFFLOADED and deadline > k:
                cost = engine.reload_cost_nbytes(record)
                excess = engine.resident_nbytes(self._level_nbytes) + cost - engine.budget_nbytes
                if excess > 0 and engine.pool.trim(excess) < excess:
                    return
                engine.start_reload(record, Priority.DEADLINE)
            elif record is not None and record.state is State.OFFLOADING and deadline > k:
                return  # its write is late: it may be wanted back before it has left
            self._reloads.popleft()

    def make_room(self, nbytes: int) -> None:
        """A reload on demand is about to take `nbytes`."""
        self._hold_budget(nbytes, None)

    def expect(self, nbytes: int, what: str) -> None:
        """The plan knows what each segment needs."""

    def _hold_budget(self, nbytes: int, in_use: Record | None) -> None:
        """Wait until `nbytes` more fit; as a last resort release clean storages that the plan wanted to keep."""
        engine = self._engine
        while (excess := engine.resident_nbytes(self._level_nbytes) + nbytes - engine.budget_nbytes) > 0:
            if engine.pool.idle_nbytes and engine.pool.trim(excess):
                continue
            if engine.wait_for_one_offload() or engine.wait_for_lingering():
                continue
            if self._release_clean(in_use):
                continue
            if not self._learnt.overshot:
                self._learnt.overshot = True
                engine.log.add(
                    "a planned step needed more than the budget: tensors that could leave when it was learnt are held "
                    "now; the iteration is learnt again",
                    level=30,
                )
            return

    def _release_clean(self, in_use: Record | None) -> bool:
        for ref in self._bound.values():
            record = ref()
            if (
                record is not None
                and record is not in_use
                and record.state is State.CLEAN
                and self._engine.release(record)
            ):
                return True
        return False
