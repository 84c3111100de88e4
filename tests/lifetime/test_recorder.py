"""Births, uses and deaths of storages whose right answer is known by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lifetime import EventKind, Phase, Recorder, StorageKind, Trace

Finish = Callable[[Recorder], Trace]
Step = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]


def lives(trace: Trace) -> list[tuple[int, int, int]]:
    """(nbytes, birth, death) of each storage."""
    return [(s.nbytes, s.birth_op, s.death_op) for s in trace.storages]


def uses(trace: Trace, op: int) -> dict[int, bool]:
    """The storages that operation `op` touched, each with whether it was written."""
    columns = trace.use_columns
    rows = zip(columns.op.tolist(), columns.storage.tolist(), columns.written.tolist(), strict=True)
    return {storage: bool(written) for row, storage, written in rows if row == op}


def names(trace: Trace) -> list[str]:
    return [op.name for op in trace.ops]


def by_name(trace: Trace) -> dict[str, Any]:
    return {s.name: s for s in trace.storages if s.name}


def packs(trace: Trace) -> list[int]:
    """The storages saved, in order."""
    return [event.storage for event in trace.events if event.kind is EventKind.PACK]


# --- lifetimes -------------------------------------------------------------------------------------------------------


def test_chain(finish: Finish) -> None:
    x = torch.ones(4)
    with Recorder() as recorder:
        a = x + 1  # op 0
        b = a * 2  # op 1
        del a
        c = b.sum()  # op 2
    trace = finish(recorder)
    assert names(trace) == ["aten.add.Tensor", "aten.mul.Tensor", "aten.sum.default"]
    assert lives(trace) == [(16, -1, 3), (16, 0, 2), (16, 1, 3), (4, 2, 3)]
    assert [uses(trace, i) for i in range(3)] == [{0: False, 1: True}, {1: False, 2: True}, {2: False, 3: True}]
    assert trace.memory_curve().tolist() == [32, 48, 36]
    assert trace.peak_nbytes == recorder.peak_nbytes == 48
    assert recorder.live_nbytes == 36
    assert [op.nbytes for op in trace.ops] == [32, 32, 20]
    assert trace.active_fraction().tolist() == [1.0, 32 / 48, 20 / 36]
    assert c.item() == 16


def test_temporary_of_an_expression_lives_through_its_last_use(finish: Finish) -> None:
    x = torch.ones(4)
    with Recorder() as recorder:
        y = (x + 1) * 2 + 3
    assert lives(finish(recorder)) == [(16, -1, 3), (16, 0, 2), (16, 1, 3), (16, 2, 3)]
    del y


def test_fork(finish: Finish) -> None:
    x = torch.ones(4)
    with Recorder() as recorder:
        a = x + 1  # op 0: both branches read it
        b = a * 2  # op 1
        c = a * 3  # op 2
        del a
        d = b + c  # op 3
        del b, c
        e = d * 1  # op 4
    trace = finish(recorder)
    assert lives(trace) == [(16, -1, 5), (16, 0, 3), (16, 1, 4), (16, 2, 4), (16, 3, 5), (16, 4, 5)]
    assert trace.memory_curve().tolist() == [32, 48, 64, 64, 48]
    del d, e


def test_in_place_operation_writes_and_makes_nothing(finish: Finish) -> None:
    x, y = torch.ones(4), torch.ones(4)
    with Recorder() as recorder:
        x.add_(y)
    trace = finish(recorder)
    assert lives(trace) == [(16, -1, 1), (16, -1, 1)]
    assert uses(trace, 0) == {0: True, 1: False}


def test_tensor_read_and_written_by_one_operation_counts_once(finish: Finish) -> None:
    x = torch.ones(4)
    with Recorder() as recorder:
        x.add_(x)
        x + x
    trace = finish(recorder)
    assert uses(trace, 0) == {0: True}
    assert uses(trace, 1) == {0: False, 1: True}
    assert trace.ops[0].nbytes == 16


def test_out_argument_is_written(finish: Finish) -> None:
    x, known = torch.ones(4), torch.ones(4)
    with Recorder() as recorder:
        known * 1  # op 0
        torch.add(x, x, out=known)  # op 1
    trace = finish(recorder)
    assert uses(trace, 1) == {2: False, 0: True}
    assert trace.storages[0].birth_op == -1


def test_out_argument_never_seen_before_is_born_there(finish: Finish) -> None:
    x, buffer = torch.ones(4), torch.ones(4)
    with Recorder() as recorder:
        x * 1  # op 0
        torch.add(x, x, out=buffer)  # op 1: compiled code calls operations so, on memory that nobody saw allocated
    trace = finish(recorder)
    assert lives(trace) == [(16, -1, 2), (16, 0, 1), (16, 1, 2)]


def test_view_keeps_the_storage_after_its_base(finish: Finish) -> None:
    x = torch.ones(4)
    with Recorder() as recorder:
        base = x + 1  # op 0
        view = base[:2]  # op 1: no storage of its own
        del base
        x * 1  # op 2
        y = view * 1  # op 3
        del view
        x * 1  # op 4
    trace = finish(recorder)
    assert names(trace)[1] == "aten.slice.Tensor"
    assert lives(trace) == [(16, -1, 5), (16, 0, 4), (16, 2, 3), (8, 3, 5), (16, 4, 5)]
    del y


def test_result_that_aliases_an_input_never_seen_before_is_that_input(finish: Finish) -> None:
    x, y = torch.ones(4), torch.ones(4)
    with Recorder() as recorder:
        x.view(2, 2)
        y.detach().add_(1)
    trace = finish(recorder)
    assert lives(trace) == [(16, -1, 3), (16, -1, 3)]
    assert [uses(trace, i) for i in range(3)] == [{0: False}, {1: False}, {1: True}]


def test_death_between_operations_and_death_at_the_end(finish: Finish) -> None:
    with Recorder() as recorder:
        a = torch.zeros(4)  # op 0
        b = torch.zeros(4)  # op 1
        del a
        c = torch.zeros(4)  # op 2
    assert lives(finish(recorder)) == [(16, 0, 2), (16, 1, 3), (16, 2, 3)]
    del b, c


def test_death_inside_an_operation_counts_for_it(finish: Finish) -> None:
    storage = torch.UntypedStorage(80)
    with Recorder() as recorder:
        a = torch.zeros(10)  # op 0
        a.set_(storage, 0, (20,), (1,))  # op 1: the old memory dies while it runs, the new one is first seen
        b = a * 1  # op 2
    trace = finish(recorder)
    assert [s for s in lives(trace) if s[0] == 40] == [(40, 0, 2)]
    assert trace.memory_curve().tolist() == [40, 120, 160]
    assert recorder.peak_nbytes == 160
    del b


def test_peak_includes_what_died_in_the_operation_that_made_something(finish: Finish) -> None:
    storage = torch.UntypedStorage(80)
    with Recorder() as recorder:
        a = torch.zeros(10)  # op 0
        a.set_(storage, 0, (20,), (1,))  # op 1
    assert finish(recorder).peak_nbytes == 120
    assert recorder.peak_nbytes == 120, "live at the end of the operation: 80; live during it: 120"
    assert recorder.live_nbytes == 80


def test_several_outputs_of_one_operation_count_together(finish: Finish) -> None:
    x = torch.ones(6, 4)
    with Recorder() as recorder:
        values, indices = torch.max(x, 1)
    trace = finish(recorder)
    assert lives(trace) == [(96, -1, 1), (24, 0, 1), (48, 0, 1)]
    assert trace.peak_nbytes == recorder.peak_nbytes == 96 + 24 + 48
    del values, indices


def test_address_of_a_dead_storage_does_not_name_the_next_one(finish: Finish) -> None:
    with Recorder() as recorder:
        for _ in range(50):
            torch.zeros(4)
    trace = finish(recorder)
    assert lives(trace) == [(16, i, i + 1) for i in range(50)]
    assert recorder.live_nbytes == 0
    assert recorder.peak_nbytes == 16


def test_assigning_data_ends_the_old_storage(finish: Finish) -> None:
    new = torch.zeros(2)
    with Recorder() as recorder:
        a = torch.zeros(4)  # op 0
        a.data = new
        b = a + 1  # op 1
    assert lives(finish(recorder)) == [(16, 0, 1), (8, -1, 2), (8, 1, 2)]
    del b


def test_operation_that_raises_is_recorded_with_what_it_read(finish: Finish) -> None:
    x, y = torch.ones(2, 3), torch.ones(2, 3)
    with Recorder() as recorder:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            torch.mm(x, y)
        z = x + y
    trace = finish(recorder)
    assert names(trace) == ["aten.mm.default", "aten.add.Tensor"]
    assert uses(trace, 0) == {0: False, 1: False}
    assert lives(trace) == [(24, -1, 2), (24, -1, 2), (24, 1, 2)]
    del z


def test_refused_operation_is_not_recorded(finish: Finish) -> None:
    def refuse(func: Any, args: Any, kwargs: Any) -> None:
        if "mul" in str(func):
            raise MemoryError("no room")

    x = torch.ones(4)
    recorder = Recorder()
    recorder.before_op = refuse
    with recorder:
        y = x + 1
        with pytest.raises(MemoryError, match="no room"):
            y * 2
    assert names(finish(recorder)) == ["aten.add.Tensor"]


def test_pause_hides_operations(finish: Finish) -> None:
    x = torch.ones(4)
    with Recorder() as recorder:
        with recorder.pause():
            with recorder.pause():
                hidden = x + 1
            hidden2 = hidden + 1
        y = hidden2 + 1
    trace = finish(recorder)
    assert names(trace) == ["aten.add.Tensor"]
    del y


def test_sparse_tensors_do_not_stop_it(finish: Finish) -> None:
    with Recorder() as recorder:
        dense = torch.eye(3)
        sparse = dense.to_sparse()
        total = (sparse * 2).to_dense().sum()
    trace = finish(recorder)
    assert total.item() == 6
    assert recorder.saved(sparse) == -1
    assert trace.num_ops >= 3


def test_storage_first_seen_as_an_input_is_older_than_the_iteration(finish: Finish) -> None:
    a, b = torch.ones(4), torch.ones(8)
    with Recorder() as recorder:
        a + 1
        b + 1
    trace = finish(recorder)
    assert [(s.birth_op, s.kind) for s in trace.storages if s.birth_op < 0] == [(-1, StorageKind.INPUT)] * 2
    assert trace.memory_curve().tolist() == [16 + 32 + 16, 16 + 32 + 32]


def test_tensor_made_from_numbers_is_born_in_the_iteration(finish: Finish) -> None:
    x = torch.ones(4)
    with Recorder() as recorder:
        x + 1  # op 0
        y = torch.tensor([1.0, 2.0])  # op 1
        y + 1  # op 2
    trace = finish(recorder)
    assert names(trace)[1] == "aten.lift_fresh.default"
    assert lives(trace)[2] == (8, 1, 3)


def test_nothing_recorded(finish: Finish) -> None:
    with Recorder() as recorder:
        pass
    trace = finish(recorder)
    assert (trace.num_ops, trace.num_storages, trace.num_events, trace.peak_nbytes) == (0, 0, 0, 0)
    assert trace.inactive_periods() == []


def test_trace_is_there_only_after_the_block() -> None:
    recorder = Recorder()
    with recorder, pytest.raises(RuntimeError, match="after the with block"):
        recorder.trace  # noqa: B018
    with pytest.raises(RuntimeError, match="records once"):
        recorder.start()
    assert recorder.stop() is recorder.trace


def test_nothing_is_counted_after_the_block() -> None:
    with Recorder() as recorder:
        a = torch.zeros(4)
    live = recorder.live_nbytes
    del a
    torch.zeros(4)
    assert (recorder.live_nbytes, recorder.num_ops) == (live, 1)


# --- sizes that change -----------------------------------------------------------------------------------------------


def test_out_grows_an_empty_tensor(finish: Finish) -> None:
    x = torch.ones(4)
    with Recorder() as recorder:
        out = torch.empty(0)  # op 0
        torch.add(x, 1, out=out)  # op 1
        assert recorder.live_nbytes == 16 + 16
    trace = finish(recorder)
    assert lives(trace) == [(16, 0, 2), (16, -1, 2)]
    assert uses(trace, 1) == {1: False, 0: True}
    assert trace.ops[1].nbytes == 32
    assert recorder.peak_nbytes == 32


def test_resize_grows_a_tensor_and_never_shrinks_its_storage(finish: Finish) -> None:
    with Recorder() as recorder:
        a = torch.zeros(4)
        a.resize_(10)
        assert recorder.live_nbytes == 40
        a.resize_(2)
        assert recorder.live_nbytes == 40
        del a
        assert recorder.live_nbytes == 0
    trace = finish(recorder)
    assert lives(trace) == [(40, 0, 3)]
    assert recorder.peak_nbytes == 40


def test_emptied_storage_dies_and_is_born_again_when_filled(finish: Finish) -> None:
    x = torch.ones(4)
    with Recorder() as recorder:
        a = x + 1  # op 0
        a.untyped_storage().resize_(0)
        assert recorder.live_nbytes == 16
        x * 1  # op 1
        a.untyped_storage().resize_(16)
        a.fill_(1)  # op 2
        assert recorder.live_nbytes == 32
        x * 1  # op 3
    trace = finish(recorder)
    assert lives(trace) == [(16, -1, 4), (16, 0, 1), (16, 1, 2), (16, 2, 4), (16, 3, 4)]
    assert trace.storages[3].kind is StorageKind.TEMPORARY


def test_storage_that_was_empty_from_the_start_is_born_when_filled(finish: Finish) -> None:
    a, x = torch.ones(4), torch.ones(4)
    a.untyped_storage().resize_(0)
    with Recorder() as recorder:
        x * 1  # op 0
        a.untyped_storage().resize_(16)
        a.fill_(1)  # op 1
    assert lives(finish(recorder))[-1] == (16, 1, 2)


def test_grown_storage_counts_what_was_added(finish: Finish) -> None:
    with Recorder() as recorder:
        a = torch.zeros(4)
        a.untyped_storage().resize_(24)
        assert recorder.live_nbytes == 24
    assert lives(finish(recorder)) == [(24, 0, 1)]


# --- kinds and names -------------------------------------------------------------------------------------------------


def mlp() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


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


def uses_of(trace: Trace) -> tuple[list[int], list[int]]:
    return trace.use_columns.op.tolist(), trace.use_columns.storage.tolist()


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
