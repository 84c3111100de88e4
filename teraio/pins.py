"""Modules whose saved tensors stay resident because the user says so.

Covers matching names and marking the time spent inside such modules. What that means for a tensor is decided where it
is saved.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from lifetime.own_hooks import OwnHook
from teraio.errors import ConfigError
from teraio.runtime.hooks import SavedTensorHooks


def pinned_modules(models: Sequence[torch.nn.Module], patterns: Sequence[str]) -> list[torch.nn.Module]:
    """The modules whose qualified name matches one of `patterns`.

    Raises:
        ConfigError: A pattern matches no module.
    """
    named = [(name, module) for model in models for name, module in model.named_modules()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name, _ in named):
            raise ConfigError(f"Config.pin names {pattern!r}, but no module has such a name: see model.named_modules()")
    return [module for name, module in named if any(fnmatchcase(name, pattern) for pattern in patterns)]


class Pins:
    """Counts, while installed, how deep the program is inside pinned modules."""

    def __init__(self, hooks: SavedTensorHooks, modules: Sequence[torch.nn.Module]) -> None:
        self._hooks = hooks
        self._handles: list[Any] = []
        for module in modules:
            self._handles.append(module.register_forward_pre_hook(OwnHook(self._enter)))
            self._handles.append(module.register_forward_hook(OwnHook(self._exit), always_call=True))

    def uninstall(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._hooks.pin_depth = 0

    def _enter(self, *_: Any) -> None:
        self._hooks.pin_depth += 1

    def _exit(self, *_: Any) -> None:
        self._hooks.pin_depth = max(0, self._hooks.pin_depth - 1)
