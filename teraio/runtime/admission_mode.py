"""Letting an unknown iteration through within the budget, and learning it on the way.

Covers the first sight of a shape. A dispatch mode knows before each operation what it will allocate, and room is made
first: what autograd saved is written as soon as nothing else holds it and dropped when the room is needed. Meanwhile
everything is recorded as if nothing had been moved. The rule: an operation that cannot fit even with all saved storages
away is refused before it runs.
"""

import gc
import weakref
from typing import Any

import torch

from io_backend import Priority
from lifetime import EventKind, Recorder, StorageKind
from lifetime.tracker import ALIVE
from teraio.errors import InfeasibleBudgetError, OffloadError
from teraio.runtime.dispatch_stack import insert_at_bottom, remove
from teraio.runtime.engine import Engine
from teraio.runtime.op_sizes import OpSizes
from teraio.runtime.optimizer_state import Relief
from teraio.runtime.residency import Record, Remains, State
from teraio.sizes import format_nbytes

_READ_AHEAD_NBYTES = 128 << 20
_NAMED_STORAGES = 5


class AdmissionMode:
    """One iteration, recorded and kept within the budget operation by operation.

    Thread safety: called under the engine's lock.
    """

    learns = True

    def __init__(self, engine: Engine, recorder: Recorder, sizes: OpSizes, relieve: Relief) -> None:
        self._engine = engine
        self._sizes = sizes
        self._relieve = relieve
        self._waiting: list[weakref.ref[Record]] = []
        self._order: list[weakref.ref[Record]] = []
        self._largest_need_nbytes = 0
        self.recorder = recorder
        recorder.meta["holders_known"] = True

    def start(self) -> None:
        """Begin recording on the calling thread; storages saved earlier and still alive are carried over."""
        recorder = self.recorder
        recorder.before_op = self._before_op
        recorder.after_op = self._sizes.learn
        self._engine.on_death = self._died
        recorder.start(push_mode=False)
        for record in sorted(self._engine.all_records(), key=lambda r: r.serial):
            self._carry_over(record)
        insert_at_bottom(recorder.mode)

    def stop(self) -> None:
        """End recording."""
        remove(self.recorder.mode)
        self._engine.tidy()
        self._engine.on_death = lambda remains, lingers: None
        self.recorder.before_op = self.recorder.after_op = None
        self.recorder.stop(pop_mode=False)

    def _carry_over(self, record: Record) -> None:
        tracker = self.recorder.tracker
        dtype = str(record.dtype).removeprefix("torch.")
        if record.storage is not None and not record.absent:
            view = torch.empty(0, dtype=torch.uint8).set_(record.storage, 0, (record.nbytes,), (1,))
            record.tracked = self.recorder.saved(view)
            tracker.detain(record.tracked)
        else:
            record.tracked = tracker.add_absent(record.nbytes, StorageKind.ACTIVATION, dtype)
        self._remember(record)

    # --- events ------------------------------------------------------------------------------------------------------

    def packed(self, record: Record | None, nbytes: int, dtype: str) -> None:
        """Record it, and write what is free by now."""
        if record is None:
            self.recorder.event(EventKind.PACK, -1, nbytes, dtype)
        else:
            if record.tracked < 0:
                record.tracked = self._track(record)
                self._remember(record)
            self.recorder.event(EventKind.PACK, record.tracked, nbytes, dtype)
        self._after_event()

    def unpacking(self, record: Record | None, nbytes: int, dtype: str) -> None:
        """Record it."""
        self.recorder.event(EventKind.UNPACK, record.tracked if record is not None else -1, nbytes, dtype)
        self._after_event()

    def unpacked(self, record: Record) -> None:
        """Tell the recorder where the storage is now, and read ahead what will be used next."""
        assert record.storage is not None
        tracker = self.recorder.tracker
        if record.on_slab and tracker.index(record.storage) is None:
            tracker.rebind(record.tracked, record.storage)
        self._read_ahead(record.order)

    def tick(self, kind: EventKind, nbytes: int) -> None:
        """Record it."""
        self.recorder.event(kind, -1, nbytes)
        self._after_event()

    def _track(self, record: Record) -> int:
        storage = record.storage
        assert storage is not None
        numel = record.nbytes // record.dtype.itemsize
        view = torch.empty(0, dtype=record.dtype).set_(storage, 0, (numel,), (1,))
        index = self.recorder.saved(view)
        self.recorder.tracker.detain(index)
        return index

    def _remember(self, record: Record) -> None:
        record.order = len(self._order)
        ref = weakref.ref(record)
        self._order.append(ref)
        self._waiting.append(ref)

    def _after_event(self) -> None:
        self._engine.tidy()
        self._write_what_is_free()
        self._engine.note_peak(self.recorder.live_nbytes)

    def _write_what_is_free(self) -> bool:
        """Start writing saved storages that nothing else holds any more; note when that was."""
        engine, freeable = self._engine, self.recorder.tracker.freeable_event
        still_waiting: list[weakref.ref[Record]] = []
        started = False
        for ref in self._waiting:
            record = ref()
            if record is None or record.unwritable or record.state is not State.RESIDENT:
                continue
            if engine.start_offload(record, release=False):
                started = True
                if freeable[record.tracked] < 0:
                    freeable[record.tracked] = self.recorder.num_events - 1
            elif not record.unwritable:
                still_waiting.append(ref)
        self._waiting = still_waiting
        return started

    def _read_ahead(self, order: int) -> None:
        """Autograd mostly goes backwards through what it saved: start reading the ones before."""
        engine = self._engine
        ahead = 0
        for ref in reversed(self._order[:order]):
            record = ref()
            if record is None:
                continue
            if record.state is State.OFFLOADED:
                cost = engine.reload_cost_nbytes(record)
                level = engine.resident_nbytes(self.recorder.live_nbytes) + self._largest_need_nbytes
                if level + cost > engine.budget_nbytes:
                    return
                engine.start_reload(record, Priority.DEADLINE)
            ahead += record.nbytes
            if ahead >= _READ_AHEAD_NBYTES:
                return

    def _died(self, remains: Remains, lingers: bool) -> None:
        if remains.tracked < 0:
            return
        if lingers:  # a running write must not stretch the life that is learnt, nor be counted twice
            self.recorder.tracker.end(remains.tracked, remains.cdata)
        else:
            self.recorder.tracker.let_go(remains.tracked)

    # --- room --------------------------------------------------------------------------------------------------------

    def _before_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        engine = self._engine
        with engine.lock:
            engine.tidy()
            need = self._sizes.predict(func, args, kwargs)
            self._largest_need_nbytes = max(self._largest_need_nbytes, need)
            self._ensure(need, str(func))
            engine.note_peak(self.recorder.live_nbytes + need)

    def make_room(self, nbytes: int) -> None:
        """A saved tensor is about to be read back into `nbytes` of new memory."""
        self._ensure(nbytes, "reading a saved tensor back")

    def expect(self, nbytes: int, what: str) -> None:
        """Make room for all that `what` will take, or refuse it before it has changed anything."""
        with self._engine.lock:
            self._ensure(nbytes, what)

    def _ensure(self, nbytes: int, what: str) -> None:
        engine = self._engine
        collected = False
        while (excess := engine.resident_nbytes(self.recorder.live_nbytes) + nbytes - engine.budget_nbytes) > 0:
            if engine.pool.idle_nbytes and engine.pool.trim(excess):
                continue
            if self._release(excess) or engine.wait_for_one_offload() or self._write_what_is_free():
                continue
            if engine.wait_for_lingering():
                continue
            if self._end_one_reload():
                continue
            if self._relieve():
                continue
            if not collected:  # a reference cycle may hold what nobody needs
                collected = True
                gc.collect()
                engine.tidy()
                continue
            self._refuse(nbytes, excess, what)

    def _release(self, excess: int) -> int:
        """Give clean storages back, those that will be used last first; gives the bytes freed."""
        freed = 0
        for ref in self._order:
            record = ref()
            if record is not None and record.state is State.CLEAN and self._engine.release(record):
                freed += record.nbytes
                if freed >= excess:
                    break
        self._engine.tidy()
        return freed

    def _end_one_reload(self) -> bool:
        """Read ahead too eagerly: once ended, the one that is used last is clean and can be released again."""
        for ref in self._order:
            record = ref()
            if record is not None and record.state is State.RELOADING:
                self._engine.end_reload(record)
                return True
        return False

    def _refuse(self, nbytes: int, excess: int, what: str) -> None:
        engine, tracker = self._engine, self.recorder.tracker
        floor = engine.budget_nbytes + excess
        live = [i for i, death in enumerate(tracker.death_op) if death == ALIVE]
        absent = {record.tracked for record in engine.all_records() if record.storage is None}
        largest = sorted((i for i in live if i not in absent), key=lambda i: -tracker.nbytes[i])[:_NAMED_STORAGES]
        described = tuple(self._describe(i) for i in largest)
        state = engine.interrupts or "and nothing is lost"
        message = (
            f"the budget of {format_nbytes(engine.budget_nbytes)} is too small: {what} needs {format_nbytes(nbytes)} "
            f"beside {format_nbytes(floor - nbytes)} that cannot leave, together {format_nbytes(floor)} (the floor so "
            f"far). Largest: {'; '.join(described)}. It was not run, {state}. Raise the budget to at least "
            f"{format_nbytes(floor)}, or make the batch or the sequence smaller"
        )
        if engine.last_failure:
            raise OffloadError(f"{message}. Writes to the spill directory failed before: {engine.last_failure}")
        raise InfeasibleBudgetError(message, floor_nbytes=floor, op=what, storages=described)

    def _describe(self, index: int) -> str:
        tracker, texts = self.recorder.tracker, self.recorder.strings.texts
        name = texts[tracker.name[index]] or f"{texts[tracker.dtype[index]]} {list(tracker.shape[index])}"
        return f"{StorageKind(tracker.kind[index]).name.lower()} {name} {format_nbytes(tracker.nbytes[index])}"
