"""What autograd saves, and other devices, modes and tensors, as a recorder sees them."""

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lifetime import EventKind, Phase, Recorder, StorageKind, Trace
from tests.lifetime.reading import Finish, Step, lives, names, uses


def by_name(trace: Trace) -> dict[str, Any]:
    return {s.name: s for s in trace.storages if s.name}


def packs(trace: Trace) -> list[int]:
    """The storages saved, in order."""
    return [event.storage for event in trace.events if event.kind is EventKind.PACK]


def mlp() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


# --- autograd --------------------------------------------------------------------------------------------------------


def test_saved_tensors_of_a_chain(finish: Finish) -> None:
    x = torch.ones(4, requires_grad=True)
    with Recorder() as recorder:
        y = x.exp()  # op 0: saves its result
        z = y.sin()  # op 1: saves its input, which is the same storage
        z.sum().backward()
    trace = finish(recorder)
    assert packs(trace) == [1, 1]
    assert [e.op for e in trace.events if e.kind is EventKind.PACK] == [1, 1], "after exp has run, before sin runs"
    assert [(e.kind, e.storage, e.nbytes, e.dtype) for e in trace.events] == [
        (EventKind.PACK, 1, 16, "float32"),
        (EventKind.PACK, 1, 16, "float32"),
        (EventKind.UNPACK, 1, 16, "float32"),
        (EventKind.UNPACK, 1, 16, "float32"),
    ]
    assert trace.storages[1].kind is StorageKind.ACTIVATION
    assert trace.storages[2].kind is StorageKind.TEMPORARY


def test_unpack_tells_the_type_of_the_saved_tensor_not_of_the_storage(finish: Finish) -> None:
    x = torch.ones(4, requires_grad=True)
    bits = torch.arange(4, dtype=torch.int32)
    with Recorder() as recorder:
        bits + 1  # the storage is first seen as int32
        (x * bits.view(torch.float32)).sum().backward()
    trace = finish(recorder)
    assert [e.dtype for e in trace.events] == ["float32"] * 2


def test_activation_dies_with_the_node_that_used_it(finish: Finish) -> None:
    x = torch.ones(4, requires_grad=True)
    with Recorder() as recorder:
        y = x.exp()  # op 0
        loss = (y * y).sum()  # op 1, op 2
        del y
        loss.backward()  # op 3: ones_like; op 4: expand; then mul twice, add, and mul for exp
    trace = finish(recorder)
    names_ = names(trace)
    last_use = max(i for i in range(trace.num_ops) if 1 in uses(trace, i))
    assert names_[last_use] == "aten.mul.Tensor"
    assert trace.storages[1].death_op == last_use + 1


def test_checkpointed_activations_die_and_are_computed_again(finish: Finish) -> None:
    def block(a: torch.Tensor) -> torch.Tensor:
        return a.sin().exp()

    x = torch.ones(4, requires_grad=True)
    with Recorder() as recorder:
        y = checkpoint(block, x, use_reentrant=False)
        torch.zeros(1)
        y.sum().backward()
    trace = finish(recorder)
    sines = [i for i, op in enumerate(trace.ops) if op.name == "aten.sin.default"]
    assert [trace.ops[i].phase for i in sines] == [Phase.FORWARD, Phase.BACKWARD]
    born = {s.birth_op: s for s in trace.storages}
    assert names(trace)[born[sines[0]].death_op - 1] == "aten.exp.default", "the first sine does not wait for backward"
    assert born[sines[1]].death_op > sines[1]
    assert {e.micro_batch for e in trace.events} <= {0}


def test_rnn(finish: Finish, step: Step) -> None:
    model, batch = torch.nn.LSTM(3, 5, num_layers=2), torch.ones(7, 2, 3)
    with Recorder(model=model) as recorder:
        step(model, batch)
    trace = finish(recorder)
    weights = {n for n, s in by_name(trace).items() if s.kind is StorageKind.PARAMETER}
    assert weights == {name for name, _ in model.named_parameters()}
    assert packs(trace)
    activations = {s for s in packs(trace) if trace.storages[s].kind is StorageKind.ACTIVATION}
    assert all(trace.storages[s].death_op < trace.num_ops for s in activations)


