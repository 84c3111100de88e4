"""Placing a dispatch mode under those that are active, and taking it away wherever it is.

Covers the order of modes. The rule: ours lies at the bottom. A user's ``with SomeMode():`` round a forward pass pops
the top of the stack when it ends; a mode of ours pushed meanwhile would be popped in its stead.

A backward pass puts the stack back as it found it when it ends. A mode that is removed inside of one is therefore
remembered, and removed again by `settle`, later.
"""

import torch
from torch.utils import _python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode

_removed_in_backward: list[TorchDispatchMode] = []


def insert_at_bottom(mode: TorchDispatchMode) -> None:
    """Activate `mode` on the calling thread, below all active modes."""
    settle()
    above = _pop_all()
    dispatch._push_mode(mode)
    _push_all(above)


def remove(mode: TorchDispatchMode) -> bool:
    """Deactivate `mode` wherever it is on the calling thread's stack; gives False when it is not there."""
    if _inside_backward():
        _removed_in_backward.append(mode)
    modes = _pop_all()
    _push_all([other for other in modes if other is not mode])
    return any(other is mode for other in modes)


def settle() -> None:
    """Remove what a backward pass that has ended brought back; cheap when there is nothing."""
    if not _removed_in_backward or _inside_backward():
        return
    gone = list(_removed_in_backward)
    _removed_in_backward.clear()
    _push_all([mode for mode in _pop_all() if not any(mode is each for each in gone)])


def _inside_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _pop_all() -> list[TorchDispatchMode]:
    """Empty the stack; bottom first."""
    depth = len(dispatch._get_current_dispatch_mode_stack())
    return [dispatch._pop_mode() for _ in range(depth)][::-1]


def _push_all(modes: list[TorchDispatchMode]) -> None:
    for mode in modes:
        dispatch._push_mode(mode)
