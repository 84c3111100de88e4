"""The table of states, and what a record says when it is broken.

Covers `State`, the transitions and `Record`. Moving itself is ``test_engine``'s matter.
"""

from __future__ import annotations

import gc
import itertools
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import teraio
from teraio.runtime.residency import TRANSITIONS, Record, State


def _record() -> Record:
    engine: Any = SimpleNamespace(remains=deque())
    return Record(engine, torch.zeros(64).untyped_storage(), 256, torch.float32)


def _path_to(state: State) -> list[State]:
    """States to go through from RESIDENT, found in the table itself."""
    paths: dict[State, list[State]] = {State.RESIDENT: []}
    queue = deque([State.RESIDENT])
    while queue:
        here = queue.popleft()
        for start, finish in TRANSITIONS:
            if start is here and finish not in paths:
                paths[finish] = [*paths[here], finish]
                queue.append(finish)
    return paths[state]


@pytest.mark.parametrize(("start", "finish"), [*itertools.product(State, State)], ids=lambda s: s.value)
def test_the_table_is_enforced(start: State, finish: State) -> None:
    record = _record()
    for state in _path_to(start):
        record.move_to(state)
    if (start, finish) in TRANSITIONS:
        record.move_to(finish)
        assert record.state is finish
        return
    with pytest.raises(teraio.InternalError) as caught:
        record.move_to(finish)
    assert record.state is start
    text = str(caught.value)
    assert f"{start.value} -> {finish.value}" in text
    assert f"#{record.serial} (256 bytes of float32" in text
    assert record.history() in text


def test_bytes_are_never_in_neither_place() -> None:
    # Memory is given back from CLEAN alone, which only a write or a read that has ended leads to; and whatever fails
    # goes back to where it came from.
    assert {start for start, finish in TRANSITIONS if finish is State.OFFLOADED} == {State.CLEAN, State.RELOADING}
    assert {start for start, finish in TRANSITIONS if finish is State.CLEAN} == {State.OFFLOADING, State.RELOADING}
    assert (State.OFFLOADING, State.RESIDENT) in TRANSITIONS
    assert (State.RELOADING, State.OFFLOADED) in TRANSITIONS
    assert all(why for why in TRANSITIONS.values())


def test_the_history_keeps_the_last_moves() -> None:
    record = _record()
    assert record.history() == "none"
    for _ in range(20):
        record.move_to(State.OFFLOADING)
        record.move_to(State.RESIDENT)
    moves = record.history().split(", ")
    assert len(moves) == 8
    assert moves[-1] == "offloading->resident"


def test_a_dying_record_leaves_its_remains_and_nothing_else() -> None:
    record = _record()
    remains = record.engine.remains
    record.tracked, record.absent = 7, True
    serial, cdata = record.serial, record.cdata
    del record
    gc.collect()
    (left,) = remains
    assert (left.serial, left.tracked, left.absent, left.nbytes, left.cdata) == (serial, 7, True, 256, cdata)
    assert left.memory is None
    assert left.extent is None
    assert left.ticket is None
