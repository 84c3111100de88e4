"""Losses, gradients, weights, optimizer state and random numbers are those of the plain run, bit for bit.

Covers models, layers, types and ways of using autograd, under several policies and a budget below the plain peak.
Geometry of views is ``test_saved_views``'s matter, changes in place ``test_inplace``'s, faults ``test_faults``'s.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

# --- layers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["keep", "evict_all", "planned"])
def test_each_policy_by_name(kit: Any, policy: str) -> None:
    kit.compare(lambda: kit.training(kit.chain()), policies=(policy,), steps=7)


def test_two_threads(kit: Any) -> None:
    torch.set_num_threads(2)
    kit.compare(lambda: kit.training(kit.chain(width=64), (1024, 64)))


@pytest.mark.parametrize("policy", ["evict_all", "planned"])
def test_without_torchs_private_use_counts(kit: Any, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Then who else holds a storage shows only when ours is let go: more is written than needed, nothing is wrong.
    make = lambda: kit.training(kit.chain())  # noqa: E731
    plain = kit.run_plain(make, 5)
    budget = kit.tight_budget(kit.run(make, policy="evict_all"), share=0.5)
    monkeypatch.setattr("teraio.runtime.engine._use_count", None)
    outcome = kit.run(make, policy=policy, budget=budget)
    outcome.assert_same_bits(plain)
    assert outcome.report.written_nbytes > 0
    assert outcome.report.read_nbytes > 0


def test_dropout_and_the_random_state_after_it(kit: Any) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in m.layers:
            x = F.dropout(torch.tanh(layer(x)), 0.5, m.training)
        return x

    layers = lambda: nn.ModuleList(nn.Linear(32, 32) for _ in range(6))  # noqa: E731
    outcomes = kit.compare(lambda: kit.training(kit.Built(forward, layers=layers())))
    assert outcomes["planned"].report.written_nbytes > 0  # and the generator is part of every fingerprint


def test_batch_norm(kit: Any) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(m.layers, m.norms, strict=True):
            x = torch.relu(norm(layer(x)))
        return x

    def make() -> Any:
        layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))
        return kit.training(kit.Built(forward, layers=layers, norms=nn.ModuleList(nn.BatchNorm1d(32) for _ in layers)))

    kit.compare(make)


def test_lstm(kit: Any) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(m.lstm(torch.tanh(m.first(x)))[0])

    def make() -> Any:
        lstm = nn.LSTM(32, 32, num_layers=2, batch_first=True)
        return kit.training(kit.Built(forward, first=nn.Linear(32, 32), lstm=lstm), (8, 16, 32))

    kit.compare(make, share=0.6, budget_holds=False)  # the workspace that it saves is unknown to its meta kernel


def test_attention_with_an_expanded_mask(kit: Any) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(32, 32).tril().bool().expand(4, 2, 32, 32)
        for qkv, out in zip(m.qkv, m.out, strict=True):
            q, k, v = (t.reshape(4, 32, 2, 16).transpose(1, 2) for t in qkv(x).chunk(3, dim=-1))
            a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.1)
            b = torch.softmax((q @ k.transpose(-1, -2)).masked_fill(~mask, float("-inf")), -1) @ v
            x = x + torch.tanh(out((a + b).transpose(1, 2).reshape(4, 32, 32)))
        return x

    def make() -> Any:
        qkv = nn.ModuleList(nn.Linear(32, 96) for _ in range(3))
        return kit.training(kit.Built(forward, qkv=qkv, out=nn.ModuleList(nn.Linear(32, 32) for _ in qkv)), (4, 32, 32))

    kit.compare(make)


def test_transformer_encoder_layers(kit: Any) -> None:
    def make() -> Any:
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        return kit.training(model, (4, 32, 32), torch.optim.AdamW(model.parameters(), lr=1e-3))

    kit.compare(make)


# --- weights ----------------------------------------------------------------------------------------------------------


def test_tied_and_frozen_weights_never_travel(kit: Any) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = x
        for layer in m.layers:
            h = torch.tanh(layer(h)) + torch.tanh(F.linear(h, m.frozen))
        h = torch.tanh(h @ m.tied.weight)  # the same weight as it is and, through Linear, transposed
        return m.tied(h @ m.frozen.t())

    def make() -> Any:
        layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        tied = nn.Linear(32, 32)
        layers[1].weight = layers[0].weight
        frozen = nn.Parameter(torch.randn(32, 32), requires_grad=False)
        return kit.training(kit.Built(forward, layers=layers, tied=tied, frozen=frozen))

    outcomes = kit.compare(make)
    outcome = outcomes["roomy"]
    assert outcome.report.skipped["weight"] > 0
    trace = outcome.session.trace
    packed = {trace.storages[event.storage].kind.name for event in trace.events if event.storage >= 0}
    assert packed <= {"ACTIVATION", "INPUT"}


def test_every_form_of_a_weight_stays(kit: Any) -> None:
    # Only weights are saved here, beside what is too small to leave.
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(F.linear(x, m.weight), m.weight.t())
        x = x @ m.weight.detach() + F.linear(x, m.weight.view(4, 16, 64)[1:3].reshape(32, 64)) @ m.weight[:32]
        return x @ m.buffer.t()

    def make() -> Any:
        model = kit.Built(forward, weight=nn.Parameter(torch.randn(64, 64) / 8))
        model.register_buffer("buffer", torch.randn(64, 64))
        return kit.training(model, inputs=lambda i: torch.randn(4, 64, requires_grad=True))

    outcomes = kit.compare(make, moves=False)
    report = outcomes["roomy"].report
    assert report.written_nbytes == 0
    assert report.skipped["weight"] >= 5 * 6 * 64 * 64 * 4


def test_layer_norm_and_convolution_weights(kit: Any) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(m.convs, m.norms, strict=True):
            x = torch.tanh(norm(conv(x)))
        return x

    def make() -> Any:
        convs = nn.ModuleList(nn.Conv1d(16, 16, 5, padding=2) for _ in range(4))
        return kit.training(
            kit.Built(forward, convs=convs, norms=nn.ModuleList(nn.LayerNorm(64) for _ in convs)), (4, 16, 64)
        )

    kit.compare(make)


def test_autocast(kit: Any) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for layer in m.layers:
                x = torch.tanh(layer(x))
            return torch.softmax(x, -1) * x

    layers = lambda: nn.ModuleList(nn.Linear(64, 64) for _ in range(5))  # noqa: E731
    kit.compare(lambda: kit.training(kit.Built(forward, layers=layers()), (128, 64)))


# --- types ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_floating_types(kit: Any, dtype: torch.dtype) -> None:
    def make() -> Any:
        model = kit.chain(width=64).to(dtype)
        return kit.training(model, inputs=lambda i: torch.randn(128, 64).to(dtype))

    kit.compare(make)


def test_boolean_masks(kit: Any) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in m.layers:
            h = layer(x)
            mask = h > 0.1
            x = torch.where(mask, torch.sin(h), x) + h.masked_fill(mask.logical_not(), 0.5)
        return x

    layers = lambda: nn.ModuleList(nn.Linear(32, 32) for _ in range(4))  # noqa: E731
    outcomes = kit.compare(lambda: kit.training(kit.Built(forward, layers=layers()), (256, 32)))
    trace = outcomes["roomy"].session.trace
    assert "bool" in {event.dtype for event in trace.events if event.storage >= 0}


def test_complex_with_conjugate_and_negative_views(kit: Any) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in m.layers:
            z = torch.fft.fft(torch.tanh(layer(x)))
            product = z.conj() * torch.exp(z / 32)  # saves a conjugate view
            negative = z.conj().imag  # a negative view
            x = torch.tanh(product.real) + torch.sin(negative * negative)
        return x

    layers = lambda: nn.ModuleList(nn.Linear(32, 32) for _ in range(4))  # noqa: E731
    outcomes = kit.compare(lambda: kit.training(kit.Built(forward, layers=layers())))
    assert outcomes["roomy"].report.skipped["conjugate or negative view"] > 0


def test_sparse_embedding_gradients(kit: Any) -> None:
    def forward(m: Any, indices: torch.Tensor) -> torch.Tensor:
        x = m.embedding(indices).flatten(0, 1)
        for layer in m.layers:
            x = torch.tanh(layer(x))
        return x

    def make() -> Any:
        model = kit.Built(
            forward,
            embedding=nn.Embedding(100, 32, sparse=True),
            layers=nn.ModuleList(nn.Linear(32, 32) for _ in range(5)),
        )
        optimizers = [
            torch.optim.SparseAdam(model.embedding.parameters()),
            torch.optim.SGD(model.layers.parameters(), 0.1),
        ]

        def step(i: int) -> object:
            loss = model(torch.randint(0, 100, (8, 16))).square().mean()
            loss.backward()
            gradients = [p.grad for p in model.parameters()]
            assert gradients[0].is_sparse
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach(), gradients

        return model, optimizers, step

    outcomes = kit.compare(make)
    assert any("SparseAdam" in event for event in outcomes["planned"].report.events)


def test_saved_sparse_tensors_stay_and_are_counted(kit: Any) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        matrix = torch.eye(128).to_sparse()
        for layer in m.layers:
            x = torch.tanh(torch.sparse.mm(matrix, layer(x)))
        return x

    layers = lambda: nn.ModuleList(nn.Linear(32, 32) for _ in range(4))  # noqa: E731
    outcomes = kit.compare(lambda: kit.training(kit.Built(forward, layers=layers())))
    assert outcomes["planned"].report.skipped["not strided"] > 0


class _Pair(torch.Tensor):
    """A tensor made of two, as quantised and distributed tensors are."""

    a: torch.Tensor
    b: torch.Tensor

    @staticmethod
    def __new__(cls, a: torch.Tensor, b: torch.Tensor) -> _Pair:
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.a, self.b = a, b

    def __tensor_flatten__(self) -> Any:
        return ["a", "b"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def part(name: str, value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(part(name, item) for item in value)
            return getattr(value, name) if isinstance(value, _Pair) else value

        results = [func(*part(n, args), **{k: part(n, v) for k, v in (kwargs or {}).items()}) for n in ("a", "b")]
        return _Pair(*results) if isinstance(results[0], torch.Tensor) else results[0]


def test_subclasses_stay_and_are_counted(kit: Any) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = m.first(x)
        pair = _Wrap.apply(torch.tanh(x))
        return _Unwrap.apply(torch.exp(pair) * pair)

    outcomes = kit.compare(lambda: kit.training(kit.Built(forward, first=nn.Linear(32, 32))), moves=False)
    assert outcomes["planned"].report.skipped["tensor subclass"] > 0
    assert outcomes["planned"].report.written_nbytes > 0


class _Wrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _Pair(x.clone(), x * 2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.a + grad.b * 2 if isinstance(grad, _Pair) else grad


class _Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pair: _Pair) -> torch.Tensor:
        return pair.a + pair.b

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return _Pair(grad.clone(), grad.clone())


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=["jagged", "strided"])
def test_nested_tensors_stay_and_are_counted(kit: Any, layout: torch.layout) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        nested = torch.nested.nested_tensor([x[:40], x[40:100], x[100:]], layout=layout)
        h = nested.clone().detach().requires_grad_()
        return torch.nested.to_padded_tensor(torch.relu(m.first(h)) * 2, 0.0)

    outcomes = kit.compare(lambda: kit.training(kit.Built(forward, first=nn.Linear(32, 32))), moves=False)
    reason = "tensor subclass" if layout is torch.jagged else "not strided"
    assert outcomes["planned"].report.skipped[reason] > 0


# --- autograd ---------------------------------------------------------------------------------------------------------


class _SavesAndKeeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.exp(-x.square())
        ctx.save_for_backward(x, y, x * 3)  # an input, an intermediate and something else
        ctx.kept = torch.cos(x)  # out of sight of the hooks
        return y * ctx.kept

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x, y, tripled = ctx.saved_tensors
        return grad * (-2 * x * y * ctx.kept - y * torch.sin(tripled / 3))


def test_custom_function_with_saved_tensors_and_attributes(kit: Any) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in m.layers:
            x = _SavesAndKeeps.apply(layer(x))
        return x

    layers = lambda: nn.ModuleList(nn.Linear(32, 32) for _ in range(4))  # noqa: E731
    kit.compare(lambda: kit.training(kit.Built(forward, layers=layers())))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(kit: Any, use_reentrant: bool) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(m.layers[0](x))
        for layer in m.layers[1:]:
            block = lambda h, layer=layer: F.dropout(torch.tanh(layer(torch.tanh(layer(h)))), 0.1)  # noqa: E731
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        return x

    layers = lambda: nn.ModuleList(nn.Linear(32, 32) for _ in range(8))  # noqa: E731
    kit.compare(lambda: kit.training(kit.Built(forward, layers=layers())), share=0.5)


def test_hooks_of_the_program_inside(kit: Any) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(m.layers):
            if i % 2:
                with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
                    x = torch.tanh(layer(x))
            else:
                x = torch.tanh(layer(x))
        return x

    layers = lambda: nn.ModuleList(nn.Linear(32, 32) for _ in range(8))  # noqa: E731
    kit.compare(lambda: kit.training(kit.Built(forward, layers=layers())), share=0.5)


class _Counts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_of_the_program_inside(kit: Any) -> None:
    # It is entered while the session's own mode may be on, and left after that one came or went.
    def make() -> Any:
        model, optimizer, _ = kit.training(kit.chain())

        def step(i: int) -> object:
            with _Counts() as counts:
                loss = model(torch.randn(128, 32)).square().mean()
            loss.backward()
            with _Counts() as others:
                optimizer.step()
            optimizer.zero_grad()
            # What the session does on its own account shows too: count only that something did.
            return loss.detach(), counts.num > 0, others.num > 0

        return model, optimizer, step

    kit.compare(make)


def test_gradient_of_an_input_and_hooks_on_tensors(kit: Any) -> None:
    def make() -> Any:
        model, optimizer, _ = kit.training(kit.chain())
        seen: list[torch.Tensor] = []

        def step(i: int) -> object:
            seen.clear()
            x = torch.randn(128, 32, requires_grad=True)
            out = model(x)
            out.register_hook(lambda grad: grad * 2)
            out.register_hook(seen.append)
            out.retain_grad()
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            return x.grad, out.grad, list(seen)

        return model, optimizer, step

    kit.compare(make)
