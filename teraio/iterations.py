"""Where iterations begin and end, and which mode each of them runs in.

Covers boundaries, the choice between learning and a plan, and falling back. Hooks report to it, the engine does the
work. The rules: only completed training iterations teach; a plan is used only for the key it was learnt under; an
iteration that turns out different goes on in a safe mode and is learnt again.
"""

import logging
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from lifetime import EventKind, Hardware, Recorder, StorageKind, Trace
from lifetime.own_hooks import OwnHook
from teraio.errors import PlanMismatchError
from teraio.iteration_key import WITHOUT_ROOT, IterationKey, fingerprint, iteration_key
from teraio.learning import Lesson, find_plan, take_lesson, translate
from teraio.planner.plan import Limits, Plan
from teraio.planner.planning import DEFAULT_HARDWARE
from teraio.runtime.admission_mode import AdmissionMode
from teraio.runtime.dispatch_stack import settle
from teraio.runtime.engine import Engine
from teraio.runtime.hooks import SavedTensorHooks
from teraio.runtime.modes import PassiveMode, ReactiveMode
from teraio.runtime.op_sizes import OpSizes
from teraio.runtime.optimizer_state import OptimizerState
from teraio.runtime.planned_mode import Learnt, PlannedMode
from teraio.state_size import state_nbytes

