"""What is not training teaches nothing; every shape that trains is learnt once and planned from then on.

Covers evaluation between steps, and iterations that differ in their inputs or in what the model does with them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import teraio


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_steps(kit: Any, context: Any) -> None:
    def make() -> Any:
        def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
            for layer, norm in zip(m.layers, m.norms, strict=True):
                x = nn.functional.dropout(torch.tanh(norm(layer(x))), 0.2, m.training)
            return x

        layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))
        model = kit.Built(forward, layers=layers, norms=nn.ModuleList(nn.BatchNorm1d(32) for _ in layers))
        _, optimizer, train = kit.training(model)

        def step(i: int) -> object:
            result = train(i)
            model.eval()
            with context():
                score = model(torch.randn(64, 32)).mean()
                score = score + model(torch.randn(128, 32)).mean()
            model.train()
            return result, score

        return model, optimizer, step

    outcomes = kit.compare(make, steps=6)
    for name in ("roomy", "planned"):
        assert outcomes[name].report.iterations == 6
        assert [step.planned for step in outcomes[name].steps] == [False, False, True, True, True, True]


def test_evaluation_with_gradients_on(kit: Any) -> None:
    # Forgetting `no_grad` costs memory, not correctness; training is still planned.
    def make() -> Any:
        model, optimizer, train = kit.training(kit.chain())

        def step(i: int) -> object:
            result = train(i)
            if i % 2:
                model.eval()
                score = model(torch.randn(128, 32)).mean()
                model.train()
                result = result, score.detach()
                del score
            return result

        return model, optimizer, step

    outcomes = kit.compare(make, steps=10, moves=False)
    assert outcomes["planned"].report.iterations == 10
    assert outcomes["roomy"].planned


def test_two_alternating_batch_sizes_are_both_planned(kit: Any) -> None:
    def make() -> Any:
        return kit.training(kit.chain(), inputs=lambda i: torch.randn((128, 96)[i % 2], 32))

    outcomes = kit.compare(make, steps=8)
    for name in ("roomy", "planned"):
        # The optimizer's state is born in the first step, which teaches nothing; then each size is learnt once.
        assert [step.planned for step in outcomes[name].steps] == [False] * 3 + [True] * 5
        assert outcomes[name].report.events == ()


def test_a_smaller_last_batch(kit: Any) -> None:
    sizes = (128, 128, 128, 40, 128, 128, 128, 40, 128, 128)

    def make() -> Any:
        return kit.training(kit.chain(), inputs=lambda i: torch.randn(sizes[i], 32))

    outcomes = kit.compare(make, steps=len(sizes))
    planned = [step.planned for step in outcomes["planned"].steps]
    assert planned == [False, False, True, False, True, True, True, True, True, True]


def test_training_and_evaluation_mode_are_different_iterations(kit: Any) -> None:
    def make() -> Any:
        def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
            for layer in m.layers:
                x = nn.functional.dropout(torch.tanh(layer(x)), 0.2, m.training)
            return x

        model = kit.Built(forward, layers=nn.ModuleList(nn.Linear(32, 32) for _ in range(6)))
        _, optimizer, train = kit.training(model)

        def step(i: int) -> object:
            model.train(i % 2 == 0)
            return train(i)

        return model, optimizer, step

    outcomes = kit.compare(make, steps=8)
    assert [step.planned for step in outcomes["planned"].steps] == [False] * 3 + [True] * 5


@pytest.mark.parametrize("policy", ["keep", "evict_all", "planned"])
def test_a_model_that_chooses_its_way_by_chance(kit: Any, policy: str) -> None:
    # Same inputs, other operations: the plan does not fit, again and again.
    def make() -> Any:
        def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
            ways = torch.randint(0, 2, (len(m.layers),)).tolist()
            for way, layer in zip(ways, m.layers, strict=True):
                x = torch.tanh(layer(x)) if way else torch.sigmoid(layer(x)).exp()[:, :32] * x
            return x

        return kit.training(kit.Built(forward, layers=nn.ModuleList(nn.Linear(32, 32) for _ in range(6))))

    plain = kit.run_plain(make, 14)
    outcome = kit.run(make, policy=policy, steps=14)
    outcome.assert_same_bits(plain)
    assert outcome.report.iterations == 14
    if policy != "keep":
        assert any("differ" in event for event in outcome.report.events)


def test_sizes_that_depend_on_the_data(kit: Any) -> None:
    def make() -> Any:
        def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
            for layer in m.layers:
                x = torch.tanh(layer(x))
                rows = (x[:, 0] > 0).nonzero().squeeze(1)  # as experts choose their tokens
                x = x.index_add(0, rows, torch.exp(x[rows] * x[rows]))
            return x

        return kit.training(kit.Built(forward, layers=nn.ModuleList(nn.Linear(32, 32) for _ in range(4))))

    plain = kit.run_plain(make, 10)
    for policy in ("evict_all", "planned"):
        outcome = kit.run(make, policy=policy, steps=10)
        outcome.assert_same_bits(plain)
        assert outcome.report.written_nbytes > 0


def test_strict_plan_says_so_instead(kit: Any) -> None:
    def make() -> Any:
        def forward(m: Any, x: torch.Tensor, extra: Any = None) -> torch.Tensor:
            for layer in m.layers:
                x = torch.tanh(layer(x))
            return torch.exp(x) if extra else x

        return kit.training(kit.Built(forward, layers=nn.ModuleList(nn.Linear(32, 32) for _ in range(4))))

    torch.manual_seed(0)
    model, optimizer, step = make()
    config = teraio.Config(min_nbytes=kit.MIN_NBYTES, strict_plan=True)
    with teraio.offload(model, optimizer, budget="1GiB", policy="evict_all", config=config) as session:
        for i in range(4):
            step(i)
        forward = model.function
        model.function = lambda m, x: torch.exp(forward(m, x))
        with pytest.raises(teraio.PlanMismatchError, match="nothing is lost"):
            step(4)
        model.function = forward
        optimizer.zero_grad()
        assert kit.settle(session) == (0, 0)
        for i in range(3):
            step(i)
