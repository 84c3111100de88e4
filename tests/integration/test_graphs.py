"""Graphs that are used twice, in part, late, together, or never: same bits as plain, and nothing is left of them.

Covers what decides how long saved tensors live. What they hold is ``test_bit_identity``'s matter, errors are
``test_interruptions``'s.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def _batch() -> torch.Tensor:
    return torch.randn(128, 32)


def test_backward_twice_with_retain_graph(kit: Any) -> None:
    def make() -> Any:
        model, optimizer, _ = kit.training(kit.chain())

        def step(i: int) -> object:
            loss = model(_batch()).square().mean()
            loss.backward(retain_graph=True)
            first = [p.grad.clone() for p in model.parameters()]
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            second = [p.grad.clone() for p in model.parameters()]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach(), first, second

        return model, optimizer, step

    outcomes = kit.compare(make, moves=False)  # everything is needed until the third pass: the floor is the peak
    for entry in outcomes["planned"].log:
        assert entry[0][1] == entry[0][2]
    assert outcomes["roomy"].report.written_nbytes > 0


def test_backward_twice_of_what_has_left(kit: Any) -> None:
    # The first pass frees nothing. Room for it is made by what was read back and is not needed for a while.
    def make() -> Any:
        model, optimizer, _ = kit.training(kit.chain(10))

        def step(i: int) -> object:
            loss = model(_batch()).square().mean()
            for _ in range(2):
                optimizer.zero_grad()
                loss.backward(retain_graph=True)
            optimizer.step()
            gradients = [p.grad for p in model.parameters()]
            optimizer.zero_grad()
            return loss.detach(), gradients

        return model, optimizer, step

    plain = kit.run_plain(make, 5)
    peak = kit.run(make, policy="keep").report.unlimited_peak_nbytes
    outcome = kit.run(make, budget=peak - 64 * kit.KIB)
    outcome.assert_same_bits(plain)
    assert outcome.report.peak_nbytes <= outcome.report.budget_nbytes
    assert outcome.report.written_nbytes > 0
    assert outcome.report.read_nbytes > 0


def test_gradient_of_a_gradient(kit: Any) -> None:
    def make() -> Any:
        model, optimizer, _ = kit.training(kit.chain(8))

        def step(i: int) -> object:
            x = _batch().requires_grad_()
            out = model(x)
            (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
            penalty = (gradient.norm(dim=1) - 1).square().mean()
            (out.mean() + penalty).backward()
            optimizer.step()
            gradients = [p.grad for p in model.parameters()]
            optimizer.zero_grad()
            return penalty.detach(), gradient.detach(), gradients

        return model, optimizer, step

    kit.compare(make, share=0.5)


def test_partial_backward(kit: Any) -> None:
    def make() -> Any:
        model, optimizer, _ = kit.training(kit.chain())

        def step(i: int) -> object:
            out = model(_batch())
            some = list(model.layers[3:].parameters())
            partial = torch.autograd.grad(out.square().mean(), some, retain_graph=True)
            out.sin().mean().backward(inputs=list(model.layers[:4].parameters()))
            optimizer.step()
            optimizer.zero_grad()
            return partial

        return model, optimizer, step

    kit.compare(make)


def test_several_forwards_before_one_backward(kit: Any) -> None:
    def make() -> Any:
        model, optimizer, _ = kit.training(kit.chain(4))

        def step(i: int) -> object:
            losses = [model(_batch()).square().mean() for _ in range(3)]
            sum(losses).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
            return [loss.detach() for loss in losses]

        return model, optimizer, step

    kit.compare(make)


def test_two_graphs_in_flight_in_either_order(kit: Any) -> None:
    def make() -> Any:
        model, optimizer, _ = kit.training(kit.chain(4))

        def step(i: int) -> object:
            a, b = model(_batch()).square().mean(), model(_batch()).sin().mean()
            a.backward()  # the older one first
            b.backward()
            optimizer.step()
            optimizer.zero_grad()
            return a.detach(), b.detach()

        return model, optimizer, step

    kit.compare(make)


def test_a_graph_that_lives_through_the_next_iteration(kit: Any) -> None:
    def make() -> Any:
        model, optimizer, _ = kit.training(kit.chain(4))
        side = nn.Parameter(torch.ones(32))
        carried: list[torch.Tensor] = []

        def step(i: int) -> object:
            # Saved in one iteration, used in the next: it hangs on no weight that is stepped in between.
            held = (torch.tanh(_batch() * side).exp() * side).square().mean()
            loss = model(_batch()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            carried.append(held)
            if len(carried) < 2 and i < 6:
                return loss.detach()
            side.grad = None
            carried.pop(0).backward()
            if i == 6:
                carried.clear()
            return loss.detach(), side.grad

        return model, optimizer, step

    kit.compare(make, steps=7, moves=False)


def test_accumulation_over_three_micro_batches(kit: Any) -> None:
    def make() -> Any:
        model, optimizer, _ = kit.training(kit.chain())

        def step(i: int) -> object:
            losses = []
            for _ in range(3):
                loss = model(_batch()).square().mean() / 3
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            gradients = [p.grad for p in model.parameters()]
            optimizer.zero_grad()
            return losses, gradients

        return model, optimizer, step

    outcomes = kit.compare(make)
    assert outcomes["planned"].report.iterations == 5


def test_the_number_of_micro_batches_changes(kit: Any) -> None:
    def make() -> Any:
        model, optimizer, _ = kit.training(kit.chain())

        def step(i: int) -> object:
            for _ in range((2, 2, 2, 2, 3, 1, 2, 2, 2)[i]):
                (model(_batch()).square().mean() / 3).backward()
            optimizer.step()
            gradients = [p.grad for p in model.parameters()]
            optimizer.zero_grad()
            return gradients

        return model, optimizer, step

    outcomes = kit.compare(make, steps=9, budget_holds=False)  # not in the iterations that differ
    assert any("differed" in event for event in outcomes["planned"].report.events)


def test_two_models_and_two_optimizers(kit: Any) -> None:
    def make() -> Any:
        generator, critic = kit.chain(4), kit.chain(4)
        g = torch.optim.Adam(generator.parameters(), lr=1e-3)
        d = torch.optim.RMSprop(critic.parameters(), lr=1e-3)

        def step(i: int) -> object:
            fake = generator(_batch())
            loss_d = (critic(fake.detach()) - critic(_batch())).square().mean()
            loss_d.backward()
            d.step()
            d.zero_grad()
            loss_g = critic(fake).square().mean()
            loss_g.backward()
            g.step()
            gradients = [p.grad for p in generator.parameters()]
            g.zero_grad()
            d.zero_grad()
            return loss_d.detach(), loss_g.detach(), gradients

        return [generator, critic], [g, d], step

    outcomes = kit.compare(make)
    assert outcomes["planned"].report.iterations == 5


def test_without_a_model(kit: Any) -> None:
    # Iterations then run from one optimizer step to the next.
    def make() -> Any:
        weights = [nn.Parameter(torch.randn(32, 32) / 6) for _ in range(6)]
        optimizer = torch.optim.SGD(weights, lr=0.05, momentum=0.9)

        def step(i: int) -> object:
            x = _batch()
            for weight in weights:
                x = torch.tanh(x @ weight.t())
            loss = x.square().mean()
            del x
            loss.backward()
            optimizer.step()
            gradients = [p.grad for p in weights]
            optimizer.zero_grad()
            return loss.detach(), gradients, [w.detach() for w in weights]

        return None, optimizer, step

    outcomes = kit.compare(make)
    assert outcomes["planned"].report.iterations == 5
    assert outcomes["planned"].report.skipped["weight"] > 0


def test_without_model_and_optimizer(kit: Any) -> None:
    def make() -> Any:
        _, _, step = kit.training(kit.chain())
        return None, None, step

    outcomes = kit.compare(make)
    assert outcomes["planned"].report.iterations == 5


def test_tensors_saved_before_the_root_module_runs(kit: Any) -> None:
    def make() -> Any:
        stem = nn.Linear(32, 32)
        model, _, _ = kit.training(kit.chain(4))
        optimizer = torch.optim.SGD([*stem.parameters(), *model.parameters()], lr=0.1, momentum=0.9)

        def step(i: int) -> object:
            loss = model(torch.tanh(torch.tanh(stem(_batch())).exp())).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach(), [p.detach() for p in stem.parameters()]

        return model, optimizer, step

    kit.compare(make, steps=6, budget_holds=False)  # not in the first iteration, which begins too late


def test_a_dropped_loss_frees_its_space(kit: Any) -> None:
    def drop(session: Any, i: int) -> None:
        if i in (1, 3):
            model(_batch()).square().mean()  # dropped at once
            assert kit.settle(session) == (0, 0)
            loss = model(_batch()).square().mean()
            records, live_nbytes = kit.settle(session)
            assert records > 0
            assert live_nbytes > 0
            del loss
            assert kit.settle(session) == (0, 0)

    model, optimizer, step = kit.training(kit.chain())
    outcome = kit.run(lambda: (model, optimizer, step), use_session=drop, policy="evict_all")
    assert outcome.report.written_nbytes > 0


def test_a_loss_dropped_in_a_reference_cycle(kit: Any) -> None:
    model, optimizer, step = kit.training(kit.chain())

    def drop(session: Any, i: int) -> None:
        cycle: list[object] = [model(_batch()).square().mean()]
        cycle.append(cycle)

    kit.run(lambda: (model, optimizer, step), use_session=drop)  # `run` sees that nothing is left
