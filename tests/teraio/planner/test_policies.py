"""What every plan must keep, on random iterations, and what makes a plan a good one, on iterations made for it."""

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lifetime import Hardware, StorageKind
from teraio.errors import ConfigError
from teraio.planner.plan import Limits, MoveKind
from teraio.planner.planning import make_plan
from teraio.planner.policies import POLICIES, find_policy
from teraio.planner.policies.evict_all import evict_all
from teraio.planner.policies.planned import CAUTIONS, SAME_STEP, Pace, plan_at_pace, planned
from teraio.planner.problem import Candidate, Problem, build_problem
from teraio.planner.simulator import replay

ROUNDING = SAME_STEP + 1e-9


class Saved(NamedTuple):
    """How a storage of a random iteration lives, in operations."""

    nbytes: int
    birth: int
    pack_after: int
    use_after_pack: int
    idle: int
    second_use_after: int | None
    kind: StorageKind


saved_storages = st.builds(
    Saved,
    nbytes=st.integers(1, 40),
    birth=st.integers(0, 20),
    pack_after=st.integers(0, 2),
    use_after_pack=st.integers(0, 2),
    idle=st.integers(0, 20),
    second_use_after=st.none() | st.integers(0, 5),
    kind=st.sampled_from([*[StorageKind.ACTIVATION] * 8, StorageKind.PARAMETER, StorageKind.INPUT]),
)
operations = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, 3.0]), st.integers(0, 30)), min_size=1, max_size=30)
hardware = st.builds(
    Hardware,
    read_bytes_per_s=st.sampled_from([3.0, 20.0, 500.0]),
    write_bytes_per_s=st.sampled_from([2.0, 20.0, 500.0]),
    latency_s=st.sampled_from([0.0, 0.1]),
    mixed_factor=st.sampled_from([0.3, 0.5, 0.75, 1.0]),
    compute_factor=st.sampled_from([0.8, 1.0]),
)
shares = st.floats(0, 1)
"""Where a budget lies between the floor and the peak."""


@pytest.fixture(scope="session")
def random_trace(new_script):
    """Make a trace of random operations and storages."""

    def make(operations, storages):
        script = new_script()
        last = len(operations) - 1
        makes, packs, uses, unpacks, frees = ([[] for _ in operations] for _ in range(5))
        for saved in storages:
            storage = script.storage(saved.nbytes, saved.kind, older=saved.birth == 0 and saved.idle == 0)
            birth = min(saved.birth, last)
            pack = min(birth + saved.pack_after, last)
            use = min(pack + saved.use_after_pack, last)
            unpack = min(use + 1 + saved.idle, last)
            if not (saved.birth == 0 and saved.idle == 0):
                makes[birth].append(storage)
            packs[pack].append(storage)
            uses[use].append(storage)
            if unpack > pack:
                unpacks[unpack].append(storage)
                end = unpack
                if saved.second_use_after is not None:
                    end = min(unpack + saved.second_use_after, last)
                    unpacks[end].append(storage)
                uses[end].append(storage)
                frees[end].append(storage)
        for k, (seconds, temporary) in enumerate(operations):
            for storage in unpacks[k]:
                script.unpack(storage)
            script.op(seconds, makes=makes[k], uses=uses[k], frees=frees[k], temporary=temporary)
            for storage in packs[k]:
                script.pack(storage)
        return script.trace()

    return make


def budget_at(problem, share):
    floor, peak = problem.floor_nbytes(), problem.peak_nbytes
    return int(np.ceil(floor + share * (peak - floor)))


def check_moves(problem, moves):
    """Each storage leaves once, within its idle time, and returns after that, by its use."""
    candidates = {c.storage: c for c in problem.candidates}
    assert list(moves) == sorted(moves, key=lambda move: move.trigger)
    offloads = {move.storage: move for move in moves if move.kind is MoveKind.OFFLOAD}
    reloads = {move.storage: move for move in moves if move.kind is MoveKind.RELOAD}
    assert len(moves) == len(offloads) + len(reloads)
    assert offloads.keys() == reloads.keys()
    assert offloads.keys() <= candidates.keys()
    for storage, offload in offloads.items():
        c, reload = candidates[storage], reloads[storage]
        assert offload.nbytes == reload.nbytes == c.nbytes
        assert c.free_event == offload.trigger <= offload.deadline <= c.use_event
        assert offload.trigger <= reload.trigger <= reload.deadline == c.use_event


def check_can_be_kept(problem, moves, budget):
    """With every write ended at once and every reload at its trigger, no segment needs more than the budget."""
    level = problem.need_nbytes.copy()
    for move in moves:
        level[move.trigger :] -= move.nbytes if move.kind is MoveKind.OFFLOAD else -move.nbytes
    assert level.max(initial=0) <= budget