@pytest.mark.parametrize("how", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_optimizer_operations_with_lists(finish: Finish, step: Step, how: dict[str, bool]) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), **how)
    for _ in range(2):
        with Recorder(model=model, optimizer=optimizer) as recorder:
            step(model, torch.ones(5, 4))
            optimizer.step()
    trace = finish(recorder)
    updates = [i for i, op in enumerate(trace.ops) if op.phase is Phase.OPTIMIZER]
    found = by_name(trace)
    touched: dict[int, bool] = {}
    for i in updates:
        for storage, written in uses(trace, i).items():
            touched[storage] = touched.get(storage, False) or written
    parameters = ("0.weight", "0.bias", "2.weight", "2.bias")
    for name in parameters:
        assert touched[found[name].storage], f"{name} is written"
        if "fused" not in how:  # whose schema says that it writes gradients, too (to unscale them)
            assert not touched[found[f"{name}.grad"].storage], f"{name}.grad is only read"
        assert touched[found[f"{name}.exp_avg"].storage]
    if "fused" in how:
        (fused,) = [i for i in updates if names(trace)[i].startswith("aten._fused_adamw_")]
        assert len(uses(trace, fused)) >= 5 * len(parameters) - 4
    elif how["foreach"]:
        assert any(names(trace)[i].startswith("aten._foreach_") for i in updates)


# --- other devices, modes and tensors --------------------------------------------------------------------------------


def test_device_restricts_what_is_counted(finish: Finish) -> None:
    x = torch.ones(4)
    elsewhere = torch.ones(6, device="meta")
    with Recorder(device="cpu") as recorder:
        y = x + 1
        z = elsewhere + 1
        torch.add(elsewhere, 1, out=torch.empty(0, device="meta"))
    trace = finish(recorder)
    assert recorder.live_nbytes == 32
    assert trace.peak_nbytes == 32
    del y, z


def test_fake_tensors_are_recorded_like_real_ones(finish: Finish, step: Step) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def record() -> Trace:
        model, batch = mlp(), torch.ones(5, 4)
        optimizer = torch.optim.Adam(model.parameters(), foreach=True)
        with Recorder(model=model, optimizer=optimizer) as recorder:
            step(model, batch)
            optimizer.step()
        return finish(recorder)

    real = record()
    with FakeTensorMode():
        fake = record()
    assert fake.peak_nbytes == real.peak_nbytes
    assert fake.signature == real.signature
    # Only the numbers differ: a number turned into a fake tensor has a real one before it.
    assert {n: s[1:] for n, s in by_name(fake).items()} == {n: s[1:] for n, s in by_name(real).items()}


class Pair(torch.Tensor):
    """A tensor made of two others."""

    first: torch.Tensor
    second: torch.Tensor

    @staticmethod
    def __new__(cls: type["Pair"], first: torch.Tensor, second: torch.Tensor) -> "Pair":
        pair = torch.Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype)  # type: ignore[attr-defined]
        pair.first, pair.second = first, second
        return pair  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["first", "second"], None

    @staticmethod
    def __tensor_unflatten__(parts: Any, *_: Any) -> "Pair":
        return Pair(parts["first"], parts["second"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def pick(name: str) -> Any:
            return func(*(getattr(a, name) if isinstance(a, Pair) else a for a in args), **(kwargs or {}))

        return Pair(pick("first"), pick("second"))


def test_wrapper_tensors_are_seen_by_their_parts(finish: Finish) -> None:
    pair = Pair(torch.ones(4), torch.ones(4))
    with Recorder() as recorder:
        double = pair * 2
    trace = finish(recorder)
    assert names(trace) == ["aten.mul.Tensor"] * 2
    assert lives(trace) == [(16, -1, 2), (16, 0, 2), (16, -1, 2), (16, 1, 2)]
    assert recorder.saved(double) == -1


def test_wrapper_parameters_are_named_by_their_parts(finish: Finish) -> None:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(Pair(torch.ones(4), torch.ones(4)), requires_grad=False)
    with Recorder(model=model) as recorder:
        model.weight * 2
    trace = finish(recorder)
    assert [(s.name, s.nbytes, s.birth_op) for s in trace.storages[:2]] == [("weight", 16, -1)] * 2
    assert trace.peak_nbytes == 64


def test_higher_order_operator(finish: Finish) -> None:
    x = torch.ones(4)
    with Recorder() as recorder:
        y = torch.ops.higher_order.cond(True, lambda a: a.sin(), lambda a: a.cos(), (x,))
    trace = finish(recorder)
    assert torch.equal(y[0] if isinstance(y, tuple) else y, x.sin())
    assert trace.num_ops >= 1
