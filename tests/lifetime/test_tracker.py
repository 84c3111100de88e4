"""Storages that a runtime moves: one logical life across the death of the memory and a new memory."""

from collections.abc import Callable

import pytest
import torch

from lifetime import Recorder, StorageKind, Trace
from lifetime.strings import StringTable
from lifetime.tracker import ALIVE, StorageTracker

Finish = Callable[[Recorder], Trace]


@pytest.fixture
def tracker() -> StorageTracker:
    return StorageTracker(StringTable())


def add(tracker: StorageTracker, tensor: torch.Tensor, birth_op: int = 0) -> int:
    storage = tensor.untyped_storage()
    return tracker.add(tensor, storage, birth_op, StorageKind.TEMPORARY, nbytes=storage.nbytes())


def test_detained_storage_lives_on_in_a_new_memory(finish: Finish) -> None:
    x = torch.ones(4)
    with Recorder() as recorder:
        tracker = recorder.tracker
        a = x + 1  # op 0
        index = tracker.index(a.untyped_storage())
        assert index == 1
        tracker.detain(index)
        del a
        x * 1  # op 1: away
        assert recorder.live_nbytes == 32
        with recorder.pause():
            b = torch.empty(4)
        tracker.rebind(index, b.untyped_storage())
        b * 2  # op 2: the same storage again
        tracker.let_go(index)
        x * 1  # op 3: still held by b
        del b
        assert recorder.live_nbytes == 16
        x * 1  # op 4
    trace = finish(recorder)
    life = trace.storages[1]
    assert (life.nbytes, life.birth_op, life.death_op) == (16, 0, 4)
    assert trace.use_columns.op[trace.use_columns.storage == 1].tolist() == [0, 2]
    assert trace.memory_curve().tolist() == [32, 48, 48, 48, 32]


def test_detained_storage_without_memory_dies_when_let_go(finish: Finish) -> None:
    x = torch.ones(4)
    with Recorder() as recorder:
        a = x + 1  # op 0
        recorder.tracker.detain(1)
        del a
        x * 1  # op 1
        recorder.tracker.let_go(1)
        x * 1  # op 2
    assert finish(recorder).storages[1].death_op == 2


def test_storage_let_go_before_its_memory_dies_dies_with_it(tracker: StorageTracker) -> None:
    a = torch.ones(4)
    index = add(tracker, a)
    tracker.detain(index)
    tracker.let_go(index)
    assert tracker.death_op[index] == ALIVE
    tracker.num_ops = 7
    del a
    assert tracker.death_op[index] == 7
    assert tracker.live_nbytes == 0


def test_ended_storage_dies_although_its_memory_is_kept(tracker: StorageTracker) -> None:
    a = torch.ones(4)
    index, storage = add(tracker, a), a.untyped_storage()
    tracker.detain(index)
    tracker.num_ops = 3
    tracker.end(index, storage._cdata)
    assert (tracker.live_nbytes, tracker.death_op[index]) == (0, 3)
    again = add(tracker, a, birth_op=-1)  # the program uses it after all
    assert again != index
    assert tracker.live_nbytes == 16
    tracker.num_ops = 5
    del a, storage
    assert (tracker.live_nbytes, tracker.death_op[index], tracker.death_op[again]) == (0, 3, 5)


def test_storage_ended_when_its_memory_is_gone_already(tracker: StorageTracker) -> None:
    a = torch.ones(4)
    index, cdata = add(tracker, a), a.untyped_storage()._cdata
    tracker.detain(index)
    del a
    assert tracker.live_nbytes == 16
    tracker.end(index, cdata)
    assert tracker.live_nbytes == 0


def test_two_memories_at_once(tracker: StorageTracker) -> None:
    """Read back while somebody still holds the first memory: the death of either one is not that of the storage."""
    a, b = torch.ones(4), torch.ones(4)
    index = add(tracker, a)
    tracker.detain(index)
    tracker.rebind(index, b.untyped_storage())
    assert tracker.live_nbytes == 16
    del a
    tracker.let_go(index)
    assert tracker.death_op[index] == ALIVE, "b carries it"
    assert tracker.index(b.untyped_storage()) == index
    del b
    assert tracker.death_op[index] != ALIVE
    assert tracker.live_nbytes == 0


def test_two_memories_of_a_storage_let_go(tracker: StorageTracker) -> None:
    a, b = torch.ones(4), torch.ones(4)
    index = add(tracker, a)
    tracker.rebind(index, b.untyped_storage())
    tracker.let_go(index)
    del a
    assert tracker.death_op[index] == ALIVE, "b carries it"
    del b
    assert tracker.live_nbytes == 0