_MAX_MISMATCHES = 4
"""A key whose iterations differ this often is not planned any more: it runs in admission mode, which needs no plan."""
_MIN_MEASURED_NBYTES = 32 << 20
_KEPT_STEPS = 1000


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one completed iteration cost."""

    step_s: float
    """Its duration, from its first event to the end of the optimizer step."""
    stall_s: float
    """Of that, what the program waited for the disk."""
    written_nbytes: int
    read_nbytes: int
    planned: bool
    """Whether a plan was carried out; otherwise it was learnt, or went on in a safe mode."""


class Iterations:
    """The iterations of one session.

    Thread safety: called on the training thread; plans are switched under the engine's lock.
    """

    def __init__(
        self,
        engine: Engine,
        hooks: SavedTensorHooks,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        policy: str | Plan,
        limits: Limits,
        strict_plan: bool,
        on_step: Callable[[], None],
        grown_nbytes: Callable[[], int],
        states: Sequence[OptimizerState],
        move_states: bool | None,
    ) -> None:
        self._engine = engine
        self._hooks = hooks
        self._models = list(models)
        self._optimizers = list(optimizers)
        self._policy = policy
        self._limits = limits
        self._strict_plan = strict_plan
        self._on_step = on_step
        self._grown_nbytes = grown_nbytes
        self._states = states
        self._move_states = move_states
        self._sizes = OpSizes()
        self._lessons: dict[IterationKey, Lesson] = {}
        self._learnt: dict[IterationKey, Learnt | None] = {}
        self._mismatches: dict[IterationKey, int] = {}
        self._admission: AdmissionMode | None = None
        self._planned: PlannedMode | None = None
        self._key: IterationKey = WITHOUT_ROOT
        self._active = False
        self._starts_at_boundary = not self._models
        self._manual = False
        self._stepped: set[int] = set()
        self._entered_with: BaseException | None = None
        self._handles: list[Any] = []
        self._pid = os.getpid()
        self._begin_unpacked = 0
        self._begin_state_nbytes = 0
        self._begin_carried = (0, 0)
        self._marks = (0.0, 0.0, 0, 0)
        self.completed = 0
        self.steps: deque[StepRecord] = deque(maxlen=_KEPT_STEPS)
        self.trace: Trace | None = None
        self.plan: Plan | None = None
        self.unlimited_peak_nbytes = 0

    # --- life cycle --------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Watch root modules and optimizers."""
        self._hooks.on_pack = self._packing  # type: ignore[method-assign]
        for model in self._models:
            self._handles.append(
                model.register_forward_pre_hook(OwnHook(self._root_enter), prepend=True, with_kwargs=True)
            )
            self._handles.append(model.register_forward_hook(OwnHook(self._root_exit), always_call=True))
        for index, optimizer in enumerate(self._optimizers):
            self._handles.append(
                optimizer.register_step_post_hook(lambda *_, index=index: self._optimizer_stepped(index))
            )
        if not self._optimizers:
            self._handles.append(register_optimizer_step_post_hook(lambda *_: self._optimizer_stepped(0)))
        if self._move_states:
            for state in self._states:
                state.start()
        self._mark()
        if self._starts_at_boundary:
            self._begin(WITHOUT_ROOT)

    def uninstall(self) -> None:
        """Stop watching; an unfinished iteration teaches nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._hooks.__dict__.pop("on_pack", None)
        self.abort()
        settle()

    def let_go(self) -> None:
        """Hold neither engine nor hooks any longer; what was recorded and planned stays to be asked for."""
        self._states = ()
        del self._engine, self._hooks

    def set_budget(self, budget_nbytes: int) -> None:
        """A new budget from the next iteration on: every plan is made anew."""
        self._limits = Limits(budget_nbytes, self._limits.min_nbytes, self._limits.host_nbytes)
        for key, lesson in self._lessons.items():
            self._learnt[key] = self._make(lesson)

    # --- boundaries --------------------------------------------------------------------------------------------------

    def _root_enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled() or os.getpid() != self._pid:
            return
        settle()
        self._entered_with = sys.exc_info()[1]
        key = iteration_key(module, args, kwargs)
        if self._active and not self._manual and self._cleared_unstepped():
            self.boundary()
        if not self._active:
            self._begin(key)
        self._hooks.tick(EventKind.MODULE_ENTER, fingerprint(key))

    def _root_exit(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled() or not self._active:
            return
        raised = sys.exc_info()[1]
        if raised is not None and raised is not self._entered_with:
            self.abort()
        else:
            self._hooks.tick(EventKind.MODULE_EXIT)

    def _packing(self) -> None:
        """A saved tensor outside any iteration: from now on iterations begin where the last one ended."""
        if self._active or self._starts_at_boundary:
            return
        self._starts_at_boundary = True
        self._active = True
        self._key = WITHOUT_ROOT
        self._note_begin()
        self._hooks.mode = ReactiveMode(self._engine, self._grown_nbytes)
        self._engine.log.add(
            "tensors were saved before the root module ran: iterations are taken from one optimizer step to the next"
        )

    def _optimizer_stepped(self, index: int) -> None:
        if self._manual or os.getpid() != self._pid:
            return
        if index in self._stepped:  # again, and the others have not stepped at all: those were skipped
            self.boundary()
        self._stepped.add(index)
        if len(self._stepped) >= max(1, len(self._optimizers)):
            self.boundary()

    def _cleared_unstepped(self) -> bool:
        """Whether a backward pass ran and its gradients are gone although no optimizer stepped."""
        if self._stepped or self._hooks.num_unpacked == self._begin_unpacked:
            return False  # where one of several optimizers has stepped, gradients are gone because they were used
        parameters = (p for model in self._models for p in model.parameters() if p.requires_grad)
        return all(p.grad is None for p in parameters)

    def manual_boundary(self) -> None:
        """The user says that an iteration ends here; from now on nothing else does."""
        self._manual = True
        self.boundary()

    def boundary(self) -> None:
        """An iteration is complete."""
        self._stepped.clear()
        if self._active:
            failed = self._hooks.backward_failed()
            with self._engine.lock:
                self._end(completed=not failed)
            if failed:
                self._engine.log.add("a backward pass ended in an exception: its iteration was not learnt from")
            else:
                self._on_step()
        if self._starts_at_boundary:
            self._begin(WITHOUT_ROOT)

    def abort(self) -> None:
        """The iteration will not be completed: it teaches nothing, and what it saved is freed as its tensors die."""
        self._stepped.clear()
        if self._active:
            with self._engine.lock:
                self._end(completed=False)

    def _relieve(self) -> bool:
        """Saved tensors alone do not suffice: let optimizer state leave too, if the user left the choice to us."""
        if self._move_states is not None or not self._states:
            return False
        self._move_states = True
        self._engine.log.add("moving saved tensors alone does not keep the budget: optimizer state leaves as well")
        started = [state.start() for state in self._states]
        return any(started)

    # --- modes -------------------------------------------------------------------------------------------------------

    def _begin(self, key: IterationKey) -> None:
        engine, hooks = self._engine, self._hooks
        with engine.lock:
            engine.tidy()
            engine.budget_nbytes = self._limits.budget_nbytes
            hooks.pin_depth = 0  # an interrupt may have left a pinned module without its exit
            hooks.know_weights(t for model in self._models for t in [*model.parameters(), *model.buffers()])
            self._active = True
            self._key = key
            self._note_begin()
            learnt = self._learnt.get(key)
            if learnt is not None and learnt.carried == self._begin_carried and not learnt.overshot:
                offset = self._begin_state_nbytes - learnt.persistent_nbytes
                self._planned = PlannedMode(engine, learnt, offset_nbytes=offset, on_mismatch=self._mismatch)
                hooks.mode = self._planned
                self.plan = learnt.plan
                return
            recorder = Recorder(
                model=self._models, optimizer=self._optimizers, saved_tensors=False, count_buffers=False
            )
            self._admission = AdmissionMode(engine, recorder, self._sizes, self._relieve)
            hooks.mode = self._admission
            self._admission.start()

    def _note_begin(self) -> None:
        self._hooks.forget_backwards()
        records = self._engine.all_records()
        self._begin_carried = (len(records), sum(record.nbytes for record in records))
        self._begin_state_nbytes = state_nbytes(self._models, self._optimizers)
        self._begin_unpacked = self._hooks.num_unpacked

    def _mismatch(self, what: str) -> None:
        """What runs is not what was learnt: get home safely, learn again next time."""
        if self._strict_plan:
            raise PlanMismatchError(f"the plan does not fit what runs ({what}) and strict_plan is set; nothing is lost")
        self._engine.log.add("an iteration differed from the learnt one and went on in the safe mode")
        logging.getLogger("teraio").debug("mismatch: %s", what)
        self._planned = None
        self._forget(self._key)
        self._hooks.mode = ReactiveMode(self._engine, self._grown_nbytes)

    def _forget(self, key: IterationKey) -> None:
        """Learn the key again, unless that has been in vain too often."""
        self._lessons.pop(key, None)
        self._learnt.pop(key, None)
        self._mismatches[key] = self._mismatches.get(key, 0) + 1
        if self._mismatches[key] == _MAX_MISMATCHES:
            self._engine.log.add(
                "iterations with the same inputs keep differing: they run unplanned, operation by operation"
            )

    def _end(self, *, completed: bool) -> None:
        admission, planned = self._admission, self._planned
        self._admission = self._planned = None
        self._active = False
        self._hooks.mode = PassiveMode()
        if admission is not None:
            admission.stop()
        if not completed:
            return
        self.completed += 1
        self._count_step(planned is not None)
        if admission is not None:
            self._learn(admission.recorder.trace)
        elif planned is not None and not planned.complete:
            self._forget(self._key)
        self._engine.pool.trim(self._engine.pool.idle_nbytes)

    # --- learning ----------------------------------------------------------------------------------------------------

    def _learn(self, trace: Trace) -> None:
        self.trace = trace
        self.unlimited_peak_nbytes = max(self.unlimited_peak_nbytes, trace.peak_nbytes)
        born_state = any(s.kind is StorageKind.OPTIMIZER and s.birth_op >= 0 for s in trace.storages)
        if born_state or self._mismatches.get(self._key, 0) >= _MAX_MISMATCHES:
            return  # optimizer state came into being on the way: the next iteration starts from more
        lesson = take_lesson(
            trace,
            min_nbytes=self._limits.min_nbytes,
            persistent_nbytes=self._begin_state_nbytes,
            carried=self._begin_carried,
            away_nbytes=sum(state.moving_nbytes for state in self._states),
            chunk_nbytes=max((state.largest_chunk_nbytes for state in self._states), default=0),
        )
        self._lessons[self._key] = lesson
        self._learnt[self._key] = self._make(lesson)

    def _make(self, lesson: Lesson) -> Learnt | None:
        plan = find_plan(lesson, self._limits, self.hardware(), self._policy)
        if plan is None and self._relieve():
            return None
        if plan is None:
            self._engine.log.add(
                "no plan fits the budget, which only just suffices: steps run unplanned, operation by operation"
            )
            return None
        if isinstance(self._policy, Plan) and plan is not self._policy:
            if self._strict_plan:
                raise PlanMismatchError(
                    "the given plan was made for another iteration or a larger budget, and strict_plan is set"
                )
            self._engine.log.add("the given plan was made for another iteration or a larger budget: a new one was made")
        self.plan = plan
        return translate(lesson, plan)

    def hardware(self) -> Hardware:
        """The disk's speed as seen so far."""
        statistics_ = self._engine.store.statistics()
        read = write = 0.0
        if statistics_.written_nbytes >= _MIN_MEASURED_NBYTES and statistics_.write_busy_s > 0:
            write = statistics_.written_nbytes / statistics_.write_busy_s
        if statistics_.read_nbytes >= _MIN_MEASURED_NBYTES and statistics_.read_busy_s > 0:
            read = statistics_.read_nbytes / statistics_.read_busy_s
        if not (read or write):
            return DEFAULT_HARDWARE
        return Hardware(read or write, write or read, mixed_factor=0.5, source="transfers of this session")

    # --- counting ----------------------------------------------------------------------------------------------------

    def _mark(self) -> None:
        totals = self._engine.store.statistics()
        self._marks = (time.perf_counter(), self._engine.stall_s, totals.written_nbytes, totals.read_nbytes)

    def _count_step(self, planned: bool) -> None:
        start_s, stall_s, written, read = self._marks
        self._mark()
        now_s, now_stall_s, now_written, now_read = self._marks
        self.steps.append(
            StepRecord(now_s - start_s, now_stall_s - stall_s, now_written - written, now_read - read, planned)
        )

    def median(self, name: str) -> float:
        """Median of one figure over the planned steps, over all steps while there are none; 0 before the first."""
        planned = [getattr(step, name) for step in self.steps if step.planned]
        values = planned or [getattr(step, name) for step in self.steps]
        return float(statistics.median(values)) if values else 0.0
