"""What several of the tests here need: small traces built by hand, and checks that hold for every recorded trace."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from lifetime import Recorder, Trace
from lifetime.trace import EventColumns, OpColumns, StorageColumns, UseColumns

MakeTrace = Callable[..., Trace]
Finish = Callable[[Recorder], Trace]


def column(values: Sequence[int]) -> Any:
    return np.array(values, dtype=np.int64)


def build(
    *,
    durations: Sequence[int],
    storages: Sequence[tuple[int, int, int]],
    uses: Sequence[tuple[int, int]] = (),
    events: Sequence[tuple[int, int]] = (),
) -> Trace:
    """A trace of operations of given `durations` (ns).

    Args:
        durations: One operation each.
        storages: (nbytes, birth_op, death_op) each.
        uses: (op, storage) each, sorted by op.
        events: (op, storage) each, sorted by op; packs.
    """
    zero, one = [0] * len(durations), [0] * len(storages)
    nbytes = [sum(storages[s][0] for op, s in uses if op == i) for i in range(len(durations))]
    start = np.concatenate(([0], np.cumsum(durations)))[:-1] if len(durations) else []
    return Trace(
        OpColumns(*(column(c) for c in (zero, zero, zero, start, durations, nbytes, zero))),
        StorageColumns(
            name=column(one),
            kind=column(one),
            nbytes=column([s[0] for s in storages]),
            dtype=column(one),
            birth_op=column([s[1] for s in storages]),
            death_op=column([s[2] for s in storages]),
            freeable_event=column([-1] * len(storages)),
            shape_end=column(one),
            shape=column([]),
        ),
        UseColumns(column([u[0] for u in uses]), column([u[1] for u in uses]), column([0] * len(uses))),
        EventColumns(
            *(column([0] * len(events)) for _ in range(3)),
            ordinal=column(range(len(events))),
            op=column([e[0] for e in events]),
            storage=column([e[1] for e in events]),
            nbytes=column([storages[e[1]][0] if e[1] >= 0 else 0 for e in events]),
            dtype=column([0] * len(events)),
        ),
        [""],
    )


@pytest.fixture
def make_trace() -> MakeTrace:
    return build


@pytest.fixture
def finish() -> Finish:
    """Gives the trace of a finished recorder, after checking what must hold for every recording."""
    return checked


def checked(recorder: Recorder) -> Trace:
    trace = recorder.trace
    trace.validate()
    lives = trace.storages
    used: dict[int, set[int]] = {}
    for op, storage in zip(trace.use_columns.op.tolist(), trace.use_columns.storage.tolist(), strict=True):
        assert lives[storage].birth_op <= op < lives[storage].death_op, f"op {op} uses {lives[storage]}"
        assert storage not in used.setdefault(op, set()), f"op {op} uses storage {storage} twice"
        used[op].add(storage)
    curve = [sum(s.nbytes for s in lives if s.birth_op <= i < s.death_op) for i in range(trace.num_ops)]
    assert trace.memory_curve().tolist() == curve
    fraction = trace.active_fraction()
    assert ((fraction >= 0) & (fraction <= 1)).all()
    alive = sum(s.nbytes for s in lives if s.death_op == trace.num_ops)
    assert recorder.live_nbytes <= alive, "storages that die after the last operation count as live during it"
    assert recorder.tracker.peak_nbytes <= max(trace.peak_nbytes, alive)
    return trace


@pytest.fixture
def step() -> Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]:
    """One forward and backward pass over a mean of squares."""

    def run(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        output = model(batch)
        loss: torch.Tensor = (output[0] if isinstance(output, tuple) else output).square().mean()
        del output
        loss.backward()
        return loss.detach()

    return run
