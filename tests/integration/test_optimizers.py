"""The optimizer step in chunks: same bits, same state, same calls of everything that watches a step.

Covers torch's optimizers, parameter groups, closures, schedulers, hooks, and the gradient scaler, in a session with the
smallest chunks. What is left whole is said.
"""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import teraio

ONE_BY_ONE = {"optimizer_chunk_nbytes": 1}
"""A chunk is whole parameters: with this, one."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd-nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adam-for-loop": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False, fused=False),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, maximize=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw-amsgrad-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2, decoupled_weight_decay=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
}


def _chunked(outcome: Any, kit: Any) -> int:
    """Events of the last recorded iteration that say that a chunk begins."""
    return sum(event.kind.name == "OPTIMIZER_CHUNK" for event in outcome.session.trace.events)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_has_the_same_bits(kit: Any, name: str) -> None:
    def make() -> Any:
        model = kit.chain(4)
        return kit.training(model, optimizer=OPTIMIZERS[name](model.parameters()))

    plain = kit.run_plain(make, 5)
    outcome = kit.run(make, config=ONE_BY_ONE)
    outcome.assert_same_bits(plain)
    assert outcome.report.iterations == 5
    assert not any("left whole" in event for event in outcome.report.events)
    assert _chunked(outcome, kit) == 8


def test_larger_chunks(kit: Any) -> None:
    def make() -> Any:
        model = kit.chain(6)
        return kit.training(model, optimizer=torch.optim.AdamW(model.parameters()))

    plain = kit.run_plain(make, 5)
    for chunk_nbytes, expected in ((4096, 12), (4096 + 128, 6), (3 * 4096 + 2 * 128, 3), (1 << 20, 1)):
        outcome = kit.run(make, config={"optimizer_chunk_nbytes": chunk_nbytes})
        outcome.assert_same_bits(plain)
        assert _chunked(outcome, kit) == expected


def test_two_groups_with_different_rates(kit: Any) -> None:
    def make() -> Any:
        model = kit.chain(4)
        groups = [
            {"params": list(model.layers[:2].parameters()), "lr": 1e-2},
            {"params": [], "lr": 1.0},
            {"params": list(model.layers[2:].parameters()), "lr": 1e-3, "weight_decay": 0.1},
        ]
        return kit.training(model, optimizer=torch.optim.AdamW(groups))

    plain = kit.run_plain(make, 5)
    outcome = kit.run(make, config=ONE_BY_ONE)
    outcome.assert_same_bits(plain)
    assert _chunked(outcome, kit) == 8


def test_parameters_without_gradients(kit: Any) -> None:
    def make() -> Any:
        model = kit.Built(lambda m, x: torch.tanh(m.used(x)), used=nn.Linear(32, 32), unused=nn.Linear(32, 32))
        model.used.bias.requires_grad_(False)
        return kit.training(model, optimizer=torch.optim.Adam(model.parameters()))

    plain = kit.run_plain(make, 4)
    kit.run(make, config=ONE_BY_ONE, steps=4).assert_same_bits(plain)


def test_a_closure(kit: Any) -> None:
    def make() -> Any:
        model = kit.chain(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        calls = []

        def step(i: int) -> object:
            batch = torch.randn(128, 32)

            def closure() -> torch.Tensor:
                calls.append(torch.is_grad_enabled())
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                return loss

            loss = optimizer.step(closure)
            return loss.detach(), list(calls)

        return model, optimizer, step

    plain = kit.run_plain(make, 5)
    outcome = kit.run(make, config=ONE_BY_ONE)
    outcome.assert_same_bits(plain)
    assert outcome.report.iterations == 5


def test_lbfgs_is_left_whole(kit: Any) -> None:
    def make() -> Any:
        model = kit.chain(3)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

        def step(i: int) -> object:
            batch = torch.randn(128, 32)

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                return loss

            return optimizer.step(closure).detach()

        return model, optimizer, step

    plain = kit.run_plain(make, 4)
    outcome = kit.run(make, steps=4)
    outcome.assert_same_bits(plain)
    assert any("LBFGS" in event and "left whole" in event for event in outcome.report.events)


def test_a_step_of_ones_own_is_left_whole(kit: Any) -> None:
    class Mine(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]]).norm()
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad / norm, alpha=group["lr"])

    def make() -> Any:
        model = kit.chain(3)
        return kit.training(model, optimizer=Mine(model.parameters(), lr=0.1))

    plain = kit.run_plain(make, 4)
    outcome = kit.run(make, steps=4, config=ONE_BY_ONE)
    outcome.assert_same_bits(plain)
    assert outcome.report.iterations == 4
    assert any("Mine" in event and "left whole" in event for event in outcome.report.events)


# --- what watches a step ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [True, False], ids=["created before entering", "created inside"])
@pytest.mark.parametrize("kind", ["StepLR", "OneCycleLR", "LambdaLR", "SequentialLR"])
def test_schedulers(kit: Any, kind: str, before: bool) -> None:
    def scheduler_of(optimizer: torch.optim.Optimizer) -> Any:
        schedule = torch.optim.lr_scheduler
        if kind == "StepLR":
            return schedule.StepLR(optimizer, 2, 0.5)
        if kind == "OneCycleLR":
            return schedule.OneCycleLR(optimizer, 0.1, total_steps=20)
        if kind == "LambdaLR":
            return schedule.LambdaLR(optimizer, lambda n: 1 / (n + 1))
        warmup = schedule.LinearLR(optimizer, 0.1, total_iters=2)
        return schedule.SequentialLR(optimizer, [warmup, schedule.ExponentialLR(optimizer, 0.9)], [2])

    def make() -> Any:
        model = kit.chain(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedulers = [scheduler_of(optimizer)] if before else []

        def step(i: int) -> object:
            if not schedulers:
                schedulers.append(scheduler_of(optimizer))
            loss = model(torch.randn(128, 32)).square().mean()
            loss.backward()
            optimizer.step()
            schedulers[0].step()
            optimizer.zero_grad()
            return loss.detach(), schedulers[0].get_last_lr(), optimizer._opt_called  # type: ignore[attr-defined]

        return model, optimizer, step

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = kit.run_plain(make, 5)
        torch.manual_seed(0)
        model, optimizer, step = make()
        config = teraio.Config(min_nbytes=kit.MIN_NBYTES, **ONE_BY_ONE)
        log = []
        with teraio.offload(model, optimizer, budget="1GiB", config=config) as session:
            log += [[kit.fingerprint(step(i)), kit.state_fingerprint([model], [optimizer])] for i in range(3)]
        assert session.report().iterations == 3
        # The scheduler goes on after the block, and so does stepping in chunks of nothing of ours.
        log += [[kit.fingerprint(step(i)), kit.state_fingerprint([model], [optimizer])] for i in range(3, 5)]
        assert log == plain.log
        with teraio.offload(model, optimizer, budget="1GiB", config=config) as session:
            step(5)
        assert session.report().iterations == 1


def test_a_scheduler_made_inside_keeps_no_session_alive(kit: Any) -> None:
    model, optimizer, step = kit.training(kit.chain(3))
    config = teraio.Config(min_nbytes=kit.MIN_NBYTES)
    with teraio.offload(model, optimizer, budget="1GiB", config=config, policy="evict_all") as session:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        step(0)
        scheduler.step()
        loss = model(torch.randn(128, 32)).square().mean()
        engine = weakref.ref(session._engine)
    del session
    loss.backward()
    del loss
    gc.collect()
    assert engine() is None
    optimizer.step()
    scheduler.step()


def test_step_hooks_see_one_step_of_all_groups(kit: Any) -> None:
    def make() -> Any:
        model = kit.chain(4)
        halves = [{"params": list(model.layers[:2].parameters())}, {"params": list(model.layers[2:].parameters())}]
        optimizer = torch.optim.AdamW(halves, lr=1e-2)
        calls: list[object] = []

        def note(name: str) -> Callable[..., None]:
            def hook(opt: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
                assert opt is optimizer
                calls.append((name, [len(group["params"]) for group in opt.param_groups], len(args), len(kwargs)))

            return hook

        optimizer.register_step_pre_hook(note("pre"))
        optimizer.register_step_post_hook(note("post"))

        def step(i: int) -> object:
            calls.clear()
            handles = [
                register_optimizer_step_pre_hook(note("global pre")),
                register_optimizer_step_post_hook(note("global post")),
            ]
            loss = model(torch.randn(128, 32)).square().mean()
            loss.backward()
            optimizer.step()
            for handle in handles:
                handle.remove()
            optimizer.zero_grad()
            return loss.detach(), list(calls)

        return model, optimizer, step

    plain = kit.run_plain(make, 5)
    assert len(plain.log[0][0][1]) == 4
    kit.run(make, config=ONE_BY_ONE).assert_same_bits(plain)


def test_a_pre_hook_may_replace_the_closure(kit: Any) -> None:
    def make() -> Any:
        model = kit.chain(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        used = []

        def replace(opt: Any, args: Any, kwargs: Any) -> Any:
            return (*args[:1], lambda: used.append(1) or torch.tensor(7.0)), {}

        optimizer.register_step_pre_hook(replace)

        def step(i: int) -> object:
            model(torch.randn(128, 32)).square().mean().backward()
            result = optimizer.step()
            optimizer.zero_grad()
            return result, len(used)

        return model, optimizer, step

    plain = kit.run_plain(make, 4)
    kit.run(make, steps=4, config=ONE_BY_ONE).assert_same_bits(plain)


@pytest.mark.parametrize("fused", [False, True])
def test_gradient_scaler_that_skips_a_step(kit: Any, fused: bool) -> None:
    # A skipped step is an iteration too: its gradients are cleared.
    def make() -> Any:
        model = kit.chain(4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)

        def step(i: int) -> object:
            batch = torch.randn(128, 32)
            loss = model(batch).square().mean()
            if i in (0, 3, 5):
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss.detach(), scaler.get_scale()

        return model, optimizer, step

    plain = kit.run_plain(make, 9)
    outcome = kit.run(make, steps=9, config=ONE_BY_ONE)
    outcome.assert_same_bits(plain)
    if not fused:  # a fused optimizer is stepped, and skips by itself
        # The last iteration ends at its own step; each skipped one when the next begins.
        assert outcome.report.iterations == 9


def test_gradients_cleared_unstepped_end_an_iteration(kit: Any) -> None:
    def make() -> Any:
        model, optimizer, _ = kit.training(kit.chain())

        def step(i: int) -> object:
            loss = model(torch.randn(128, 32)).square().mean()
            loss.backward()
            if i % 3 != 2:
                optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return model, optimizer, step

    outcomes = kit.compare(make, steps=10)
    assert outcomes["planned"].report.iterations == 10


def test_state_dict_round_trip_inside(kit: Any) -> None:
    def make() -> Any:
        model, optimizer, plain_step = kit.training(kit.chain(4))

        def step(i: int) -> object:
            result = plain_step(i)
            if i == 2:
                saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
                plain_step(100)
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            return result

        return model, optimizer, step

    plain = kit.run_plain(make, 6)
    kit.run(make, steps=6, config=ONE_BY_ONE).assert_same_bits(plain)


def test_a_copy_of_the_optimizer_steps_its_own_parameters(kit: Any) -> None:
    model, optimizer, step = kit.training(kit.chain(3))
    config = teraio.Config(min_nbytes=kit.MIN_NBYTES, **ONE_BY_ONE)
    with teraio.offload(model, optimizer, budget="1GiB", config=config):
        step(0)
        twins_optimizer = copy.deepcopy(optimizer)
        twins = twins_optimizer.param_groups[0]["params"]
        before = [p.detach().clone() for p in model.parameters()]
        for p in twins:
            p.grad = torch.ones_like(p)
        twins_optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(before, twins, strict=True))


def test_a_parameter_group_added_inside(kit: Any) -> None:
    def make() -> Any:
        model = kit.chain(4)
        optimizer = torch.optim.Adam(model.layers[:2].parameters(), lr=1e-2)

        def step(i: int) -> object:
            if i == 3:
                optimizer.add_param_group({"params": list(model.layers[2:].parameters()), "lr": 1e-3})
            loss = model(torch.randn(128, 32)).square().mean()
            loss.backward()
            optimizer.step()
            model.zero_grad()
            return loss.detach()

        return model, optimizer, step

    plain = kit.run_plain(make, 7)
    kit.run(make, steps=7, config=ONE_BY_ONE).assert_same_bits(plain)


def test_add_and_step_of_a_second_optimizer_not_given(kit: Any) -> None:
    # Only the given optimizer ends iterations; another one steps as it always did.
    def make() -> Any:
        model = kit.chain(4)
        given = torch.optim.Adam(model.layers[:2].parameters())
        other = torch.optim.Adam(model.layers[2:].parameters())

        def step(i: int) -> object:
            loss = model(torch.randn(128, 32)).square().mean()
            loss.backward()
            other.step()
            given.step()
            model.zero_grad()
            return loss.detach(), kit.fingerprint(other.state_dict())

        return model, given, step

    outcomes = kit.compare(make)
    assert outcomes["planned"].report.iterations == 5
