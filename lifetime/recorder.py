"""Recording one iteration: every operation, storage, use and event.

Covers the dispatch mode that sees the operations and the hooks that name modules and phases. Identity and lifetimes of
storages are ``tracker``'s, the finished record is ``trace``'s, saved tensors are watched by ``saved_tensors``. The rule:
recording changes no result, only time.

What a dispatch mode cannot see, it does not record: memory inside kernels, compiled regions, ``.data`` assignment as an
operation (the death of the old storage is seen).
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from lifetime.buffers import lies_on_buffer, live_buffers
from lifetime.columns import TraceBuilder
from lifetime.events import EventKind, Phase, StorageKind
from lifetime.module_names import ModuleNames
from lifetime.saved_tensors import SavedTensorObserver
from lifetime.strings import StringTable
from lifetime.tracker import StorageTracker
from lifetime.trace import Trace

BeforeOp = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]


class Recorder:
    """Records what runs between entry and exit.

    ``with lifetime.Recorder(model=model, optimizer=optimizer) as recorder: ...`` then ``recorder.trace``.

    Args:
        model: One module or several; their parameters and buffers count from entry and give names.
        optimizer: One optimizer or several; the state that exists at entry counts from entry.
        saved_tensors: Watch saved tensors too (pack and unpack events). Hooks that are already active keep working.
        count_buffers: Count memory that a runtime announced (`lifetime.buffers`). A runtime that records storages as
            if nothing had been moved turns it off.

    Thread safety: operations are recorded on the thread that entered, and on autograd's threads working for it.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        saved_tensors: bool = True,
        count_buffers: bool = True,
    ) -> None:
        self.strings = StringTable()
        self.tracker = StorageTracker(self.strings)
        self.before_op: BeforeOp | None = None
        """Called before each operation runs, with the operation and its arguments; may raise to refuse it."""
        self._builder = TraceBuilder(self.strings, self.tracker)
        self._models = _as_list(model)
        self._optimizers = _as_list(optimizer)
        self._modules = ModuleNames(self._models)
        self._observer = SavedTensorObserver(self) if saved_tensors else None
        self._count_buffers = count_buffers
        self._mode = _RecordingMode(self)
        self._pid = os.getpid()
        self._paused = threading.local()
        self._optimizer_depth = 0
        self._newest_task = -1
        self._num_backwards = 0
        self._ordinals = [0] * len(EventKind)
        self._handles: list[Any] = []
        self._buffer_peak_nbytes = 0
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
            raise RuntimeError("the recorder is still recording: read recorder.trace after the with block")
        return self._trace

    @property
    def peak_nbytes(self) -> int:
        """Highest number of live bytes seen so far, announced buffers included."""
        return max(self.tracker.peak_nbytes, self._buffer_peak_nbytes)

    # --- life cycle --------------------------------------------------------------------------------------------------

    def start(self, *, push_mode: bool = True) -> None:
        """Begin recording. With ``push_mode=False`` the caller places `mode` on the dispatch stack itself."""
        for model in self._models:
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                self._know(tensor, StorageKind.PARAMETER, name)
        self._name_optimizer_state()
        self._name_gradients()
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._modules.start()
        if self._observer is not None:
            self._observer.start()
        if push_mode:
            self._mode.__enter__()

    def stop(self, *, pop_mode: bool = True) -> Trace:
        """End recording and return the trace."""
        if pop_mode:
            self._mode.__exit__(None, None, None)
        if self._observer is not None:
            self._observer.stop()
        self._modules.stop()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._name_gradients()
        self._name_optimizer_state()
        self.tracker.stop()
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

    # --- operations --------------------------------------------------------------------------------------------------

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

    def phase(self) -> Phase:
        """What the program is doing now."""
        task = torch._C._current_graph_task_id()
        if task != -1:
            if task > self._newest_task:
                self._newest_task = task
                self._num_backwards += 1
            return Phase.BACKWARD
        return Phase.OPTIMIZER if self._optimizer_depth else Phase.FORWARD

    def pause(self) -> "_Pause":
        """A context in which operations of the calling thread are not recorded."""
        return _Pause(self._paused)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation and record it."""
        if getattr(self._paused, "on", False) or os.getpid() != self._pid or func.namespace == "prim":
            return func(*args, **kwargs)
        if self.before_op is not None:
            self.before_op(func, args, kwargs)
        read = [self._storage_of(tensor, -1) for tensor in _tensors(args, kwargs)]
        written = {self._storage_of(t, -1) for t in _written_tensors(func, args, kwargs)}
        row = self._builder.begin_op(str(func), self.phase(), self._modules.current)
        start_ns = time.perf_counter_ns()
        try:
            result = func(*args, **kwargs)
        finally:
            self._builder.end_op(row, start_ns, time.perf_counter_ns())
        uses = {index: index in written for index in read}
        for tensor in _tensors((result,), {}):
            uses.setdefault(self._storage_of(tensor, row), True)
        uses.pop(-1, None)
        self._builder.add_uses(row, uses)
        if self._count_buffers:
            total = self.tracker.live_nbytes + sum(nbytes for _, nbytes in live_buffers())
            self._buffer_peak_nbytes = max(self._buffer_peak_nbytes, total)
        return result

    def event(self, kind: EventKind, storage: int = -1, nbytes: int = 0, dtype: str = "") -> int:
        """Tick the event clock; gives the position of the event."""
        ordinal = self._ordinals[kind]
        self._ordinals[kind] = ordinal + 1
        phase = self.phase()
        micro_batch = self._num_backwards - (1 if phase is Phase.BACKWARD else 0)
        return self._builder.add_event(kind, phase, micro_batch, ordinal, storage, nbytes, dtype)

    def saved(self, tensor: torch.Tensor) -> int:
        """Number of the storage of a tensor that autograd saves; -1 when it has none of its own."""
        index = self._storage_of(tensor, self.tracker.num_ops - 1)
        if index >= 0 and self.tracker.kind[index] is StorageKind.TEMPORARY:
            self.tracker.kind[index] = StorageKind.ACTIVATION
        return index

    # --- naming ------------------------------------------------------------------------------------------------------

    def _storage_of(self, tensor: torch.Tensor, birth_op: int) -> int:
        """Number of the storage of `tensor`, registered at first sight; -1 for tensors without a plain storage."""
        try:
            storage = tensor.untyped_storage()
            cdata = storage._cdata
        except (RuntimeError, NotImplementedError):  # sparse, nested, opaque and wrapper tensors
            return -1
        index = self.tracker._index_by_cdata.get(cdata)
        if index is not None:
            return index
        if birth_op >= 0:
            kind = StorageKind.TEMPORARY
        else:
            kind = StorageKind.PARAMETER if isinstance(tensor, torch.nn.Parameter) else StorageKind.INPUT
        counted = not (self._count_buffers and lies_on_buffer(storage))
        return self.tracker.add(tensor, storage, birth_op, kind, nbytes=storage.nbytes() if counted else 0)

    def _know(self, tensor: torch.Tensor, kind: StorageKind, name: str) -> None:
        index = self._storage_of(tensor, -1)
        if index >= 0 and not self.tracker.name[index]:
            self.tracker.kind[index] = kind
            self.tracker.name[index] = self.strings.number(name)

    def _name_gradients(self) -> None:
        for name, parameter in self._named_parameters():
            if parameter.grad is not None:
                self._know(parameter.grad, StorageKind.GRADIENT, f"{name}.grad")

    def _name_optimizer_state(self) -> None:
        names = {id(parameter): name for name, parameter in self._named_parameters()}
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                owner = names.get(id(parameter), "")
                for key, value in state.items() if isinstance(state, dict) else ():
                    if isinstance(value, torch.Tensor):
                        self._know(value, StorageKind.OPTIMIZER, f"{owner}.{key}")

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

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._optimizer_depth += 1
        if not any(known is optimizer for known in self._optimizers):
            self._optimizers.append(optimizer)
        self._name_gradients()

    def _after_step(self, *_: Any) -> None:
        self._optimizer_depth = max(0, self._optimizer_depth - 1)
        self._name_optimizer_state()


class _RecordingMode(TorchDispatchMode):
    """Hands every operation to the recorder."""

    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let ``torch.compile`` compile although a mode is active; what its kernels do inside stays unseen."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return self._recorder.run(func, args, kwargs or {})


class _Pause:
    """Marks the calling thread as paused; nests."""

    def __init__(self, local: threading.local) -> None:
        self._local = local

    def __enter__(self) -> None:
        self._before = getattr(self._local, "on", False)
        self._local.on = True

    def __exit__(self, *_: object) -> None:
        self._local.on = self._before


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _tensors(args: Iterable[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """All tensors among the arguments, lists of tensors (foreach and fused operations) included."""
    found: list[torch.Tensor] = []
    pending: list[Any] = [*args, *kwargs.values()]
    for value in pending:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            pending.extend(value)
    return found


_written_arguments: dict[Any, tuple[tuple[int, str], ...]] = {}


def _written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that the operation's schema says it writes."""
    positions = _written_arguments.get(func)
    if positions is None:
        arguments = enumerate(func._schema.arguments)
        positions = tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)
        _written_arguments[func] = positions
    if not positions:
        return []
    values = [args[i] if i < len(args) else kwargs.get(name) for i, name in positions]
    return _tensors(values, {})
