"""Queues on paper."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifetime import Hardware
from teraio.planner.disk import Disk, earliest_ends_s, latest_starts_s
from teraio.planner.plan import Move, MoveKind

transfers = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 10)), min_size=1, max_size=30)


def write(nbytes):
    return Move(MoveKind.OFFLOAD, 0, nbytes, 0, 0)


def test_ends_of_a_queue():
    ends = earliest_ends_s(np.array([0.0, 1, 10]), np.array([3.0, 2, 1]))
    assert ends.tolist() == [3, 5, 11]


def test_starts_that_keep_all_deadlines():
    starts = latest_starts_s(np.array([4.0, 5, 20]), np.array([2.0, 3, 1]))
    assert starts.tolist() == [0, 2, 19]


@pytest.mark.parametrize("function", [earliest_ends_s, latest_starts_s])
def test_empty_queue(function):
    assert function(np.array([]), np.array([])).tolist() == []


@given(transfers)
def test_ends_follow_the_recursion(queue):
    queue.sort()
    expected, end = [], -np.inf
    for arrival, work in queue:
        end = max(arrival, end) + work
        expected.append(end)
    arrivals, works = np.array(queue).T
    assert earliest_ends_s(arrivals, works) == pytest.approx(np.array(expected))


@given(transfers)
def test_starting_at_the_latest_start_keeps_all_deadlines(queue):
    queue.sort()
    deadlines, works = np.array(queue).T
    starts = latest_starts_s(deadlines, works)
    assert (earliest_ends_s(starts, works) <= deadlines + 1e-6).all()


def test_running_transfer_cannot_be_cancelled():
    disk = Disk(Hardware(1.0, 1.0))
    first, second = disk.add(write(5), 0.0), disk.add(write(5), 0.0)
    assert not disk.cancel(first)
    assert disk.cancel(second)
    assert list(disk.writes) == [first]


@pytest.mark.parametrize(("mixed_factor", "alone_s"), [(1.0, 4.0), (0.5, 4.0), (0.25, 8.0)])
def test_alone_on_the_disk(mixed_factor, alone_s):
    disk = Disk(Hardware(1.0, 1.0, mixed_factor=mixed_factor))
    disk.add(write(4), 0.0)
    assert disk.next_end_s() == pytest.approx(alone_s)


@given(st.floats(0.1, 1.0))
def test_shares_obey_the_mixed_rule(mixed_factor):
    disk = Disk(Hardware(3.0, 2.0, mixed_factor=mixed_factor))
    written = disk.add(write(12), 0.0)
    read = disk.add(Move(MoveKind.RELOAD, 1, 18, 0, 0), 0.0)
    disk.work(1.0, 1.0)
    used = (6 - written.left_s) + (6 - read.left_s)
    assert used == pytest.approx(2 * mixed_factor)
