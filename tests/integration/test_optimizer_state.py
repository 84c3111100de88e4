"""Optimizer state on the SSD between steps: same bits, and the tensors stay usable.

Covers moving of state with and without chunks, in every optimizer that is stepped in chunks. Chunking alone is
``test_optimizers``'s matter.
"""

from __future__ import annotations

import copy
import errno
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import teraio
from io_backend.testing import Fault, FaultStore, fail

BOTH = ("activation", "optimizer")

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw-for-loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "adamw-amsgrad-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
}


def _make(kit: Any, name: str = "adamw", depth: int = 5) -> Callable[[], Any]:
    def make() -> Any:
        model = kit.chain(depth, width=64)
        return kit.training(model, (32, 64), OPTIMIZERS[name](model.parameters()))

    return make


@pytest.mark.parametrize("chunk_nbytes", [1, 40000, 1 << 20], ids=["one by one", "two or three", "whole"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_has_the_same_bits(kit: Any, name: str, chunk_nbytes: int) -> None:
    make = _make(kit, name)
    plain = kit.run_plain(make, 5)
    outcome = kit.run(make, kinds=BOTH, config={"optimizer_chunk_nbytes": chunk_nbytes}, policy="evict_all")
    outcome.assert_same_bits(plain)  # which looks at the state after every step, while it is away
    if name != "adafactor":  # whose state is too small to leave
        assert outcome.report.written_nbytes > 4 * 5 * 64 * 64 * 4
        assert outcome.report.read_nbytes > 4 * 5 * 64 * 64 * 4


def test_a_budget_below_the_state(kit: Any) -> None:
    # Weights, gradients and both moments take four times the weights: two moments are away between the steps.
    make = _make(kit, depth=24)
    plain = kit.run_plain(make, 6)
    weights = sum(p.numel() * 4 for p in make()[0].parameters())
    keep = kit.run(make, policy="keep", steps=6)
    budget = 3 * weights
    assert keep.report.unlimited_peak_nbytes > 4 * weights
    outcome = kit.run(make, budget=budget, kinds="auto", steps=6, config={"optimizer_chunk_nbytes": 1})
    outcome.assert_same_bits(plain)
    assert outcome.report.peak_nbytes <= budget
    assert any("optimizer state leaves" in event for event in outcome.report.events)


def test_state_can_be_read_copied_and_changed_while_it_is_away(kit: Any) -> None:
    def make() -> Any:
        model, optimizer, plain_step = _make(kit)()

        def step(i: int) -> object:
            result = plain_step(i)
            weight = model.layers[0].weight
            if i == 1:
                optimizer.state[weight]["exp_avg"].mul_(0.5)  # with a version counter
            if i == 2:
                optimizer.state[weight]["exp_avg_sq"].data.mul_(2.0)  # without
            if i == 3:
                twin = copy.deepcopy(optimizer)
                return result, twin.state_dict()["state"]
            if i == 4:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            return result

        return model, optimizer, step

    plain = kit.run_plain(make, 7)
    kit.run(make, kinds=BOTH, steps=7, config={"optimizer_chunk_nbytes": 1}).assert_same_bits(plain)


def test_clearing_the_state_frees_its_space(kit: Any) -> None:
    model, optimizer, step = _make(kit)()
    config = teraio.Config(min_nbytes=kit.MIN_NBYTES)
    with teraio.offload(model, optimizer, budget="1GiB", kinds=BOTH, config=config) as session:
        for i in range(3):
            step(i)
        kit.settle(session)
        assert session._engine.store.statistics().live_nbytes > 0
        optimizer.state.clear()
        for i in range(2):
            step(i)
        kit.settle(session)
        states = 2 * 5
        assert session._engine.store.statistics().live_nbytes <= states * 64 * 64 * 4


@pytest.mark.parametrize("fits", [True, False])
def test_state_after_the_block(kit: Any, fits: bool) -> None:
    make = _make(kit, depth=24)
    plain = kit.run_plain(make, 6)
    weights = sum(p.numel() * 4 for p in make()[0].parameters())
    torch.manual_seed(0)
    model, optimizer, step = make()
    budget = 1 << 30 if fits else 3 * weights
    config = teraio.Config(min_nbytes=kit.MIN_NBYTES, optimizer_chunk_nbytes=1)
    with teraio.offload(model, optimizer, budget=budget, kinds=BOTH, config=config):
        log = [[kit.fingerprint(step(i)), kit.state_fingerprint([model], [optimizer])] for i in range(4)]
    log += [[kit.fingerprint(step(i)), kit.state_fingerprint([model], [optimizer])] for i in range(4, 6)]
    assert log == plain.log


@pytest.mark.parametrize("operation", ["write", "allocate"])
def test_a_failed_write_of_state(kit: Any, faults: FaultStore, operation: Any) -> None:
    make = _make(kit)
    plain = kit.run_plain(make, 5)
    faults.add(Fault(operation, fail(errno.ENOSPC)))
    outcome = kit.run(make, kinds=BOTH, config={"optimizer_chunk_nbytes": 1})
    outcome.assert_same_bits(plain)
    assert any("failed" in event for event in outcome.report.events)


def test_an_exception_in_the_step_leaves_the_state_usable(kit: Any) -> None:
    def make() -> Any:
        model, optimizer, _ = _make(kit)()
        fail_now = [False]

        def watch(*_: object) -> None:
            if fail_now[0]:
                raise ValueError("mine")

        optimizer.register_step_pre_hook(watch)

        def step(i: int) -> object:
            loss = model(torch.randn(32, 64)).square().mean()
            loss.backward()
            fail_now[0] = i == 2
            try:
                optimizer.step()
            except ValueError:
                fail_now[0] = False
                optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return model, optimizer, step

    plain = kit.run_plain(make, 5)
    kit.run(make, kinds=BOTH, config={"optimizer_chunk_nbytes": 1}).assert_same_bits(plain)


def test_scaled_gradients_and_clipping(kit: Any) -> None:
    def make() -> Any:
        model, optimizer, _ = _make(kit)()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)

        def step(i: int) -> object:
            loss = model(torch.randn(32, 64)).square().mean() * (math.inf if i == 3 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss.detach(), scaler.get_scale()

        return model, optimizer, step

    plain = kit.run_plain(make, 6)
    kit.run(make, kinds=BOTH, steps=6, config={"optimizer_chunk_nbytes": 1}).assert_same_bits(plain)
