"""Births, uses and deaths of storages whose right answer is known by hand."""

from typing import Any

import pytest
import torch

from lifetime import Recorder, StorageKind
from tests.lifetime.reading import Finish, lives, names, uses

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