def test_rebound_again_and_again(tracker: StorageTracker) -> None:
    a = torch.ones(4)
    index = add(tracker, a)
    tracker.detain(index)
    for _ in range(20):
        a = torch.ones(4)
        tracker.rebind(index, a.untyped_storage())
        tracker.rebind(index, a.untyped_storage())  # a second time is no second memory
        assert tracker.index(a.untyped_storage()) == index
    assert tracker.live_nbytes == 16
    tracker.let_go(index)
    del a
    assert tracker.live_nbytes == 0
    assert tracker.peak_nbytes == 16


def test_memory_known_as_another_storage_is_taken_over(tracker: StorageTracker) -> None:
    a = torch.ones(4)
    moved = add(tracker, a)
    tracker.detain(moved)
    del a
    b = torch.ones(4)
    as_other = add(tracker, b, birth_op=1)  # an operation made the new memory, and it was recorded
    tracker.num_ops = 2
    tracker.rebind(moved, b.untyped_storage())
    assert tracker.death_op[as_other] == 2
    assert tracker.live_nbytes == 16
    tracker.let_go(moved)
    del b
    assert tracker.live_nbytes == 0


def test_absent_storage_is_counted_and_comes_back(tracker: StorageTracker) -> None:
    index = tracker.add_absent(64, StorageKind.ACTIVATION, "float16")
    assert (tracker.live_nbytes, tracker.birth_op[index]) == (64, -1)
    a = torch.ones(16)
    tracker.rebind(index, a.untyped_storage())
    assert tracker.index(a.untyped_storage()) == index
    tracker.let_go(index)
    del a
    assert tracker.live_nbytes == 0


def test_absent_storage_that_never_comes_back(tracker: StorageTracker) -> None:
    index = tracker.add_absent(64, StorageKind.ACTIVATION, "float16")
    tracker.num_ops = 3
    tracker.let_go(index)
    tracker.let_go(index)
    assert (tracker.live_nbytes, tracker.death_op[index]) == (0, 3)


def test_dead_storage_takes_no_new_memory(tracker: StorageTracker) -> None:
    index = add(tracker, torch.ones(4))
    with pytest.raises(ValueError, match="storage 0 died at operation 0"):
        tracker.rebind(index, torch.ones(4).untyped_storage())


def test_what_has_no_number_is_ignored(tracker: StorageTracker) -> None:
    a = torch.ones(4)
    index = add(tracker, a)
    tracker.detain(-1)
    tracker.let_go(-1)
    assert tracker.death_op[index] == ALIVE
    assert tracker.live_nbytes == 16


def test_reused_address_is_another_storage(tracker: StorageTracker) -> None:
    seen: dict[int, int] = {}
    reused = 0
    for _ in range(100):
        a = torch.ones(4)
        assert tracker.index(a.untyped_storage()) is None
        index = add(tracker, a)
        reused += a.untyped_storage()._cdata in seen
        seen[a.untyped_storage()._cdata] = index
        del a
    assert reused, "the case did not occur"
    assert tracker.live_nbytes == 0
    assert all(death != ALIVE for death in tracker.death_op)


def test_storage_held_by_a_view_an_array_or_autograd_lives(tracker: StorageTracker) -> None:
    a = torch.ones(4)
    index = add(tracker, a)
    view = a[1:]
    del a
    assert tracker.death_op[index] == ALIVE
    array = view.numpy()
    del view
    assert tracker.death_op[index] == ALIVE
    del array
    assert tracker.death_op[index] != ALIVE
    x = torch.ones(4, requires_grad=True)
    y = x.exp()
    index = add(tracker, y)
    loss = y.sum()
    del y
    assert tracker.death_op[index] == ALIVE
    loss.backward()
    assert tracker.death_op[index] != ALIVE


def test_death_may_come_from_another_thread(tracker: StorageTracker) -> None:
    import threading

    held = [torch.ones(4)]
    index = add(tracker, held[0])
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert tracker.death_op[index] == 0


def test_stopped_tracker_ignores_what_comes_later(tracker: StorageTracker) -> None:
    a = torch.ones(4)
    index = add(tracker, a)
    tracker.detain(index)
    tracker.stop()
    tracker.rebind(index, torch.ones(4).untyped_storage())
    tracker.let_go(index)
    live = tracker.live_nbytes
    del a
    assert tracker.live_nbytes == live
    assert tracker.index(torch.ones(4).untyped_storage()) is None


def test_uncounted_storage_never_counts(tracker: StorageTracker) -> None:
    a = torch.empty(0)
    storage = a.untyped_storage()
    index = tracker.add(a, storage, 0, StorageKind.TEMPORARY, nbytes=0, counted=False)
    storage.resize_(400)
    tracker.has_grown(index, storage)
    assert (tracker.live_nbytes, tracker.nbytes[index]) == (0, 0)
