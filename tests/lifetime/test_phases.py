"""Phases, micro-batches, and what happens when a pass or a step raises."""

from collections.abc import Callable

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

from lifetime import EventKind, Phase, Recorder, Trace

Finish = Callable[[Recorder], Trace]


def micro_batches(trace: Trace, kind: EventKind) -> list[int]:
    return [event.micro_batch for event in trace.events if event.kind is kind]


def phases(trace: Trace) -> list[Phase]:
    """The phases in order, without repetitions; what a step's or a `zero_grad`'s profiling mark says is left out."""
    found: list[Phase] = []
    for op in trace.ops:
        if not op.name.startswith("profiler.") and found[-1:] != [op.phase]:
            found.append(op.phase)
    return found


def test_phases_of_a_step(finish: Finish) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with Recorder(optimizer=optimizer) as recorder:
        for _ in range(2):
            weight.exp().sum().backward()
            optimizer.step()
    trace = finish(recorder)
    assert phases(trace) == [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER] * 2


def test_accumulation_of_three_counts_micro_batches(finish: Finish) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with Recorder(optimizer=optimizer) as recorder:
        for _ in range(3):
            weight.exp().sum().backward()
        recorder.event(EventKind.OPTIMIZER_CHUNK)
        optimizer.step()
        weight.exp()
    trace = finish(recorder)
    assert micro_batches(trace, EventKind.PACK) == [0, 1, 2, 3]
    assert micro_batches(trace, EventKind.UNPACK) == [0, 1, 2]
    assert micro_batches(trace, EventKind.OPTIMIZER_CHUNK) == [3]
    gradient = next(s for s in trace.storages if s.name == "group0.0.grad")
    assert trace.ops[gradient.birth_op].phase is Phase.BACKWARD
    assert gradient.death_op == trace.num_ops
    written = [
        op
        for op, storage, how in zip(
            trace.use_columns.op.tolist(),
            trace.use_columns.storage.tolist(),
            trace.use_columns.written.tolist(),
            strict=True,
        )
        if storage == gradient.storage and how
    ]
    assert len(written) == 3, "made once, added to twice"


def test_passes_without_an_operation_between_them_count(finish: Finish) -> None:
    x = torch.ones(3, requires_grad=True)
    grad = torch.ones(3)
    with Recorder() as recorder:
        first, second = x.exp(), x.exp()
        torch.autograd.backward([first], [grad])
        torch.autograd.backward([second], [grad])
    assert micro_batches(finish(recorder), EventKind.UNPACK) == [0, 1]


def test_gradient_penalty_is_a_pass_of_its_own(finish: Finish) -> None:
    x = torch.ones(3, requires_grad=True)
    with Recorder() as recorder:
        loss = x.exp().sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + gradient.square().sum()).backward()
    unpacks = micro_batches(finish(recorder), EventKind.UNPACK)
    assert unpacks == sorted(unpacks)
    assert set(unpacks) == {0, 1}


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_does_not_count_as_more_passes(finish: Finish, reentrant: bool) -> None:
    x = torch.ones(3, requires_grad=True)
    with Recorder() as recorder:
        for _ in range(2):
            y = x * 1
            for _ in range(3):
                y = checkpoint(lambda a: a.sin().exp(), y, use_reentrant=reentrant)
            y.sum().backward()
        recorder.event(EventKind.NODE)
    trace = finish(recorder)
    assert micro_batches(trace, EventKind.NODE) == [2]
    recomputed = [op for op in trace.ops if op.name == "aten.sin.default" and op.phase is Phase.BACKWARD]
    assert len(recomputed) == 6


def test_pass_that_raises_is_over(finish: Finish) -> None:
    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("in the middle")

    x = torch.ones(3, requires_grad=True)
    with Recorder() as recorder:
        y = x.exp()
        z = y.sin()
        y.register_hook(fail)
        with pytest.raises(RuntimeError, match="in the middle"):
            z.sum().backward()
        torch.ones(1)
        x.exp().sum().backward()
    trace = finish(recorder)
    assert micro_batches(trace, EventKind.UNPACK) == [0, 1]
    assert phases(trace) == [Phase.FORWARD, Phase.BACKWARD] * 2


def test_step_that_raises_does_not_last(finish: Finish) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def closure() -> float:
        raise ValueError("no loss")

    with Recorder(optimizer=optimizer) as recorder:
        with pytest.raises(ValueError, match="no loss"):
            optimizer.step(closure)
        weight.grad = torch.ones(3)
        optimizer.step()
        assert recorder.phase() is Phase.FORWARD
    assert phases(finish(recorder))[-1] is Phase.OPTIMIZER


def test_closure_keeps_its_backward_phase(finish: Finish) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def closure() -> torch.Tensor:
        loss = weight.exp().sum()
        loss.backward()
        return loss

    with Recorder(optimizer=optimizer) as recorder:
        optimizer.step(closure)
    assert phases(finish(recorder)) == [Phase.OPTIMIZER, Phase.BACKWARD, Phase.OPTIMIZER]


def test_recording_may_end_and_begin_in_a_hook_of_the_step(finish: Finish) -> None:
    """A runtime takes the step for the boundary of iterations, while torch walks through the step hooks."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    recorders: list[Recorder] = []

    def change(*_: object) -> None:
        if recorders:
            recorders[-1].stop()
        if len(recorders) < 3:
            recorders.append(Recorder(optimizer=optimizer))
            recorders[-1].start()

    handle = register_optimizer_step_post_hook(change)
    later = register_optimizer_step_post_hook(lambda *_: None)
    try:
        for _ in range(4):
            weight.grad = torch.ones(3)
            optimizer.step()
    finally:
        handle.remove()
        later.remove()
    for recorder in recorders:
        trace = finish(recorder)
        assert Phase.OPTIMIZER in phases(trace)
        assert {"group0.0", "group0.0.grad", "group0.0.momentum_buffer"} <= {s.name for s in trace.storages}


def test_steps_on_other_threads_are_not_ours(finish: Finish) -> None:
    import threading

    def elsewhere() -> None:
        other = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([other], lr=0.1)
        other.grad = torch.ones(3)
        optimizer.step()
        torch.nn.ReLU()(other)

    with Recorder() as recorder:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        torch.ones(1)
    trace = finish(recorder)
    assert [(op.name, op.phase, op.module) for op in trace.ops] == [("aten.ones.default", Phase.FORWARD, "")]
    assert trace.num_storages == 1
