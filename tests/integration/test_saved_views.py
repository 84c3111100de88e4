"""Whatever view of a storage autograd saves, it comes back with its exact geometry; the storage travels once.

Covers slices, transposes, expanded, overlapping and empty tensors, memory formats, and sharing. Values in general are
the matter of ``test_bit_identity``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import teraio


def _slices(h: torch.Tensor) -> torch.Tensor:
    inner = h[1:] * torch.exp(h[:-1])
    return torch.cat([inner, h[:1]]) * h[::2].repeat(2, 1)


def _transposes(h: torch.Tensor) -> torch.Tensor:
    return torch.tanh(h @ torch.tanh(h.t() @ h)) + torch.tanh(h.t()).t() * h


def _expanded(h: torch.Tensor) -> torch.Tensor:
    wide = h.unsqueeze(0).expand(3, -1, -1)
    return torch.exp(-(wide * wide.sin())).sum(0) * h[:, :1].expand(-1, 32)


def _overlapping(h: torch.Tensor) -> torch.Tensor:
    windows = h.reshape(-1).as_strided((120, 48), (32, 1), 5)
    inner = torch.sigmoid(windows * windows.cos())
    return torch.cat([inner[:, 8:40], h[:8]]) * h


def _columns(h: torch.Tensor) -> torch.Tensor:
    inner = torch.exp(h[:, 1:]) * h[:, :-1] * h[:, 3:4]
    return torch.cat([inner, h[:, :1]], dim=1)


def _last_holder_is_a_view(h: torch.Tensor) -> torch.Tensor:
    part = torch.sigmoid(h)[:, :16]
    return torch.exp(part * part).repeat(1, 2)


def _empty(h: torch.Tensor) -> torch.Tensor:
    nothing = h[:0]
    return torch.cat([torch.exp(nothing) * nothing, torch.exp(-h) * h])


def _split(h: torch.Tensor) -> torch.Tensor:
    a, b = h.chunk(2, dim=1)
    return torch.cat([a * torch.exp(b), b * torch.unbind(torch.exp(a), 1)[0].unsqueeze(1)], dim=1)


def _permuted(h: torch.Tensor) -> torch.Tensor:
    heads = h.reshape(8, 16, 4, 8).permute(2, 0, 3, 1)
    return torch.tanh(heads * heads.transpose(0, 1).transpose(0, 1).cos()).permute(1, 3, 0, 2).reshape(128, 32)


CASES = [
    _slices, _transposes, _expanded, _overlapping, _columns, _last_holder_is_a_view, _empty, _split, _permuted,
]  # fmt: skip


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__.strip("_"))
def test_views_come_back_exactly(kit: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in m.layers:
            x = function(torch.tanh(layer(x)))
        return x

    def make() -> Any:
        return kit.training(kit.Built(forward, layers=nn.ModuleList(nn.Linear(32, 32) for _ in range(4))))

    kit.compare(make)


def test_channels_last_convolution(kit: Any) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(m.a(x.to(memory_format=torch.channels_last)))
        assert h.is_contiguous(memory_format=torch.channels_last)
        return m.b(torch.tanh(h))

    def make() -> Any:
        model = kit.Built(forward, a=nn.Conv2d(3, 8, 3, padding=1), b=nn.Conv2d(8, 4, 3))
        return kit.training(model.to(memory_format=torch.channels_last), (8, 3, 12, 12))

    kit.compare(make, share=0.5)


def test_a_storage_saved_through_several_views_is_written_once(kit: Any) -> None:
    saved: set[int] = set()

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(m.first(x))  # one storage of 16 KiB, saved by tanh, mul, exp's inputs and the product
        saved.clear()
        return (h.t() @ h).sum() + (h[1:] * h[:-1]).sum() + (h[::2] * h[1::2]).sum() + (h * h).sum()

    outcome = kit.run(lambda: kit.training(kit.Built(forward, first=nn.Linear(32, 32))), policy="evict_all")
    trace = outcome.session.trace
    packed = {event.storage for event in trace.events if event.kind == 0 and event.storage >= 0}
    distinct = sum(trace.storages[i].nbytes for i in packed)
    num_packs = sum(event.kind == 0 and event.storage >= 0 for event in trace.events)
    assert num_packs > 2 * len(packed)  # else nothing was shared
    assert outcome.report.written_nbytes > 0
    for step in outcome.steps:  # a step may write less: what is used at once is not written
        assert step.written_nbytes <= distinct
        assert step.read_nbytes <= distinct


def test_memory_that_numpy_owns_stays(kit: Any) -> None:
    def gradients(budget: str | None) -> tuple[list[float], teraio.Report | None]:
        torch.manual_seed(0)
        layers = [layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.Tanh())]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch, random = np.empty((2048, 128), np.float32), np.random.default_rng(0)
        found: list[float] = []
        config = teraio.Config(allow_unsafe_spill=True, min_nbytes=4096)
        session = teraio.offload(model, optimizer, budget=budget, config=config) if budget else None
        with session or contextlib.nullcontext():
            for _ in range(4):
                batch[:] = random.standard_normal(batch.shape, dtype=np.float32)
                loss = model(torch.from_numpy(batch)).square().mean()
                batch[:] = 0.5  # as a loader does that fills the next batch: backward must see it
                loss.backward()
                found.append(float(layers[0].weight.grad.sum()))  # type: ignore[union-attr, operator, arg-type]
                optimizer.step()
                optimizer.zero_grad()
        return found, session.report() if session else None

    found, report = gradients("7MiB")
    assert found == gradients(None)[0]
    assert report is not None
    assert report.written_nbytes > 0
    assert report.skipped["memory of another library"] > 0
