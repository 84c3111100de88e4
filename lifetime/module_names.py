"""Which module is running, by its qualified name.

Covers a stack of names kept by forward hooks on the modules of the given models, or on all modules where no model is
given. It changes no input or output. The rule: nothing here runs, or breaks the graph, inside ``torch.compile``, which
follows hooks into our code; hooks on all modules at once would also make it compile again afterwards.
"""

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lifetime.own_hooks import OwnHook


class ModuleNames:
    """The running modules, innermost last; without a model, they go by their class.

    Thread safety: modules that other threads run are ignored, save autograd's threads.
    """

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        self._modules = [(name, module) for model in models for name, module in model.named_modules()]
        self._names = {id(module): name for name, module in self._modules}
        self._stack: list[tuple[int, str]] = []
        self._handles: list[Any] = []
        self._thread = 0
        self.current = ""

    def start(self) -> None:
        """Install the hooks."""
        self._thread = threading.get_ident()
        if not self._modules:
            self._handles = [
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._exit, always_call=True),
            ]
        for name, module in self._modules:
            # A root has no name to tell; whoever owns it may end the recording in a hook on it, and torch does not
            # allow a module's hooks to change while it walks through them.
            if name and not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
                self._handles += [
                    module.register_forward_pre_hook(OwnHook(self._enter)),
                    module.register_forward_hook(OwnHook(self._exit), always_call=True),
                ]

    def stop(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._modules = []
        self._stack = []

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling() or not self._is_ours():
            return
        self._stack.append((id(module), self.current))
        self.current = self._names.get(id(module), type(module).__name__)

    def _exit(self, module: torch.nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling() or not self._is_ours():
            return
        # A module whose entry was not seen (a hook before ours raised) has nothing to leave; one whose exit was not
        # seen is left with the module round it.
        for i in reversed(range(len(self._stack))):
            if self._stack[i][0] == id(module):
                self.current = self._stack[i][1]
                del self._stack[i:]
                break

    def _is_ours(self) -> bool:
        return threading.get_ident() == self._thread or torch._C._current_graph_task_id() != -1
