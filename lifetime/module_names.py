"""Which module is running, by its qualified name.

Covers a stack of names kept by global forward hooks. It changes no input or output.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class ModuleNames:
    """The running modules, innermost last; modules outside the given models go by their class."""

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        self._names = {id(module): name for model in models for name, module in model.named_modules()}
        self._stack: list[str] = []
        self._handles: list[Any] = []
        self.current = ""

    def start(self) -> None:
        """Install the hooks."""
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._exit, always_call=True),
        ]

    def stop(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        self._stack.append(self.current)
        self.current = self._names.get(id(module), type(module).__name__)

    def _exit(self, *_: Any) -> None:
        self.current = self._stack.pop() if self._stack else ""