class TestEveryPlan:
    @given(operations, st.lists(saved_storages, max_size=15), hardware, shares)
    @settings(max_examples=150)
    def test_moves_make_sense_and_keep_the_budget(self, random_trace, operations, storages, hardware, share):
        trace = random_trace(operations, storages)
        problem = build_problem(trace, min_nbytes=1)
        budget = budget_at(problem, share)
        limits = Limits(budget, min_nbytes=1)
        plans = [policy(problem, limits, hardware) for policy in (evict_all, planned)]
        plans += [plan_at_pace(problem, budget, Pace(hardware, caution)) for caution in CAUTIONS]
        for moves in plans:
            check_moves(problem, moves)
            check_can_be_kept(problem, moves, budget)
            for move in moves:
                if move.kind is MoveKind.RELOAD:
                    event = trace.events[move.deadline]
                    assert (event.kind.name, event.storage) == ("UNPACK", move.storage)
            assert replay(problem, moves, hardware, budget).peak_nbytes <= budget

    @given(operations, st.lists(saved_storages, max_size=15), hardware, shares)
    @settings(max_examples=150)
    def test_planned_is_never_worse_than_moving_everything(self, random_trace, operations, storages, hardware, share):
        problem = build_problem(random_trace(operations, storages), min_nbytes=1)
        limits = Limits(budget_at(problem, share), min_nbytes=1)
        plan, everything = (make_plan(problem, limits, hardware, name) for name in ("planned", "evict_all"))
        assert plan.offloaded_nbytes <= everything.offloaded_nbytes
        assert plan.predicted.step_s <= everything.predicted.step_s * ROUNDING

    @given(operations, st.lists(saved_storages, max_size=15), hardware)
    def test_planned_moves_nothing_where_the_budget_does_not_bind(self, random_trace, operations, storages, hardware):
        problem = build_problem(random_trace(operations, storages), min_nbytes=1)
        assert planned(problem, Limits(problem.peak_nbytes, min_nbytes=1), hardware) == ()

    @given(operations, st.lists(saved_storages, max_size=15), hardware, st.integers(0, 50))
    def test_below_the_floor_planned_comes_closest(self, random_trace, operations, storages, hardware, missing):
        problem = build_problem(random_trace(operations, storages), min_nbytes=1)
        floor = problem.floor_nbytes()
        limits = Limits(max(0, floor - missing), min_nbytes=1)
        moves = planned(problem, limits, hardware)
        check_moves(problem, moves)
        assert replay(problem, moves, hardware, limits.budget_nbytes).peak_nbytes == floor

    @given(operations, st.lists(saved_storages, max_size=15), hardware, shares)
    def test_planning_is_deterministic_and_leaves_the_problem_alone(
        self, random_trace, operations, storages, hardware, share
    ):
        problem = build_problem(random_trace(operations, storages), min_nbytes=1)
        needs = problem.need_nbytes.copy()
        limits = Limits(budget_at(problem, share), min_nbytes=1)
        assert planned(problem, limits, hardware) == planned(problem, limits, hardware)
        assert np.array_equal(problem.need_nbytes, needs)

    @given(operations, st.lists(saved_storages, max_size=15), hardware, shares)
    def test_simulated_time_adds_up(self, random_trace, operations, storages, hardware, share):
        hardware = dataclasses.replace(hardware, compute_factor=1.0)
        problem = build_problem(random_trace(operations, storages), min_nbytes=1)
        budget = budget_at(problem, share)
        moves = planned(problem, Limits(budget, min_nbytes=1), hardware)
        result = replay(problem, moves, hardware, budget)
        assert result.step_s == pytest.approx(problem.step_s + result.stall_s)
        for kind in ("offload", "reload"):
            spans = [(start, end) for name, _, start, end in result.timeline if name == kind]
            assert all(before[1] <= after[0] + 1e-9 for before, after in itertools.pairwise(spans))
        written = {storage: end for kind, storage, _, end in result.timeline if kind == "offload"}
        assert all(written[storage] <= start for kind, storage, start, _ in result.timeline if kind == "reload")


def layers(nbytes, *, seconds=1.0, head_nbytes=0):
    """A forward pass that saves storages of `nbytes`, and a backward pass that uses them in reverse."""
    num = len(nbytes)
    held = np.cumsum(nbytes)
    needs = np.concatenate((held, [held[-1] + head_nbytes], held[::-1]))
    candidates = tuple(Candidate(i, size, i + 1, 2 * num - i, f"layer {i}") for i, size in enumerate(nbytes))
    start_s = np.arange(len(needs)) * seconds
    return Problem("layers", needs, start_s, np.full(len(needs), seconds), candidates, len(needs) * seconds)


