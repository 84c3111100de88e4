"""Changes in place: what plain autograd refuses is refused, what it allows has the same bits.

Covers the check that autograd leaves out under hooks, for evicted and resident tensors, outputs, inputs and weights,
and writes through ``.data`` that no check sees. The message is torch's own, up to the name of the node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import teraio

REFUSED = "modified by an inplace operation"


def _output(h: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.exp(h)
    z = y.sum()
    y.mul_(2)
    return z


def _input_of_a_product(h: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    a, b = h * 1.5, h + 1
    z = (a * b).sum()
    a.add_(1)
    return z


def _through_a_view(h: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.sigmoid(h)
    z = y.sum()
    y[3:5].zero_()
    return z


def _of_a_view(h: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = h * 1.5
    z = torch.sigmoid(y[1:]).sum() + (y[:-1] * y[1:]).sum()
    y.zero_()
    return z


def _the_batch(h: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    z = (x @ w).sum()
    x.add_(1)
    return z


def _without_grad(h: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.exp(h)
    z = y.sum()
    with torch.no_grad():
        y.mul_(0.5)
    return z


def _detached(h: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.exp(h)
    z = y.sum()
    y.detach().mul_(0.5)
    return z


def _weight(h: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    z = torch.tanh(h @ w).sum()
    with torch.no_grad():
        w.add_(0.125)
    return z


def _transposed_weight(h: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    z = torch.tanh(F.linear(h, w)).sum()
    with torch.no_grad():
        w.t()[0].add_(0.125)
    return z


def _small(h: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.exp(h[0, :4])
    z = y.sum()
    y.mul_(2)
    return z


def _mask(h: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    mask = h > 0
    z = torch.where(mask, h.sin(), h).sum()
    mask.logical_not_()
    return z


def _conjugate(h: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    c = torch.complex(h, h)
    z = (c.conj() * torch.complex(h, -h)).abs().sum()
    c.mul_(2)
    return z


WRONG = [
    _output, _input_of_a_product, _through_a_view, _of_a_view, _the_batch, _without_grad, _detached, _weight,
    _transposed_weight, _small, _mask, _conjugate,
]  # fmt: skip


def _attempt(function: Callable[..., torch.Tensor], h: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> str:
    loss = function(h, x, w)
    try:
        loss.backward(retain_graph=True)
    except RuntimeError as error:
        return "refused" if REFUSED in str(error) else str(error)
    return "allowed"


@pytest.mark.parametrize("policy", ["keep", "evict_all", "planned"])
@pytest.mark.parametrize("function", WRONG, ids=lambda f: f.__name__.strip("_"))
def test_what_torch_refuses_is_refused(kit: Any, function: Callable[..., torch.Tensor], policy: str) -> None:
    def make() -> Any:
        model, optimizer, _ = kit.training(kit.chain(4))
        weight = nn.Parameter(torch.randn(32, 32) / 6)

        def step(i: int) -> object:
            x = torch.randn(128, 32)
            result = "trained"
            if i in (1, 4):  # while learning, and while planned
                result = _attempt(function, model(x), x, weight)
                assert result == "refused"
            else:
                model(x).square().mean().backward()
                optimizer.step()
            optimizer.zero_grad()
            weight.grad = None
            return result

        return model, optimizer, step

    plain = kit.run_plain(make, 7)
    kit.run(make, policy=policy, steps=7).assert_same_bits(plain)


def test_an_evicted_tensor_is_refused_too(kit: Any) -> None:
    # The bytes have left before the change: only the version counter can tell.
    model, optimizer, _ = kit.training(kit.chain(4))
    with teraio.offload(model, optimizer, budget="1GiB", config=teraio.Config(min_nbytes=4096)) as session:
        h = model(torch.randn(128, 32))
        y = torch.exp(h)
        loss = y.sum()
        view = y.detach().view(-1)[:0]  # shares the counter; `set_` takes its memory away
        del y, h
        with torch.no_grad():
            view.set_(torch.zeros(4).untyped_storage(), 0, (4,), (1,))
        for _ in range(2):
            kit.settle(session)
        engine = session._engine
        with engine.lock:
            for record in engine.all_records():
                engine.start_offload(record, release=True)
        kit.settle(session)
        away = sum(record.storage is None for record in engine.all_records())
        assert away > 0
        view.add_(1)
        with pytest.raises(RuntimeError, match=REFUSED):
            loss.backward()
        del loss, view


def _relu(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    return torch.relu_(layer(x))


def _add_before_saving(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    h = layer(x)
    h += 0.125
    h.mul_(1.5)
    return torch.tanh(h)


def _dropout(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    return F.dropout(layer(x), 0.3, inplace=True)


def _activation(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    return F.silu(F.leaky_relu(layer(x), 0.1, inplace=True).clone(), inplace=False).tanh_()


def _filled_by_parts(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    out = torch.empty(128, 32)
    out[:64] = layer(x[:64])
    out[64:] = torch.tanh(layer(x[64:]))
    return torch.sin(out)


def _parts_of_one_buffer(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    # What was saved of the buffer before is another part of the same storage, split off by `set_data`.
    h = torch.tanh(layer(x))
    a, b = h.detach()[:64], h.detach()[64:]
    return torch.cat([torch.exp(h[:64]) * a, torch.sigmoid(h[64:]) * b])


ALLOWED = [_relu, _add_before_saving, _dropout, _activation, _filled_by_parts, _parts_of_one_buffer]


@pytest.mark.parametrize("function", ALLOWED, ids=lambda f: f.__name__.strip("_"))
def test_what_torch_allows_has_the_same_bits(kit: Any, function: Callable[..., torch.Tensor]) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in m.layers:
            x = function(x, layer)
        return x

    layers = lambda: nn.ModuleList(nn.Linear(32, 32) for _ in range(6))  # noqa: E731
    kit.compare(lambda: kit.training(kit.Built(forward, layers=layers())), policies=("keep", "evict_all", "planned"))


def _data_write(kit: Any, *, keep_until_backward: bool) -> Callable[[], Any]:
    def make() -> Any:
        kept: list[torch.Tensor] = []

        def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
            for i, layer in enumerate(m.layers):
                x = torch.tanh(layer(x))
                if i == 1:
                    kept.append(x)
            return x

        model = kit.Built(forward, layers=nn.ModuleList(nn.Linear(32, 32) for _ in range(6)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

        def step(i: int) -> object:
            loss = model(torch.randn(128, 32)).square().mean()
            kept[0].data.mul_(0.5)  # no version counter sees it; backward uses the new values
            if not keep_until_backward:
                kept.clear()
            loss.backward()
            kept.clear()
            optimizer.step()
            gradients = [p.grad for p in model.parameters()]
            optimizer.zero_grad()
            return loss.detach(), gradients

        return model, optimizer, step

    return make


@pytest.mark.parametrize("keep_until_backward", [True, False])
def test_a_write_through_data_is_seen_by_backward(kit: Any, keep_until_backward: bool) -> None:
    make = _data_write(kit, keep_until_backward=keep_until_backward)
    kit.compare(make, policies=("keep", "evict_all", "planned"))


@pytest.mark.parametrize("keep_until_backward", [True, False])
def test_a_write_through_data_without_use_counts(
    kit: Any, keep_until_backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = _data_write(kit, keep_until_backward=keep_until_backward)
    plain = kit.run_plain(make, 5)
    peak = kit.run(make, policy="keep").report.unlimited_peak_nbytes
    monkeypatch.setattr("teraio.runtime.engine._use_count", None)
    for policy in ("evict_all", "planned"):
        kit.run(make, policy=policy, budget=peak - 32 * kit.KIB).assert_same_bits(plain)


class _ChangesWhatItSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        x.mul_(3)
        return grad * 2


@pytest.mark.parametrize("policy", ["keep", "evict_all", "planned"])
def test_a_change_in_backward_of_what_another_node_saved(kit: Any, policy: str) -> None:
    # The node that runs later needs the same storage: plain torch refuses, so must we, or keep its values.
    def make() -> Any:
        model, optimizer, _ = kit.training(kit.chain(4))

        def step(i: int) -> object:
            h = model(torch.randn(128, 32))
            y = torch.exp(h)
            try:
                _ChangesWhatItSaved.apply(y).sum().backward()
                result: object = "allowed"
            except RuntimeError as error:
                result = "refused" if REFUSED in str(error) else str(error)
            optimizer.step()
            optimizer.zero_grad()
            return result

        return model, optimizer, step

    plain = kit.run_plain(make, 5)
    assert "refused" in repr(plain.log[0])
    kit.run(make, policy=policy).assert_same_bits(plain)
