"""Announced memory is counted once."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from lifetime import Recorder, Trace
from lifetime.buffers import (
    announce_buffer,
    announce_storage_on_buffer,
    buffers_nbytes,
    lies_on_buffer,
    live_buffers,
)

Finish = Callable[[Recorder], Trace]


class Slab:
    pass


@pytest.fixture(autouse=True)
def nothing_else() -> None:
    assert buffers_nbytes() == 0


def test_buffer_counts_while_it_lives() -> None:
    slab = Slab()
    announce_buffer(slab, 1000)
    assert buffers_nbytes() == 1000
    assert [(owner is slab, nbytes) for owner, nbytes in live_buffers()] == [(True, 1000)]
    announce_buffer(slab, 3000)
    assert buffers_nbytes() == 3000
    other = Slab()
    announce_buffer(other, 1)
    assert buffers_nbytes() == 3001
    del slab
    assert buffers_nbytes() == 1
    del other
    assert list(live_buffers()) == []


def test_buffer_is_counted_once_and_its_storage_not(finish: Finish) -> None:
    x = torch.ones(4)
    with Recorder() as recorder:
        x + 1  # op 0
        slab = np.zeros(1024, dtype=np.uint8)
        announce_buffer(slab, 1024)
        with recorder.pause():
            tensor = torch.from_numpy(slab[:16].view(np.float32))
        announce_storage_on_buffer(tensor.untyped_storage())
        assert lies_on_buffer(tensor.untyped_storage())
        y = tensor + 1  # op 1
    trace = finish(recorder)
    assert trace.storages[2].nbytes == 0
    assert trace.memory_curve().tolist() == [32, 32]
    assert recorder.peak_nbytes == 32 + 1024
    assert recorder.live_nbytes == 32
    del y, tensor, slab
    assert buffers_nbytes() == 0


def test_storage_that_a_recorder_has_seen_goes_on_with_no_bytes(finish: Finish) -> None:
    x, state = torch.ones(4), torch.ones(8)
    with Recorder() as recorder, Recorder(count_buffers=False) as other:
        y = x + state[:4]
        assert recorder.live_nbytes == other.live_nbytes == 16 + 32 + 16
        announce_storage_on_buffer(state.untyped_storage())
        announce_storage_on_buffer(state.untyped_storage())
        assert (recorder.live_nbytes, other.live_nbytes) == (32, 64)
        state.add_(1)
        torch.add(state, 1, out=state)
        assert (recorder.live_nbytes, other.live_nbytes) == (32, 64)
        del state
        assert (recorder.live_nbytes, other.live_nbytes) == (32, 32)
    fraction = recorder.trace.active_fraction()
    assert ((fraction >= 0) & (fraction <= 1)).all()
    finish(other)
    del y


def test_storages_are_recorded_as_if_nothing_moved_when_buffers_do_not_count(finish: Finish) -> None:
    slab = np.zeros(1024, dtype=np.uint8)
    announce_buffer(slab, 1024)
    tensor = torch.from_numpy(slab[:16].view(np.float32))
    announce_storage_on_buffer(tensor.untyped_storage())
    with Recorder(count_buffers=False) as recorder:
        y = tensor + 1
    trace = finish(recorder)
    assert trace.memory_curve().tolist() == [32]
    assert recorder.peak_nbytes == 32
    del y


def test_saved_tensor_on_a_buffer_keeps_its_size_in_the_events(finish: Finish) -> None:
    slab = np.zeros(16, dtype=np.uint8)
    tensor = torch.from_numpy(slab.view(np.float32))
    announce_storage_on_buffer(tensor.untyped_storage())
    weight = torch.nn.Parameter(torch.ones(4))
    signatures = []
    for count in (True, False):
        with Recorder(count_buffers=count) as recorder:
            (weight * tensor).sum().backward()
        trace = finish(recorder)
        assert [event.nbytes for event in trace.events] == [16, 16]
        signatures.append(trace.signature)
        weight.grad = None
    assert signatures[0] == signatures[1]


def test_address_of_a_dead_storage_on_a_buffer_does_not_mark_the_next_one() -> None:
    for _ in range(50):
        tensor = torch.ones(4)
        assert not lies_on_buffer(tensor.untyped_storage())
        announce_storage_on_buffer(tensor.untyped_storage())
        assert lies_on_buffer(tensor.untyped_storage())
        del tensor
