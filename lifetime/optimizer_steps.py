"""Seeing the steps of all optimizers.

Covers one pair of step hooks for the process, handed on to whoever watches. What a step means is ``phases``'. The rule:
torch's collections of hooks are never changed while torch walks through them, which it would answer with an error; a
recording that begins or ends inside a step's hooks puts the change off.
"""

import sys
import threading
from types import FrameType
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class StepWatcher(Protocol):
    """What is told of steps."""

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer` is about to step."""

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer` has stepped; not called when the step raised."""


_watchers: list[StepWatcher] = []
_handles: list[Any] = []
_lock = threading.RLock()


def watch_steps(watcher: StepWatcher) -> None:
    """Tell `watcher` of every step in the process, on the thread that makes it, until `unwatch_steps`."""
    with _lock:
        _watchers.append(watcher)
        settle_hooks()


def unwatch_steps(watcher: StepWatcher) -> None:
    """Stop telling `watcher`; does nothing when it does not watch."""
    with _lock:
        if watcher in _watchers:
            _watchers.remove(watcher)
        settle_hooks()


def settle_hooks() -> bool:
    """Have hooks exactly while somebody watches; gives False when that must wait until a step is over."""
    with _lock:
        if bool(_watchers) == bool(_handles):
            return True
        if _inside_step():
            return False
        if _watchers:
            _handles.append(register_optimizer_step_pre_hook(_step_begins))
            _handles.append(register_optimizer_step_post_hook(_step_ended))
        else:
            for handle in _handles:
                handle.remove()
            _handles.clear()
        return True


def _inside_step() -> bool:
    """Whether code that walks through the step hooks is on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if "_global_optimizer_post_hooks" in frame.f_code.co_names:
            return True
        frame = frame.f_back
    return False


def _step_begins(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        for watcher in tuple(_watchers):
            watcher.step_begins(optimizer)


def _step_ended(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        for watcher in tuple(_watchers):
            watcher.step_ended(optimizer)
