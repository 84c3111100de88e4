"""What the program is doing, and how many backward passes it has finished.

Covers the phase of each moment and the count of micro-batches. The rule: a backward pass that runs inside another one
(reentrant checkpointing) is part of it, and does not count.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lifetime.events import Phase
from lifetime.optimizer_steps import settle_hooks, unwatch_steps, watch_steps

OptimizerHook = Callable[[torch.optim.Optimizer], None]


class PhaseClock:
    """The phase of one recording.

    Args:
        before_step: Called before an optimizer steps.
        after_step: Called after it has stepped.
        after_backward: Called when an outermost backward pass has finished.

    Thread safety: call it on the thread that started it, or on autograd's threads working for that one.
    """

    def __init__(
        self, *, before_step: OptimizerHook, after_step: OptimizerHook, after_backward: Callable[[], None]
    ) -> None:
        self.num_backwards = 0
        """Backward passes that have finished."""
        self._before_step = before_step
        self._after_step = after_step
        self._after_backward = after_backward
        self._task = -1  # the outermost running backward pass
        self._newest_task = -1
        self._stepping: list[int] = []
        self._hooks_are_settled = True
        self._running = False
        self._thread = 0

    def start(self) -> None:
        """Begin to watch optimizers."""
        self._thread = threading.get_ident()
        self._running = True
        watch_steps(self)
        self._hooks_are_settled = settle_hooks()

    def stop(self) -> None:
        """Stop watching."""
        self._running = False
        unwatch_steps(self)

    def is_ours(self) -> bool:
        """Whether the calling thread is the one that started, or one of autograd's."""
        return threading.get_ident() == self._thread or torch._C._current_graph_task_id() != -1

    def phase(self) -> Phase:
        """What the program is doing now."""
        if not self._hooks_are_settled:
            self._hooks_are_settled = settle_hooks()
        task = torch._C._current_graph_task_id()
        if task == -1:
            if self._task != -1:  # a backward pass that raised does not call back
                self._backward_ended(self._task)
            return Phase.OPTIMIZER if self._stepping else Phase.FORWARD
        if self._task == -1 and task > self._newest_task:
            self._backward_begins(task)
        return Phase.BACKWARD

    def _backward_begins(self, task: int) -> None:
        self._task = self._newest_task = task
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(partial(self._backward_ended, task))

    def _backward_ended(self, task: int) -> None:
        if self._task == task:
            self._task = -1
            self.num_backwards += 1
            if self._running:
                self._after_backward()

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer` is about to step."""
        if self.is_ours():
            self._forget_step(optimizer)
            self._stepping.append(id(optimizer))
            self._before_step(optimizer)

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer` has stepped."""
        if self.is_ours():
            self._forget_step(optimizer)
            self._after_step(optimizer)

    def _forget_step(self, optimizer: torch.optim.Optimizer) -> None:
        """End the step of `optimizer`, and those inside it: a step that raised did not say that it ended."""
        if id(optimizer) in self._stepping:
            del self._stepping[self._stepping.index(id(optimizer)) :]