def moved(moves):
    return sorted(move.storage for move in moves if move.kind is MoveKind.OFFLOAD)


class TestPlanned:
    """What it chooses on iterations of which the best plan is known."""

    def test_what_is_idle_longest_leaves(self):
        problem = layers([100] * 10)
        assert moved(planned(problem, Limits(700), Hardware(100.0, 100.0))) == [0, 1, 2]

    def test_what_is_used_last_leaves_among_what_is_free_in_time(self):
        needs = np.array([200, 200, 200, 200, 200, 300, 200, 200, 200, 200])
        early, late = Candidate(0, 100, 1, 7, "used early"), Candidate(1, 100, 2, 9, "used late")
        problem = Problem("x", needs, np.arange(10.0), np.ones(10), (early, late), 10.0)
        assert moved(planned(problem, Limits(200), Hardware(100.0, 100.0))) == [1]

    def test_no_more_leaves_than_the_budget_asks_for(self):
        problem = layers([30, 100, 20, 100, 30, 100, 20, 100])
        result = make_plan(problem, Limits(400), Hardware(100.0, 100.0), "planned")
        assert result.predicted.written_nbytes == 100
        assert result.predicted.stall_s == pytest.approx(0)

    def test_a_choice_that_later_ones_make_needless_is_taken_back(self):
        problem = layers([10, 200, 100, 100])
        assert moved(planned(problem, Limits(210), Hardware(1000.0, 1000.0))) == [1]

    def test_slow_disk_is_kept_busy_from_the_first_free_storage_on(self):
        """Ten writes of 2 s each, from 1 s on, of which the tenth is waited for at 19 s."""
        problem = layers([100] * 20)
        result = replay(problem, planned(problem, Limits(1000), Hardware(1e6, 50.0)), Hardware(1e6, 50.0), 1000)
        writes = [(start, end) for kind, _, start, end in result.timeline if kind == "offload"]
        assert writes[0][0] == pytest.approx(1)
        assert all(before[1] == pytest.approx(after[0]) for before, after in itertools.pairwise(writes))
        assert result.stall_s == pytest.approx(2, abs=1e-3)

    def test_does_not_count_on_what_cannot_have_left_in_time(self):
        """The large storage is used last, but becomes free too late to be written before the peak."""
        needs = np.array([300, 300, 300, 300, 500, 300, 300, 300, 300, 300])
        early, late = Candidate(0, 200, 1, 8, "early"), Candidate(1, 200, 4, 9, "late")
        problem = Problem("x", needs, np.arange(10.0), np.ones(10), (early, late), 10.0)
        hardware = Hardware(100.0, 100.0)
        moves = planned(problem, Limits(300), hardware)
        assert moved(moves) == [0]
        assert replay(problem, moves, hardware, 300).stall_s == pytest.approx(0)

    def test_queue_of_writes_is_counted(self):
        """Each write alone would end before the peak, but not one after the other: reloads wait for what is true."""
        needs = np.array([400, 400, 400, 600, 400, 400, 400, 400, 400, 400])
        candidates = tuple(Candidate(i, 100, 1, 9 - i, "") for i in range(2))
        problem = Problem("x", needs, np.arange(10.0), np.ones(10), candidates, 10.0)
        moves = planned(problem, Limits(400), Hardware(100.0, 60.0))
        deadlines = {move.storage: move.deadline for move in moves if move.kind is MoveKind.OFFLOAD}
        assert deadlines == {1: 4, 0: 6}  # 1.67 s each, planned as 2.5 s, from event 1

    def test_somewhat_slower_disk_than_measured_costs_nothing(self):
        """Of two storages that relieve the same peak, the one with time to spare leaves."""
        needs = np.array([300, 300, 300, 300, 500, 300, 300, 300, 300, 300])
        tight, loose = Candidate(0, 200, 2, 9, "tight"), Candidate(1, 200, 0, 8, "loose")
        problem = Problem("x", needs, np.arange(10.0), np.ones(10), (loose, tight), 10.0)
        moves = planned(problem, Limits(300), Hardware(100.0, 100.0))
        assert moved(moves) == [1]
        assert replay(problem, moves, Hardware(70.0, 70.0), 300).stall_s == pytest.approx(0)

    def test_reloads_start_before_they_are_needed_in_order_of_use(self):
        problem = layers([100] * 10)
        moves = planned(problem, Limits(700), Hardware(200.0, 200.0))
        reloads = [move for move in moves if move.kind is MoveKind.RELOAD]
        assert [move.deadline for move in reloads] == sorted(move.deadline for move in reloads)
        assert all(move.trigger < move.deadline for move in reloads)
        assert replay(problem, moves, Hardware(200.0, 200.0), 700).stall_s == pytest.approx(0)

    def test_reload_is_triggered_at_the_first_event_from_which_it_fits(self):
        """The read takes long, so it starts as early as memory allows: right after the peak in segment 4."""
        needs = np.array([200, 200, 200, 200, 300, 200, 200, 200, 200, 200])
        problem = Problem("x", needs, np.arange(10.0), np.ones(10), (Candidate(0, 100, 1, 9, ""),), 10.0)
        (reload,) = (m for m in planned(problem, Limits(200), Hardware(25.0, 100.0)) if m.kind is MoveKind.RELOAD)
        assert reload.trigger == 5

    @pytest.mark.parametrize("caution", CAUTIONS)
    def test_queue_of_reads_is_counted(self, caution):
        """Five reads of 2 s, used one second after another: the first must start 5 s before its own read would ask."""
        needs = np.array([600] * 3 + [1100] + [600] * 16)
        candidates = tuple(Candidate(i, 100, 0, 15 + i, "") for i in range(5))
        problem = Problem("x", needs, np.arange(20.0), np.ones(20), candidates, 20.0)
        hardware = Hardware(50.0, 1000.0)
        moves = plan_at_pace(problem, 600, Pace(hardware, caution))
        assert replay(problem, moves, hardware, 600).stall_s == pytest.approx(0)

    def test_reloads_leave_room_for_each_other(self):
        """Both are away over the peak in segment 2, then there is memory for one of them until segment 7."""
        needs = np.array([200, 200, 400, 300, 300, 300, 300, 200, 200, 200])
        candidates = (Candidate(0, 100, 0, 8, ""), Candidate(1, 100, 0, 9, ""))
        problem = Problem("x", needs, np.arange(10.0), np.ones(10), candidates, 10.0)
        moves = plan_at_pace(problem, 200, Pace(Hardware(1.0, 1000.0), 1.0))
        assert {m.storage: m.trigger for m in moves if m.kind is MoveKind.RELOAD} == {0: 3, 1: 7}

    def test_late_storage_joins_when_those_in_time_do_not_suffice(self):
        """Nothing is counted twice on the way."""
        needs = np.array([200, 200, 200, 400, 200, 200, 200, 200, 200, 200])
        early, late = Candidate(0, 100, 0, 9, "early"), Candidate(1, 100, 3, 8, "late")
        problem = Problem("x", needs, np.arange(10.0), np.ones(10), (early, late), 10.0)
        moves = plan_at_pace(problem, 200, Pace(Hardware(100.0, 100.0), 1.0))
        assert moved(moves) == [0, 1]

    def test_where_writes_cannot_keep_up_reloads_are_not_held_back(self):
        """Reads are much faster than writes: no read is waited for, although all writes are."""
        problem = layers([100] * 20, head_nbytes=200)
        hardware = Hardware(110.0, 10.0)
        result = replay(problem, planned(problem, Limits(1200), hardware), hardware, 1200)
        ends = {storage: end for kind, storage, _, end in result.timeline if kind == "offload"}
        assert result.stall_s == pytest.approx(max(ends.values()) - 20)

    def test_half_duplex_disk_is_judged_as_one(self):
        """At 200 bytes/s there is time for the writes and the reads one after the other, and nothing waits."""
        problem = layers([100] * 20, head_nbytes=500)
        hardware = Hardware(200.0, 200.0, mixed_factor=0.5)
        result = make_plan(problem, Limits(1500), hardware, "planned")
        assert result.predicted.stall_s == pytest.approx(0)
        assert result.predicted.peak_nbytes <= 1500

    def test_two_peaks(self):
        """What is idle over both leaves for both; one round trip is enough."""
        needs = np.array([200, 200, 200, 300, 200, 200, 300, 200, 200, 200])
        both, one = Candidate(0, 100, 1, 9, "both"), Candidate(1, 100, 1, 5, "one")
        problem = Problem("x", needs, np.arange(10.0), np.ones(10), (one, both), 10.0)
        assert moved(planned(problem, Limits(200), Hardware(100.0, 100.0))) == [0]


class TestNames:
    def test_keep_moves_nothing(self):
        assert POLICIES["keep"](layers([100] * 4), Limits(0), Hardware(1.0, 1.0)) == ()

    def test_unknown_policy_names_those_there_are(self):
        with pytest.raises(ConfigError, match="evict_all, keep, planned"):
            find_policy("clairvoyant")
