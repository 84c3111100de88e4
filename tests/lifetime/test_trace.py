"""What is read off a trace, against small cases worked out by hand."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lifetime import InactivePeriod, Recorder, StorageLife, Trace, TraceError

MakeTrace = Callable[..., Trace]


def test_memory_curve(make_trace: MakeTrace) -> None:
    trace = make_trace(
        durations=[1, 1, 1, 1],
        storages=[(100, -1, 4), (10, 0, 2), (20, 1, 3), (1000, -1, 0), (5, 3, 4), (7, 4, 4), (3, -1, 1)],
    )
    assert trace.memory_curve().tolist() == [113, 130, 120, 105]
    assert trace.memory_curve().dtype == np.int64
    assert trace.peak_nbytes == 130


def test_empty_trace(make_trace: MakeTrace) -> None:
    trace = make_trace(durations=[], storages=[])
    assert (trace.peak_nbytes, trace.ops, trace.storages, trace.events) == (0, [], [], [])
    assert trace.memory_curve().tolist() == trace.active_fraction().tolist() == trace.inactive_periods() == []


def test_operation_without_memory_has_no_active_share(make_trace: MakeTrace) -> None:
    assert make_trace(durations=[1, 1], storages=[]).active_fraction().tolist() == [0.0, 0.0]


def test_active_fraction(make_trace: MakeTrace) -> None:
    trace = make_trace(durations=[1, 1], storages=[(30, -1, 2), (10, 0, 2)], uses=[(0, 0), (0, 1), (1, 1)])
    assert trace.active_fraction().tolist() == [1.0, 0.25]


@pytest.mark.parametrize(
    ("life", "uses", "expected"),
    [
        # used in neighbouring operations: never idle
        ((0, 5), [0, 1, 2, 3, 4], []),
        # an intermediate one: between its uses only
        ((0, 5), [0, 3], [(1, 3, 20 + 40)]),
        ((1, 4), [1, 3], [(2, 3, 40)]),
        # older than the iteration, but not outliving it: it does not wrap
        ((-1, 4), [1, 3], [(2, 3, 40)]),
        # born here and outliving the iteration: it does not wrap either
        ((1, 5), [1, 3], [(2, 3, 40)]),
        # a global one: from the last use on to the first one of the next iteration
        ((-1, 5), [1, 3], [(2, 3, 40), (4, 1, 160 + 10)]),
        ((-1, 5), [2], [(3, 2, 80 + 160 + 10 + 20)]),
        ((-1, 5), [4], [(5, 4, 10 + 20 + 40 + 80)]),
        ((-1, 5), [0], [(1, 0, 20 + 40 + 80 + 160)]),
        ((-1, 5), [0, 4], [(1, 4, 20 + 40 + 80)]),
        # never used
        ((-1, 5), [], []),
    ],
)
def test_inactive_periods(
    make_trace: MakeTrace, life: tuple[int, int], uses: list[int], expected: list[tuple[int, int, int]]
) -> None:
    trace = make_trace(
        durations=[10, 20, 40, 80, 160], storages=[(1, -1, 5), (8, *life)], uses=[(op, 1) for op in uses]
    )
    assert trace.inactive_periods() == [InactivePeriod(1, 8, *period) for period in expected]


def test_inactive_periods_of_several_storages(make_trace: MakeTrace) -> None:
    trace = make_trace(
        durations=[1, 1, 1, 1],
        storages=[(2, -1, 4), (3, 0, 4), (4, -1, 4)],
        uses=[(0, 0), (0, 1), (2, 2), (3, 0), (3, 1)],
    )
    assert trace.inactive_periods() == [
        InactivePeriod(0, 2, 1, 3, 2),
        InactivePeriod(1, 3, 1, 3, 2),
        InactivePeriod(2, 4, 3, 2, 3),
    ]


def test_rows(make_trace: MakeTrace) -> None:
    trace = make_trace(durations=[5, 6], storages=[(8, -1, 2)], uses=[(0, 0)], events=[(1, 0)])
    assert [(op.start_ns, op.duration_ns, op.nbytes) for op in trace.ops] == [(0, 5, 8), (5, 6, 0)]
    assert trace.storages == [StorageLife(0, "", trace.storages[0].kind, 8, "", (), -1, 2, -1)]
    assert trace.storages[0].storage == 0
    (event,) = trace.events
    assert (event.op, event.storage, event.nbytes) == (1, 0, 8)


def test_shapes_are_ragged() -> None:
    with Recorder() as recorder:
        torch.zeros(2, 3)
        torch.zeros(())
        torch.zeros(4)
        torch.zeros(0, 5)
    assert [s.shape for s in recorder.trace.storages] == [(2, 3), (), (4,), (0, 5)]


def signature(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> str:
    x = torch.ones(shape, dtype=dtype, requires_grad=True)
    with Recorder() as recorder:
        (x.exp() * x.sin()).sum().backward()
    return recorder.trace.signature


def test_signature_is_that_of_the_same_iteration_and_of_no_other() -> None:
    assert signature((4, 2)) == signature((4, 2))
    assert signature((4, 2)) != signature((4, 3))
    assert signature((4, 2)) != signature((2, 2), torch.float64), "as many bytes, another type"


# --- what does not fit together --------------------------------------------------------------------------------------


@pytest.fixture
def good(make_trace: MakeTrace) -> Trace:
    trace = make_trace(
        durations=[1, 1, 1],
        storages=[(8, -1, 3), (4, 0, 2)],
        uses=[(0, 0), (1, 1), (2, 0)],
        events=[(1, 0), (2, 1)],
    )
    trace.validate()
    return trace


@pytest.mark.parametrize(
    ("group", "column", "row", "value"),
    [
        ("op", "name", 0, 1),
        ("op", "name", 0, -1),
        ("op", "module", 2, 9),
        ("op", "phase", 1, 3),
        ("op", "duration_ns", 1, -1),
        ("op", "duration_ns", 1, 2**62),
        ("op", "nbytes", 1, -1),
        ("op", "flops", 1, -5),
        ("storage", "name", 1, 4),
        ("storage", "kind", 1, 6),
        ("storage", "kind", 1, -1),
        ("storage", "nbytes", 0, -8),
        ("storage", "nbytes", 0, 2**63 - 1),
        ("storage", "dtype", 0, 1),
        ("storage", "birth_op", 0, -2),
        ("storage", "birth_op", 1, 3),
        ("storage", "birth_op", 1, 4),
        ("storage", "death_op", 0, -1),
        ("storage", "death_op", 0, 4),
        ("storage", "freeable_event", 0, 4),
        ("storage", "freeable_event", 0, -2),
        ("storage", "shape_end", 1, 1),
        ("use", "op", 2, 3),
        ("use", "op", 0, 2),
        ("use", "op", 0, -1),
        ("use", "storage", 0, 2),
        ("use", "storage", 0, -1),
        ("use", "written", 0, 2),
        ("event", "kind", 0, 7),
        ("event", "phase", 0, 3),
        ("event", "micro_batch", 0, -1),
        ("event", "ordinal", 0, -1),
        ("event", "op", 0, 4),
        ("event", "op", 0, 3),
        ("event", "storage", 0, 2),
        ("event", "storage", 0, -2),
        ("event", "dtype", 0, 1),
    ],
)
def test_misfit_is_named(good: Trace, group: str, column: str, row: int, value: int) -> None:
    getattr(getattr(good, f"{group}_columns"), column)[row] = value
    with pytest.raises(TraceError, match=f"{group} ({column}|birth_op)"):
        good.validate()


@pytest.mark.parametrize(
    "replacement", [np.array([1.0, 2.0, 3.0]), np.zeros((3, 1), dtype=np.int64), np.zeros(2, dtype=np.int64)]
)
def test_column_of_another_form_is_refused(good: Trace, replacement: Any) -> None:
    good.op_columns.nbytes = replacement
    with pytest.raises(TraceError, match=r"int64|differ in length"):
        good.validate()


def test_lengths_that_belong_to_no_storage_are_refused(good: Trace) -> None:
    good.storage_columns.shape = np.ones(3, dtype=np.int64)
    with pytest.raises(TraceError, match="3 lengths that belong to no storage"):
        good.validate()
