"""Exceptions anywhere in a step: the session goes on, with the bits of a plain run that was interrupted too.

Covers exceptions and Ctrl-C in forward, backward and optimizer step. Failing transfers are ``test_faults``'s matter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import teraio


class _Trap(torch.autograd.Function):
    """The identity, which raises on its way back when it is armed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, error: type[BaseException] | None) -> torch.Tensor:
        ctx.error = error
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.error is not None:
            raise ctx.error("on purpose")
        return grad, None


def _trapped(kit: Any, where: str, error: type[BaseException], at: tuple[int, ...]) -> Callable[[], Any]:
    """Six layers with dropout; in the steps `at` it raises half way through forward, backward or step."""

    def make() -> Any:
        armed: list[str] = []

        def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
            for i, layer in enumerate(m.layers):
                x = F.dropout(torch.tanh(layer(x)), 0.1)
                if i == 3:
                    if "forward" in armed:
                        raise error("on purpose")
                    x = _Trap.apply(x, error if "backward" in armed else None)
            return x

        model = kit.Built(forward, layers=nn.ModuleList(nn.Linear(32, 32) for _ in range(8)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def interrupt(*_: object) -> None:
            if "step" in armed:
                raise error("on purpose")

        optimizer.register_step_pre_hook(interrupt)

        def step(i: int) -> object:
            armed[:] = [where] if i in at else []
            try:
                loss = model(torch.randn(128, 32)).square().mean()
                loss.backward()
                optimizer.step()
                result: object = loss.detach(), [p.grad for p in model.parameters()]
            except error:
                assert i in at
                result = "interrupted", [p.grad for p in model.parameters()]
            optimizer.zero_grad()
            return result

        return model, optimizer, step

    return make


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_an_interrupted_step_changes_nothing_later(kit: Any, where: str, error: type[BaseException]) -> None:
    # Interrupted while learning (1), and while planned (5).
    kit.compare(_trapped(kit, where, error, (1, 5)), steps=9, budget_holds=False)  # not in those that differ


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_interrupted_step_leaves_no_record(kit: Any, where: str) -> None:
    left = []

    def look(session: Any, i: int) -> None:
        left.append(kit.settle(session))

    make = _trapped(kit, where, KeyboardInterrupt, (0, 2, 4, 6))
    kit.run(make, policy="evict_all", steps=8, use_session=look)
    assert left == [(0, 0)] * 8


def test_the_exception_leaves_the_block_and_takes_the_hooks_along(kit: Any) -> None:
    model, optimizer, step = kit.training(kit.chain())
    before = kit.traces_left([model], [optimizer])
    for steps in (0, 1, 4):  # while the dispatch mode is on, or while a plan is carried out
        session = teraio.offload(model, optimizer, budget="1GiB", config=teraio.Config(min_nbytes=4096))
        with pytest.raises(KeyError, match="mine"), session:  # noqa: PT012
            for i in range(steps):
                step(i)
            loss = model(torch.randn(128, 32)).square().mean()
            raise KeyError("mine")
        assert kit.traces_left([model], [optimizer]) == before
        assert not _get_current_dispatch_mode_stack()
        loss.backward()
        optimizer.zero_grad()
        del loss


def test_an_exception_in_the_middle_of_the_chunks_puts_the_groups_back(kit: Any) -> None:
    def make() -> Any:
        model, optimizer, _ = kit.training(kit.chain())
        calls = [0]

        def step(i: int) -> object:
            groups, parameters = optimizer.param_groups, optimizer.param_groups[0]["params"]
            loss = model(torch.randn(128, 32)).square().mean()
            loss.backward()
            broken = model.layers[3].weight
            if i == 2:
                broken.grad.data = broken.grad.data[:0]  # what the update chokes on, after some parameters
            try:
                optimizer.step()
                result: object = loss.detach()
            except RuntimeError:
                calls[0] += 1
                result = "raised"
            assert optimizer.param_groups is groups
            assert optimizer.param_groups[0]["params"] is parameters
            assert len(parameters) == 12
            optimizer.zero_grad()
            return result

        return model, optimizer, step

    # The chunks of a plain run are the whole: only the groups are compared, inside the step.
    torch.manual_seed(0)
    outcome = kit.run(make, config={"optimizer_chunk_nbytes": 1})
    assert "raised" in repr(outcome.log[2])


class _Large(torch.autograd.Function):
    """Its backward makes one large tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient.repeat(10, 1).view(10, *gradient.shape).sum(0)


class _WithLarge(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(_Large.apply(torch.tanh(self.first(x)))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("steps_anyway", [False, True])
def test_a_backward_that_is_refused_teaches_nothing(steps_anyway: bool) -> None:
    model = _WithLarge()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refused = 0
    config = teraio.Config(allow_unsafe_spill=True)
    with teraio.offload(model, optimizer, budget="8MiB", config=config) as session:
        for _ in range(5):
            loss = model(torch.ones(4096, 64)).sum()
            try:
                loss.backward()
            except teraio.InfeasibleBudgetError:
                refused += 1
            if steps_anyway:
                optimizer.step()
            optimizer.zero_grad()
            del loss
    assert refused == 5
    report = session.report()
    assert report.peak_nbytes <= 8 << 20
    assert any("ended in an exception" in event for event in report.events)


def test_a_step_inside_backward_is_no_failure(kit: Any) -> None:
    def make() -> Any:
        model, optimizer, _ = kit.training(kit.chain())
        last = next(iter(model.parameters()))  # whose gradient comes last

        def step_now(_: torch.Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()

        last.register_post_accumulate_grad_hook(step_now)
        data = torch.randn(8, next(model.parameters()).shape[1], generator=torch.Generator().manual_seed(0))
        return model, optimizer, lambda index: model(data).sum().backward()

    model, optimizer, step = make()
    with teraio.offload(model, optimizer, config=teraio.Config(allow_unsafe_spill=True)) as session:
        for index in range(5):
            step(index)
    report = session.report()
    assert report.iterations >= 4
    assert not any("ended in an exception" in event for event in report.events)
