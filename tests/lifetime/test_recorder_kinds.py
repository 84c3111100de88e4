"""Kinds and names of storages whose right answer is known by hand."""

from typing import Any

import pytest
import torch

from lifetime import EventKind, Phase, Recorder, StorageKind, Trace
from tests.lifetime.reading import Finish, Step


def by_name(trace: Trace) -> dict[str, Any]:
    return {s.name: s for s in trace.storages if s.name}


def packs(trace: Trace) -> list[int]:
    """The storages saved, in order."""
    return [event.storage for event in trace.events if event.kind is EventKind.PACK]


def mlp() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def uses_of(trace: Trace) -> tuple[list[int], list[int]]:
    return trace.use_columns.op.tolist(), trace.use_columns.storage.tolist()


# --- kinds and names -------------------------------------------------------------------------------------------------


def test_kinds_and_names_of_a_training_step(finish: Finish, step: Step) -> None:
    model = mlp()
    model.register_buffer("scale", torch.ones(3))
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.ones(5, 4)
    with Recorder(model=model, optimizer=optimizer) as recorder:
        step(model, batch)
        optimizer.step()
        optimizer.zero_grad()
    trace = finish(recorder)
    found = by_name(trace)
    parameters = {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert {n for n, s in found.items() if s.kind is StorageKind.PARAMETER} == parameters | {"scale"}
    assert {n for n, s in found.items() if s.kind is StorageKind.GRADIENT} == {f"{p}.grad" for p in parameters}
    state = {f"{p}.{key}" for p in parameters for key in ("step", "exp_avg", "exp_avg_sq")}
    assert {n for n, s in found.items() if s.kind is StorageKind.OPTIMIZER} == state
    assert found["0.weight"].birth_op == -1
    assert found["0.weight"].death_op == trace.num_ops
    assert found["0.weight"].shape == (8, 4)
    assert found["0.weight"].dtype == "float32"
    phases = [op.phase for op in trace.ops]
    assert phases[found["0.weight.exp_avg"].birth_op] is Phase.OPTIMIZER
    assert phases[found["0.weight.grad"].birth_op] is Phase.BACKWARD
    assert found["0.weight.grad"].death_op < trace.num_ops, "zero_grad has dropped it"
    inputs = [s for s in trace.storages if s.kind is StorageKind.INPUT]
    assert [(s.nbytes, s.birth_op) for s in inputs] == [(80, -1)]
    # addmm's output feeds relu and is not saved; relu's output is, twice; the last output is, for the square.
    activations = [s for s in trace.storages if s.kind is StorageKind.ACTIVATION]
    assert [s.shape for s in activations] == [(5, 8), (5, 2)]
    assert all(s.birth_op < s.death_op < trace.num_ops for s in activations)


def test_second_iteration_finds_optimizer_state_in_place(finish: Finish, step: Step) -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        with Recorder(model=model, optimizer=optimizer) as recorder:
            step(model, torch.ones(5, 4))
            optimizer.step()
            optimizer.zero_grad()
    trace = finish(recorder)
    state = [s for s in trace.storages if s.kind is StorageKind.OPTIMIZER]
    assert len(state) == 12
    assert {(s.birth_op, s.death_op) for s in state} == {(-1, trace.num_ops)}


def test_gradients_left_from_before_count_from_the_start(finish: Finish, step: Step) -> None:
    model = mlp()
    step(model, torch.ones(5, 4))
    with Recorder(model=model) as recorder:
        step(model, torch.ones(5, 4))
    found = by_name(finish(recorder))
    assert {s.birth_op for name, s in found.items() if name.endswith(".grad")} == {-1}


def test_gradients_are_named_although_they_are_dropped_without_an_optimizer(finish: Finish, step: Step) -> None:
    model = mlp()
    with Recorder(model=model) as recorder:
        step(model, torch.ones(5, 4))
        for parameter in model.parameters():
            parameter.grad = None
    assert {n for n, s in by_name(finish(recorder)).items() if s.kind is StorageKind.GRADIENT} == {
        "0.weight.grad",
        "0.bias.grad",
        "2.weight.grad",
        "2.bias.grad",
    }


def test_optimizer_alone_names_its_parameters(finish: Finish) -> None:
    used, unused = (torch.nn.Parameter(torch.ones(n)) for n in (2, 3))
    optimizer = torch.optim.SGD([used, unused], lr=0.1, momentum=0.9)
    with Recorder(optimizer=optimizer) as recorder:
        used.square().sum().backward()
        optimizer.step()
    found = by_name(finish(recorder))
    assert set(found) == {"group0.0", "group0.1", "group0.0.grad", "group0.0.momentum_buffer"}
    assert found["group0.1"].kind is StorageKind.PARAMETER


def test_optimizer_met_on_the_way_is_learnt(finish: Finish) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    with Recorder() as recorder:
        parameter.square().sum().backward()
        optimizer.step()
    found = by_name(finish(recorder))
    assert {n: s.kind for n, s in found.items()} == {
        "group0.0": StorageKind.PARAMETER,
        "group0.0.grad": StorageKind.GRADIENT,
        "group0.0.momentum_buffer": StorageKind.OPTIMIZER,
    }


def test_nested_optimizer_state_is_named(finish: Finish) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.LBFGS([parameter], max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (parameter**4).sum()
        loss.backward()
        return loss

    with Recorder(optimizer=optimizer) as recorder:
        optimizer.step(closure)
    found = by_name(finish(recorder))
    assert found["group0.0.old_dirs.0"].kind is StorageKind.OPTIMIZER


def test_tied_weight_is_one_storage_under_its_first_name(finish: Finish) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(6, 4)
            self.head = torch.nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.head(self.embed(tokens))
            return output

    model = Tied()
    tokens = torch.tensor([0, 3, 5])
    with Recorder(model=model) as recorder:
        model(tokens).sum().backward()
    trace = finish(recorder)
    weights = [s for s in trace.storages if s.kind is StorageKind.PARAMETER]
    assert [(s.name, s.nbytes) for s in weights] == [("embed.weight", 96)]
    assert [s.nbytes for s in trace.storages if s.kind is StorageKind.INPUT] == [24]
    used_in = {trace.ops[op].module for op, s in zip(*uses_of(trace), strict=True) if s == weights[0].storage}
    assert {"embed", "head"} <= used_in


def test_parameters_on_one_storage_are_one_storage(finish: Finish) -> None:
    class Halves(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            flat = torch.ones(8)
            self.first = torch.nn.Parameter(flat[:4])
            self.second = torch.nn.Parameter(flat[4:])

        def forward(self) -> torch.Tensor:
            return (self.first * self.second).sum()

    model = Halves()
    with Recorder(model=model) as recorder:
        model().backward()
    found = by_name(finish(recorder))
    assert found["first"].nbytes == 32
    assert "second" not in found
    assert found["first.grad"].nbytes == found["second.grad"].nbytes == 16


def test_input_saved_before_any_operation_saw_it_is_an_input(finish: Finish) -> None:
    model = torch.nn.Conv1d(1, 1, 2)
    batch = torch.ones(1, 1, 4)
    with Recorder(model=model) as recorder:
        model(batch).sum().backward()
    trace = finish(recorder)
    assert packs(trace)[0] == next(s.storage for s in trace.storages if s.kind is StorageKind.INPUT)
    assert [(s.nbytes, s.birth_op) for s in trace.storages if s.kind is StorageKind.INPUT] == [(16, -1)]


def test_weight_saved_before_any_operation_saw_it_is_a_parameter(finish: Finish) -> None:
    weight = torch.nn.Parameter(torch.ones(1, 1, 2))
    batch = torch.ones(1, 1, 4)
    with Recorder() as recorder:
        batch * 1
        torch.conv1d(batch, weight).sum().backward()
    trace = finish(recorder)
    assert [(s.nbytes, s.birth_op) for s in trace.storages if s.kind is StorageKind.PARAMETER] == [(8, -1)]


def test_storage_made_out_of_sight_and_saved_is_born_when_saved(finish: Finish) -> None:
    class Unseen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            with recorder.pause():  # as a compiled kernel would
                hidden = x * 2
            ctx.save_for_backward(hidden)
            return x + 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (hidden,) = ctx.saved_tensors
            return grad * hidden

    x = torch.ones(4, requires_grad=True)
    with Recorder() as recorder:
        y = Unseen.apply(x)  # op 0: x + 1
        y.sum().backward()
    trace = finish(recorder)
    (saved,) = packs(trace)
    assert (trace.storages[saved].kind, trace.storages[saved].birth_op) == (StorageKind.ACTIVATION, 0)


def test_modules_are_named(finish: Finish, step: Step) -> None:
    model, batch = mlp(), torch.ones(5, 4)
    with Recorder(model=model) as recorder:
        step(model, batch)
    trace = finish(recorder)
    forward = [(op.name, op.module) for op in trace.ops if op.phase is Phase.FORWARD]
    assert forward[:5] == [
        ("aten.t.default", "0"),
        ("aten.addmm.default", "0"),
        ("aten.relu.default", "1"),
        ("aten.t.default", "2"),
        ("aten.addmm.default", "2"),
    ]
    assert {op.module for op in trace.ops if op.phase is Phase.BACKWARD} == {""}


def test_modules_go_by_class_without_a_model(finish: Finish) -> None:
    with Recorder() as recorder:
        mlp()(torch.ones(5, 4))
    modules = [op.module for op in finish(recorder).ops if op.name in ("aten.addmm.default", "aten.relu.default")]
    assert modules == ["Linear", "ReLU", "Linear"]


def test_module_that_raises_is_left(finish: Finish) -> None:
    class Failing(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("oh")

    model = torch.nn.ModuleDict({"bad": Failing(), "good": torch.nn.ReLU()})
    with Recorder(model=model) as recorder:
        with pytest.raises(KeyError):
            model["bad"](torch.ones(1))
        torch.ones(1)
        model["good"](torch.ones(1))
    assert [op.module for op in finish(recorder).ops] == ["", "", "", "good"]
