"""Optimizer state on the SSD between steps, and in memory for the chunk that is being stepped.

Covers what comes before a chunk and goes after it. How memory is exchanged is ``swap``'s, moving is the engine's. The
rules: the state of a chunk is back before the chunk is stepped, that of the next is being read meanwhile; what a step
has written is never taken from an old copy.
"""

from collections.abc import Callable, Iterable

import torch

from io_backend import Priority
from lifetime import EventKind
from teraio.errors import InfeasibleBudgetError
from teraio.runtime.engine import Engine
from teraio.runtime.hooks import SavedTensorHooks
from teraio.runtime.optimizer_step import Chunk
from teraio.runtime.residency import State, StateRecord
from teraio.runtime.step_needs import StepNeeds, step_needs
from teraio.runtime.swap import can_be_exchanged


class OptimizerState:
    """The state of one optimizer; moves only once `start` was called.

    Thread safety: called on the training thread, under the engine's lock where it moves.

    Invariants: every record's tensor is the one that the optimizer holds under the same parameter and name.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, engine: Engine, hooks: SavedTensorHooks, *, min_nbytes: int
    ) -> None:
        self._optimizer = optimizer
        self._engine = engine
        self._hooks = hooks
        self._min_nbytes = min_nbytes
        self._records: dict[tuple[int, str], StateRecord] = {}
        self._moving = False
        self._progress = (0, 0)
        self.largest_chunk_nbytes = 0
        """State of the largest chunk seen."""

    # --- life cycle --------------------------------------------------------------------------------------------------

    def start(self) -> bool:
        """Keep the state on the SSD from now on; gives whether anything new is on its way there."""
        self._moving = True
        return self._send_away(list(self._optimizer.state))  # not its groups: they are narrowed to a chunk at times

    def stop(self) -> None:
        """Bring everything back, and leave it."""
        self.materialize()
        self._moving = False
        self._records.clear()

    def materialize(self) -> None:
        """Bring everything back.

        Raises:
            OffloadError: A read failed; that tensor stays on the SSD, usable through its mapping.
        """
        with self._engine.lock:
            for record in self._records.values():
                self._engine.fetch(record, self._hooks.mode.make_room)

    @property
    def moving_nbytes(self) -> int:
        """Bytes that are on the SSD between steps."""
        return sum(record.nbytes for record in self._records.values()) if self._moving else 0

    # --- chunks ------------------------------------------------------------------------------------------------------

    def before_step(self, chunks: list[Chunk]) -> None:
        """Make room for the whole step, while nothing of it has been done.

        Raises:
            InfeasibleBudgetError: It cannot fit. Parameters and state are as they were.
        """
        self._progress = (0, sum(len(chunk) for _, chunk in chunks))
        mode = self._hooks.mode
        if not mode.learns:
            return
        with self._hooks.quiet():
            needs = [step_needs(self._optimizer, group, chunk) or StepNeeds(0, 0) for group, chunk in chunks]
        what = f"the step of {type(self._optimizer).__name__}"
        if not self._moving:
            try:
                mode.expect(_whole_need_nbytes(needs), what)
            except InfeasibleBudgetError:
                if not self._moving:  # not even now, that other kinds of storage may leave
                    raise
        if self._moving:
            mode.expect(self._largest_chunk_need_nbytes(chunks, needs), what)

    def _largest_chunk_need_nbytes(self, chunks: list[Chunk], needs: list[StepNeeds]) -> int:
        """What a chunk takes with its own state and that of the next one, which is read meanwhile."""
        reloads = [
            sum(self._engine.reload_cost_nbytes(record) for record in self._records_of(chunk) if record.absent)
            for _, chunk in chunks
        ]
        largest_nbytes = 0
        for need, own_nbytes, following_nbytes in zip(needs, reloads, [*reloads[1:], 0], strict=False):
            largest_nbytes = max(largest_nbytes, need.peak_nbytes + own_nbytes + following_nbytes)
        return largest_nbytes

    def after_step(self) -> None:
        """What is refused from now on interrupts nothing."""
        self._engine.interrupts = ""

    def before_chunk(self, chunk: list[torch.Tensor], upcoming: list[torch.Tensor]) -> None:
        """Tick; then the state of `chunk` is in memory, and that of `upcoming` is being read if there is room."""
        self._hooks.tick(EventKind.OPTIMIZER_CHUNK)
        if self._moving:
            self._bring(chunk, upcoming)
        done, total = self._progress
        self._engine.interrupts = (
            f"but it was in the middle of an optimizer step, with {done} to {done + len(chunk)} of {total} parameters "
            "updated; go back to your last checkpoint"
        )
        self._progress = (done + len(chunk), total)

    def _bring(self, chunk: list[torch.Tensor], upcoming: list[torch.Tensor]) -> None:
        engine = self._engine
        with engine.lock:
            engine.tidy()
            records = self._records_of(chunk)
            self.largest_chunk_nbytes = max(self.largest_chunk_nbytes, sum(record.nbytes for record in records))
            for record in records:
                engine.fetch(record, self._hooks.mode.make_room)
                while record.state is State.OFFLOADING:
                    engine.wait_for_one_offload()
                if record.state is State.OFFLOADED:  # the write ended, and took the memory with it
                    engine.fetch(record, self._hooks.mode.make_room)
                # Not every update moves the version counter (fused and foreach ones need not): what is about to be
                # stepped is stale from here on.
                if record.state is State.CLEAN:
                    record.move_to(State.RESIDENT)
                record.release_wanted = False
            for record in self._records_of(upcoming):
                if record.state is State.OFFLOADED:
                    self._hooks.mode.make_room(engine.reload_cost_nbytes(record))
                    engine.start_reload(record, Priority.DEADLINE)

    def after_chunk(self, chunk: list[torch.Tensor]) -> None:
        """The state of `chunk` has been written to: it leaves again."""
        if self._moving:
            self._send_away(chunk)

    def _send_away(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Start writing the state of some parameters; gives whether anything was started."""
        engine = self._engine
        started = False
        with engine.lock:
            for parameter in parameters:
                for name, tensor in self._movable(parameter):
                    record = self._record(parameter, name, tensor)
                    if record.state is State.RESIDENT:
                        record.version = tensor._version
                        started = engine.start_offload(record, release=True) or started
            engine.tidy()
        return started

    # --- records -----------------------------------------------------------------------------------------------------

    def _movable(self, parameter: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        state = self._optimizer.state.get(parameter, {})
        return [
            (name, value)
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and can_be_exchanged(value) and _nbytes(value) >= self._min_nbytes
        ]

    def _record(self, parameter: torch.Tensor, name: str, tensor: torch.Tensor) -> StateRecord:
        """The record of a state tensor; a new one where the optimizer has replaced the tensor."""
        key = (id(parameter), name)
        record = self._records.get(key)
        if record is None or record.tensor is not tensor:
            record = self._records[key] = self._engine.adopt_state(tensor)
        return record

    def _records_of(self, parameters: list[torch.Tensor]) -> list[StateRecord]:
        return [self._record(p, name, tensor) for p in parameters for name, tensor in self._movable(p)]


def _whole_need_nbytes(needs: list[StepNeeds]) -> int:
    """What a step takes whose new state stays in memory."""
    made_nbytes = peak_nbytes = 0
    for need in needs:
        peak_nbytes = max(peak_nbytes, made_nbytes + need.peak_nbytes)
        made_nbytes += need.new_state_nbytes
    return peak_nbytes


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


Relief = Callable[[], bool]
"""Called when an operation cannot fit: starts moving more kinds of storage, and says whether it could."""
