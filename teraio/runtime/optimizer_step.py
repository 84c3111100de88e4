"""The optimizer step in chunks of parameters, so that its temporaries fit the budget.

Covers stepping a few parameters at a time with the optimizer's own code. The rules: a chunk is whole parameters, so
for optimizers whose update is per parameter the result is the same, bit for bit; step hooks, closures, schedulers and
the gradient scaler see one step; an optimizer that is not known to be per parameter is left whole.
"""

import types
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Protocol

import torch
from torch.optim import optimizer as optimizer_module

_PER_PARAMETER = (
    torch.optim.ASGD,
    torch.optim.SGD,
    torch.optim.Adadelta,
    torch.optim.Adafactor,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
)
"""Optimizers of torch whose update of one parameter depends on no other."""


def can_be_chunked(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's step is one that is known to update each parameter on its own."""
    step = getattr(type(optimizer), "step", None)
    if getattr(step, "__wrapped__", None) is None:
        return False
    return any(isinstance(optimizer, known) and step is known.step for known in _PER_PARAMETER)


Chunk = tuple[dict[str, Any], list[torch.Tensor]]
"""A parameter group, and those of its parameters that are stepped together."""


class ChunkWatcher(Protocol):
    """Told of each chunk; this is where optimizer state comes and goes."""

    def before_step(self, chunks: list[Chunk]) -> None:
        """`chunks` are about to be stepped, in this order; refuses here what cannot be ended."""

    def after_step(self) -> None:
        """The step has ended, well or not."""

    def before_chunk(self, chunk: list[torch.Tensor], upcoming: list[torch.Tensor]) -> None:
        """`chunk` is about to be stepped, then `upcoming`."""

    def after_chunk(self, chunk: list[torch.Tensor]) -> None:
        """`chunk` has been stepped."""


class ChunkedStep:
    """Replaces ``optimizer.step`` on one optimizer while active."""

    def __init__(self, optimizer: torch.optim.Optimizer, watcher: ChunkWatcher, chunk_nbytes: int) -> None:
        self._optimizer = optimizer
        self._watcher: ChunkWatcher | None = watcher
        self._chunk_nbytes = chunk_nbytes
        self._own: Any = None
        self._before: Any = None
        self._had_own = False
        self._active = False

    def install(self) -> None:
        """Step in chunks from now on."""
        optimizer = self._optimizer
        self._had_own = "step" in optimizer.__dict__
        self._before = optimizer.step
        outer = self

        def step(self: torch.optim.Optimizer, closure: Any = None) -> Any:
            return outer._step(closure) if outer._active else outer._before(closure)

        if getattr(self._before, "_wrapped_by_lr_sched", False):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self._active = True
        self._own = types.MethodType(step, optimizer)
        optimizer.step = self._own  # type: ignore[method-assign]

    def uninstall(self) -> None:
        """Step as before; a scheduler that has wrapped ours meanwhile goes on through it, whole."""
        self._active = False
        self._watcher = None  # a scheduler may keep us, and with us it would keep the engine
        optimizer = self._optimizer
        if optimizer.__dict__.get("step") is self._own:
            if self._had_own:
                optimizer.step = self._before  # type: ignore[method-assign]
            else:
                del optimizer.__dict__["step"]

    def _step(self, closure: Any) -> Any:
        """One step, as torch's own wrapper makes it, with the update taken in chunks."""
        optimizer = self._optimizer
        update = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]
        optimizer._opt_called = True  # type: ignore[attr-defined]  # what learning rate schedulers look at
        args: tuple[Any, ...] = (optimizer,) if closure is None else (optimizer, closure)
        kwargs: dict[str, Any] = {}
        with torch.autograd.profiler.record_function(f"Optimizer.step#{type(optimizer).__name__}.step"):
            for hook in chain(_global_hooks("pre"), optimizer._optimizer_step_pre_hooks.values()):
                result = hook(optimizer, args, kwargs)
                if result is not None:
                    args, kwargs = result
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._update_in_chunks(update)
            optimizer._optimizer_step_code()
            for hook in chain(optimizer._optimizer_step_post_hooks.values(), _global_hooks("post")):
                hook(optimizer, args, kwargs)
        return loss

    def _update_in_chunks(self, update: Callable[[torch.optim.Optimizer], object]) -> None:
        """Show the optimizer one chunk of one group at a time; whatever happens, it has all of them again after."""
        watcher = self._watcher
        assert watcher is not None
        groups = self._optimizer.param_groups
        work = [(group, chunk) for group in groups for chunk in _chunks(group["params"], self._chunk_nbytes)]
        watcher.before_step(work)
        try:
            self._step_chunks(work, update, watcher)
        finally:
            watcher.after_step()

    def _step_chunks(
        self, work: list[Chunk], update: Callable[[torch.optim.Optimizer], object], watcher: ChunkWatcher
    ) -> None:
        optimizer = self._optimizer
        groups = optimizer.param_groups
        for i, (group, chunk) in enumerate(work):
            parameters = group["params"]
            watcher.before_chunk(chunk, work[i + 1][1] if i + 1 < len(work) else [])
            try:
                group["params"] = chunk
                optimizer.param_groups = [group]
                new = [parameter for parameter in chunk if not optimizer.state.get(parameter)]
                try:
                    update(optimizer)
                except BaseException:
                    for parameter in new:  # half made: the next step would take it for complete
                        optimizer.state.pop(parameter, None)
                    raise
            finally:
                group["params"] = parameters
                optimizer.param_groups = groups
            watcher.after_chunk(chunk)


def _chunks(parameters: list[torch.Tensor], chunk_nbytes: int) -> Iterator[list[torch.Tensor]]:
    """Runs of parameters of about `chunk_nbytes` together; a larger one stands alone."""
    chunk: list[torch.Tensor] = []
    nbytes = 0
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        if chunk and nbytes + size > chunk_nbytes:
            yield chunk
            chunk, nbytes = [], 0
        chunk.append(parameter)
        nbytes += size
    if chunk:
        yield chunk


def _global_hooks(moment: str) -> Iterator[Any]:
    """Step hooks registered for all optimizers."""
    return iter(list(getattr(optimizer_module, f"_global_optimizer_{moment}_hooks", {}).values()))
