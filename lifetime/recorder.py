"""Recording one iteration: every operation, storage, use and event.

Covers the dispatch mode that sees the operations, and the names of storages. Identity and lifetimes of storages are
``tracker``'s, phases are ``phases``', the finished record is ``trace``'s, saved tensors are watched by
``saved_tensors``. The rule: recording changes no result, only time.

What a dispatch mode cannot see, it does not record: memory inside kernels, compiled regions, ``.data`` assignment as an
operation (the death of the old storage is seen). A storage that is first seen as an input was made out of sight: it
counts as older than the iteration.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lifetime.buffers import buffers_nbytes, lies_on_buffer, unwatch_storages, watch_storages
from lifetime.columns import TraceBuilder
from lifetime.events import EventKind, Phase, StorageKind
from lifetime.module_names import ModuleNames
from lifetime.operations import OpFacts, dispatches_itself, facts_of, is_wrapper, plain_tensors
from lifetime.phases import PhaseClock
from lifetime.resizes import unwatch_resizes, watch_resizes
from lifetime.saved_tensors import SavedTensorObserver
from lifetime.strings import StringTable
from lifetime.trace import Trace
from lifetime.tracker import StorageTracker

AfterOp = Callable[[Any, tuple[Any, ...], dict[str, Any], int], None]
BeforeOp = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]

_TENSOR_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_SCALAR_TYPES = frozenset({int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout})


class Recorder:
    """Records what runs between entry and exit.

    ``with lifetime.Recorder(model=model, optimizer=optimizer) as recorder: ...`` then ``recorder.trace``.

    Args:
        model: One module or several; their parameters and buffers count from entry and give names.
        optimizer: One optimizer or several; the parameters and the state that exist at entry count from entry.
        saved_tensors: Watch saved tensors too (pack and unpack events). Hooks that are already active keep working.
            The gradient transforms of ``torch.func`` refuse to run under any such hooks.
        count_buffers: Count memory that a runtime announced (`lifetime.buffers`). A runtime that records storages as
            if nothing had been moved turns it off.
        device: Count only storages on this device; those elsewhere are recorded with 0 bytes. Default: count all.

    Thread safety: operations are recorded on the thread that entered, and on autograd's threads working for it.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        saved_tensors: bool = True,
        count_buffers: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        self.strings = StringTable()
        self.tracker = StorageTracker(self.strings)
        self.after_op: AfterOp | None = None
        """Called after each operation with what it was and the bytes of the storages that it made."""
        self.before_op: BeforeOp | None = None
        """Called before each operation runs, with the operation and its arguments; may raise to refuse it."""
        self._builder = TraceBuilder(self.strings, self.tracker)
        self._models = _as_list(model)
        self._optimizers = _as_list(optimizer)
        self._modules = ModuleNames(self._models)
        self._phases = PhaseClock(
            before_step=self._before_step, after_step=self._after_step, after_backward=self._name_gradients
        )
        self._observer = SavedTensorObserver(self) if saved_tensors else None
        self._count_buffers = count_buffers
        self._device = None if device is None else torch.device(device)
        self._mode: TorchDispatchMode = _RecordingMode(self)
        self._pid = -1
        self._paused = _Paused()
        self._ordinals = [0] * len(EventKind)
        self._buffer_peak_nbytes = 0
        self._first_seen_saved: list[int] = []
        self._trace: Trace | None = None
        self.meta: dict[str, object] = {"torch": torch.__version__}

    # --- the public result -------------------------------------------------------------------------------------------

    @property
    def trace(self) -> Trace:
        """The finished record; available after exit.

        Raises:
            RuntimeError: The recorder is still recording.
        """
        if self._trace is None:
            raise RuntimeError("the recorder has not finished: read recorder.trace after the with block")
        return self._trace

    @property
    def peak_nbytes(self) -> int:
        """Highest number of live bytes seen so far, announced buffers included."""
        return max(self.tracker.peak_nbytes, self._buffer_peak_nbytes)

    @property
    def live_nbytes(self) -> int:
        """Bytes of the storages that are alive now, detained ones included."""
        return self.tracker.live_nbytes

    @property
    def num_ops(self) -> int:
        """Operations begun so far."""
        return self.tracker.num_ops

    @property
    def num_events(self) -> int:
        """Ticks of the event clock so far."""
        return self._builder.num_events

    @property
    def is_recording(self) -> bool:
        """Whether it records what happens now, in this process: a forked child inherits hooks, and records nothing."""
        return self._pid == os.getpid() and self._trace is None

    # --- life cycle --------------------------------------------------------------------------------------------------

    def start(self, *, push_mode: bool = True) -> None:
        """Begin recording. With ``push_mode=False`` the caller places `mode` on the dispatch stack itself.

        Raises:
            RuntimeError: It has been started before; one recorder makes one trace.
        """
        if self._pid != -1:
            raise RuntimeError("a recorder records once: make a new one for the next iteration")
        self._pid = os.getpid()
        self._name_parameters()
        self._name_optimizer_state()
        self._name_gradients()
        self._phases.start()
        self._modules.start()
        watch_resizes(self._storage_resized)
        if self._count_buffers:
            watch_storages(self.tracker.counted_elsewhere)
        if self._observer is not None:
            self._observer.start()
        if push_mode:
            self._mode.__enter__()

    def stop(self, *, pop_mode: bool = True) -> Trace:
        """End recording and return the trace."""
        if self._trace is not None:
            return self._trace
        if pop_mode:
            self._mode.__exit__(None, None, None)
        if self._observer is not None:
            self._observer.stop()
        unwatch_resizes(self._storage_resized)
        unwatch_storages(self.tracker.counted_elsewhere)
        self._modules.stop()
        self._phases.stop()
        self._name_gradients()
        self._name_optimizer_state()
        self.tracker.stop()
        self._models, self._optimizers = [], []  # a finished recorder keeps no model alive
        self._trace = self._builder.build(self.meta)
        return self._trace

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop()

    @property
    def mode(self) -> TorchDispatchMode:
        """The dispatch mode, for a caller that manages the stack itself."""
        return self._mode

    def pause(self) -> "_Pause":
        """A context in which operations of the calling thread are not recorded."""
        return _Pause(self._paused)

    # --- operations --------------------------------------------------------------------------------------------------

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation and record it."""
        facts = facts_of(func)
        if facts.ignored or self._paused.on or self._trace is not None or os.getpid() != self._pid:
            return func(*args, **kwargs)
        if self.before_op is not None:
            self.before_op(func, args, kwargs)
        tracker, builder = self.tracker, self._builder
        uses = self._inputs(facts, args, kwargs)
        if self._first_seen_saved:
            self._settle_first_seen(uses)
        row = builder.begin_op(facts.name, self._phases.phase(), self._modules.current)
        dead_nbytes = tracker.dead_nbytes
        made_nbytes = -tracker.live_nbytes - dead_nbytes
        start_ns = time.perf_counter_ns()
        try:
            result = func(*args, **kwargs)
        except BaseException:
            builder.end_op(row, start_ns, time.perf_counter_ns(), uses)
            raise
        end_ns = time.perf_counter_ns()
        if facts.hides_writes:
            _bump_versions(facts, args, kwargs)
        if facts.may_resize:
            written = [value for position, value in enumerate(args) if position in facts.writes]
            written += [value for name, value in kwargs.items() if name in facts.writes]
            self._note_outputs(written, row, uses, check_size=True)
        self._note_outputs(result, row, uses)
        builder.end_op(row, start_ns, end_ns, uses)
        if self.after_op is not None:
            self.after_op(func, args, kwargs, made_nbytes + tracker.live_nbytes + tracker.dead_nbytes)
        # What died while the operation ran was live during it, too.
        level = tracker.level_since(dead_nbytes)
        if self._count_buffers:
            self._buffer_peak_nbytes = max(self._buffer_peak_nbytes, level + buffers_nbytes())
        return result

    def _inputs(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, bool]:
        """The storages of all tensors among the arguments, each with whether it is written."""
        uses: dict[int, bool] = {}
        writes = facts.writes
        birth_op = self.tracker.num_ops if facts.is_fresh else -1
        position = -1
        for value in args:
            position += 1
            cls = value.__class__
            if cls in _TENSOR_TYPES and not writes:  # the short way for most arguments of most operations
                index = self._storage_of(value, birth_op)
                if index >= 0:
                    uses[index] = False
            elif cls not in _SCALAR_TYPES:
                self._note_input(value, position in writes, birth_op, uses)
        for name, value in kwargs.items():
            if value.__class__ not in _SCALAR_TYPES:
                born = self.tracker.num_ops if name in facts.outs else birth_op
                self._note_input(value, name in writes, born, uses)
        return uses

    def _note_input(self, value: Any, written: bool, birth_op: int, uses: dict[int, bool]) -> None:
        if value.__class__ in _TENSOR_TYPES or isinstance(value, torch.Tensor):
            index = self._storage_of(value, birth_op)
            if index >= 0 and (written or index not in uses):
                uses[index] = written
        elif isinstance(value, (list, tuple)):  # foreach and fused operations take lists
            for item in value:
                self._note_input(item, written, birth_op, uses)
        elif isinstance(value, dict):
            self._note_input(list(value.values()), written, birth_op, uses)

    def _note_outputs(self, value: Any, row: int, uses: dict[int, bool], *, check_size: bool = False) -> None:
        """Note the storages of all tensors in a result; what is not known yet was born in operation `row`."""
        if value.__class__ in _TENSOR_TYPES or isinstance(value, torch.Tensor):
            index = self._storage_of(value, row)
            if index >= 0:
                uses.setdefault(index, True)
                if check_size:
                    self.tracker.has_grown(index, value.untyped_storage())
        elif isinstance(value, (list, tuple)):
            for item in value:
                self._note_outputs(item, row, uses, check_size=check_size)
        elif isinstance(value, dict):
            self._note_outputs(list(value.values()), row, uses, check_size=check_size)

    def _storage_resized(self, storage: torch.UntypedStorage, old_nbytes: int) -> None:
        if self.is_recording and self._phases.is_ours() and not self._paused.on:
            self.tracker.resized(storage, old_nbytes)

    # --- events ------------------------------------------------------------------------------------------------------

    def phase(self) -> Phase:
        """What the program is doing now."""
        return self._phases.phase()

    def event(self, kind: EventKind, storage: int = -1, nbytes: int = 0, dtype: str = "") -> int:
        """Tick the event clock; gives the position of the event."""
        ordinal = self._ordinals[kind]
        self._ordinals[kind] = ordinal + 1
        phase = self._phases.phase()
        return self._builder.add_event(kind, phase, self._phases.num_backwards, ordinal, storage, nbytes, dtype)

    def saved(self, tensor: torch.Tensor) -> int:
        """Number of the storage of a tensor that autograd saves; -1 when it has none of its own."""
        tracker = self.tracker
        num_known = len(tracker.nbytes)
        of_parameter = isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter)
        index = self._storage_of(tensor, -1 if of_parameter else tracker.num_ops - 1)
        if index >= 0:
            if of_parameter and index == num_known:
                tracker.kind[index] = StorageKind.PARAMETER
            elif tracker.kind[index] is StorageKind.TEMPORARY:
                tracker.kind[index] = StorageKind.ACTIVATION
                if index == num_known:
                    self._first_seen_saved.append(index)
        return index

    def _settle_first_seen(self, inputs: Mapping[int, bool]) -> None:
        """Decide what storages are that no operation had touched when autograd saved them.

        An operation's inputs are saved just before it runs: what it reads now existed before the iteration. All else
        was made out of sight (in a compiled region), just before it was saved.
        """
        tracker = self.tracker
        for index in self._first_seen_saved:
            if index in inputs:
                tracker.birth_op[index] = -1
                tracker.kind[index] = StorageKind.INPUT
        self._first_seen_saved.clear()

    # --- storages and their names ------------------------------------------------------------------------------------

    def _storage_of(self, tensor: torch.Tensor, birth_op: int) -> int:
        """Number of the storage of `tensor`, registered at first sight; -1 for tensors without a plain storage."""
        try:
            storage = tensor.untyped_storage()
            index = self.tracker._index_by_cdata.get(storage._cdata)
        except (RuntimeError, NotImplementedError):  # sparse, opaque
            return -1
        if index is not None:
            return index
        if tensor.__class__ not in _TENSOR_TYPES and is_wrapper(tensor.__class__):
            return -1  # its storage is a dummy
        if birth_op >= 0:
            kind = StorageKind.TEMPORARY
        else:
            kind = StorageKind.PARAMETER if isinstance(tensor, torch.nn.Parameter) else StorageKind.INPUT
        counted = self._counts(tensor, storage)
        nbytes = storage.nbytes() if counted else 0
        return self.tracker.add(tensor, storage, birth_op, kind, nbytes=nbytes, counted=counted)

    def _counts(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        if self._count_buffers and lies_on_buffer(storage):
            return False
        device = self._device
        return device is None or (tensor.device.type == device.type and device.index in (None, tensor.device.index))

    def _know(self, tensor: torch.Tensor, kind: StorageKind, name: str) -> None:
        for plain in plain_tensors(tensor):
            index = self._storage_of(plain, -1)
            if index >= 0 and not self.tracker.name[index]:
                self.tracker.kind[index] = kind
                self.tracker.name[index] = self.strings.number(name)

    def _name_parameters(self) -> None:
        for model in self._models:
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                self._know(tensor, StorageKind.PARAMETER, name)
        for name, parameter in self._named_parameters():
            self._know(parameter, StorageKind.PARAMETER, name)

    def _name_gradients(self) -> None:
        for name, parameter in self._named_parameters():
            if parameter.grad is not None:
                self._know(parameter.grad, StorageKind.GRADIENT, f"{name}.grad")

    def _name_optimizer_state(self) -> None:
        names = {id(parameter): name for name, parameter in self._named_parameters()}
        for optimizer in self._optimizers:
            for owner, state in optimizer.state.items():
                for name, tensor in _tensors_in(state, names.get(id(owner), "")):
                    self._know(tensor, StorageKind.OPTIMIZER, name)

    def _named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        seen: set[int] = set()
        for model in self._models:
            for name, parameter in model.named_parameters():
                seen.add(id(parameter))
                yield name, parameter
        for optimizer in self._optimizers:
            for g, group in enumerate(optimizer.param_groups):
                for i, parameter in enumerate(group["params"]):
                    if id(parameter) not in seen:
                        yield f"group{g}.{i}", parameter

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not any(known is optimizer for known in self._optimizers):
            self._optimizers.append(optimizer)
            self._name_parameters()
            self._name_optimizer_state()
        self._name_gradients()

    def _after_step(self, _: torch.optim.Optimizer) -> None:
        self._name_optimizer_state()


def _bump_versions(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Move the versions that the operation would have moved without a dispatch mode: autograd's check looks at them."""
    written = [value for position, value in enumerate(args) if position in facts.writes]
    written += [value for name, value in kwargs.items() if name in facts.writes]
    for tensors in written:
        torch.autograd.graph.increment_version(tensors)


class _RecordingMode(TorchDispatchMode):
    """Hands every operation to the recorder."""

    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let ``torch.compile`` compile although a mode is active; what its kernels do inside stays unseen."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        for cls in types:
            if cls is not torch.Tensor and dispatches_itself(cls):
                return NotImplemented  # its parts come by as operations of their own
        return self._recorder.run(func, args, kwargs or {})


class _Paused(threading.local):
    on = False


class _Pause:
    """Marks the calling thread as paused; nests."""

    __slots__ = ("_before", "_local")

    def __init__(self, local: _Paused) -> None:
        self._local = local

    def __enter__(self) -> None:
        self._before = self._local.on
        self._local.on = True

    def __exit__(self, *_: object) -> None:
        self._local.on = self._before


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _tensors_in(state: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an optimizer's state, each with a dotted name."""
    if isinstance(state, torch.Tensor):
        yield name, state
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from _tensors_in(value, f"{name}.{key}")
    elif isinstance(state, (list, tuple)):
        for i, value in enumerate(state):
            yield from _tensors_in(value, f"{name}.{i}")
