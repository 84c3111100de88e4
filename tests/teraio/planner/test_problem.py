"""What a planner reads off a trace."""

import numpy as np
import pytest

from lifetime import StorageKind
from teraio.planner.problem import build_problem, segment_needs


def periods(script, *, min_nbytes=1):
    return [
        (c.storage, c.free_event, c.use_event) for c in build_problem(script.trace(), min_nbytes=min_nbytes).candidates
    ]


class TestSegmentNeeds:
    def test_each_segment_needs_its_highest_operation(self, hill):
        assert segment_needs(hill).tolist() == [100, 200, 100, 100]

    def test_several_operations_in_one_segment(self, script):
        script.tick()
        for temporary in (5, 70, 30):
            script.op(temporary=temporary)
        script.tick()
        script.op(temporary=40)
        assert segment_needs(script.trace()).tolist() == [70, 40]

    def test_empty_segment_before_a_peak_does_not_need_the_peak(self, script):
        kept = script.storage(10)
        script.op(makes=[kept])
        script.pack(kept)  # empty: the next operation runs after the next event
        script.tick()
        script.op(temporary=500)
        assert segment_needs(script.trace()).tolist() == [10, 510]

    def test_empty_segment_after_a_peak_does_not_need_the_peak(self, script):
        kept = script.storage(10)
        script.op(makes=[kept], temporary=500)
        script.tick()  # empty: what the operation before it freed is gone
        script.tick()
        script.op()
        assert segment_needs(script.trace()).tolist() == [10, 10]

    def test_events_after_the_last_operation_hold_what_is_left(self, script):
        kept = script.storage(10)
        script.op(makes=[kept], temporary=5)
        script.op()
        script.tick()
        script.tick()
        assert segment_needs(script.trace()).tolist() == [10, 10]

    def test_events_before_the_first_operation(self, script):
        old = script.storage(10, StorageKind.PARAMETER, older=True)
        script.tick()
        script.tick()
        script.op(uses=[old])
        assert segment_needs(script.trace()).tolist() == [10, 10]

    def test_no_operations(self, script):
        script.tick()
        assert segment_needs(script.trace()).tolist() == [0]

    def test_nothing_at_all(self, script):
        problem = build_problem(script.trace(), min_nbytes=1)
        assert (problem.num_events, problem.step_s, problem.peak_nbytes, problem.floor_nbytes()) == (0, 0, 0, 0)


class TestTimes:
    def test_events_happen_when_the_operations_before_them_have_run(self, hill):
        problem = build_problem(hill, min_nbytes=1)
        assert problem.start_s.tolist() == [1, 2, 3, 4]
        assert problem.duration_s.tolist() == [1, 1, 1, 1]
        assert problem.step_s == 5

    def test_times_add_up(self, hill):
        problem = build_problem(hill, min_nbytes=1)
        assert problem.start_s[0] + problem.duration_s.sum() == pytest.approx(problem.step_s)


class TestCandidates:
    def test_unknown_holder_is_free_after_its_last_use_before_the_unpack(self, script):
        saved = script.storage(100)
        script.op(makes=[saved])
        script.pack(saved)  # 0
        script.tick()  # 1
        script.op(uses=[saved])
        script.tick()  # 2: the first event after that use
        script.op()
        use = script.unpack(saved)
        script.op(uses=[saved])
        assert periods(script) == [(saved, 2, use)]

    def test_unknown_holder_is_not_free_at_its_own_pack(self, hill):
        (candidate,) = build_problem(hill, min_nbytes=1).candidates
        assert (candidate.free_event, candidate.use_event) == (1, 3)

    def test_recorded_free_event_is_taken(self, script):
        saved = script.storage(100)
        script.op(makes=[saved])
        script.pack(saved)
        for _ in range(3):
            script.op()
            script.tick()
        use = script.unpack(saved)
        script.op(uses=[saved])
        script.free_at(saved, 2)
        assert periods(script) == [(saved, 2, use)]

    def test_used_twice_by_unpacks_is_idle_until_the_first(self, script):
        saved = script.storage(100)
        script.op(makes=[saved])
        script.pack(saved)
        script.op()
        script.tick()
        first = script.unpack(saved)
        script.op(uses=[saved])
        script.unpack(saved)
        script.op(uses=[saved])
        assert periods(script) == [(saved, 1, first)]

    def test_free_only_after_the_first_unpack_is_idle_until_the_second(self, script):
        saved = script.storage(100)
        script.op(makes=[saved])
        script.pack(saved)
        script.unpack(saved)
        script.op(uses=[saved])
        free = script.tick()
        script.op()
        second = script.unpack(saved)
        script.op(uses=[saved])
        script.free_at(saved, free)
        assert periods(script) == [(saved, free, second)]

    def test_packed_again_after_an_unpack_is_idle_from_the_second_pack(self, script):
        saved = script.storage(100)
        script.op(makes=[saved])
        script.pack(saved)
        script.unpack(saved)
        script.op(uses=[saved])
        script.pack(saved)  # 2
        script.op(uses=[saved])
        script.tick()  # 3
        script.op()
        use = script.unpack(saved)
        script.op(uses=[saved])
        assert periods(script) == [(saved, 3, use)]

    def test_packed_twice_counts_once_from_the_last_pack(self, script):
        saved = script.storage(100)
        script.op(makes=[saved])
        script.pack(saved)
        script.op(uses=[saved])
        script.pack(saved)  # 1
        script.op()
        script.tick()
        use = script.unpack(saved)
        script.op(uses=[saved])
        assert periods(script) == [(saved, 2, use)]

    def test_a_pack_within_the_recorded_idle_time_is_a_contradiction(self, script):
        saved = script.storage(100)
        script.op(makes=[saved])
        script.pack(saved)
        script.op()
        script.pack(saved)
        script.unpack(saved)
        script.op(uses=[saved])
        script.free_at(saved, 0)
        assert periods(script) == []

    @pytest.mark.parametrize("kind", [k for k in StorageKind if k is not StorageKind.ACTIVATION])
    def test_other_kinds_stay(self, script, kind):
        saved = script.storage(100, kind)
        self.save_and_use(script, saved, made=True)
        assert periods(script) == []

    def test_what_is_carried_over_from_the_iteration_before_stays(self, script):
        saved = script.storage(100, older=True)
        self.save_and_use(script, saved, made=False)
        assert periods(script) == []

    def test_what_is_not_unpacked_in_this_iteration_stays(self, script):
        saved = script.storage(100)
        script.op(makes=[saved])
        script.pack(saved)
        script.op()
        script.tick()
        assert periods(script) == []

    def test_what_is_used_at_once_stays(self, script):
        saved = script.storage(100)
        script.op(makes=[saved])
        script.pack(saved)
        script.unpack(saved)
        script.op(uses=[saved])
        assert periods(script) == []

    def test_small_ones_stay(self, script):
        small, large = script.storage(99), script.storage(100)
        for saved in (small, large):
            self.save_and_use(script, saved, made=True)
        assert [storage for storage, _, _ in periods(script, min_nbytes=100)] == [large]

    def test_empty_ones_stay(self, script):
        self.save_and_use(script, script.storage(0), made=True)
        assert periods(script, min_nbytes=0) == []

    def test_in_order_of_being_free(self, script):
        saved = [script.storage(100) for _ in range(3)]
        script.op(makes=saved)
        for storage in saved:
            script.pack(storage)
        script.op()
        for storage in saved:
            script.unpack(storage)
            script.op(uses=[storage])
        assert periods(script) == [(0, 1, 3), (1, 2, 4), (2, 3, 5)]

    @staticmethod
    def save_and_use(script, saved, *, made):
        script.op(makes=[saved] if made else [], uses=[saved])
        script.pack(saved)
        script.op()
        script.tick()
        script.op()
        script.unpack(saved)
        script.op(uses=[saved])


class TestFloor:
    def test_is_the_peak_with_every_candidate_away(self, hill):
        problem = build_problem(hill, min_nbytes=1)
        assert (problem.peak_nbytes, problem.floor_nbytes()) == (200, 100)

    def test_what_runs_before_the_first_event_is_part_of_it(self, script):
        script.op(temporary=900)
        script.tick()
        script.op(temporary=300)
        problem = build_problem(script.trace(), min_nbytes=1)
        assert (problem.lead_nbytes, problem.peak_nbytes, problem.floor_nbytes()) == (900, 900, 900)

    def test_storages_that_are_free_in_an_empty_segment_lower_a_peak_right_after_it(self, script):
        first, second = script.storage(100), script.storage(100)
        script.op(makes=[first, second])
        script.pack(first)
        script.pack(second)
        script.tick()
        script.op(temporary=200)
        script.tick()
        script.op()
        for saved in (second, first):
            script.unpack(saved)
            script.op(uses=[saved], frees=[saved])
        assert build_problem(script.trace(), min_nbytes=1).floor_nbytes() == 200

    def test_needs_are_not_changed(self, hill):
        problem = build_problem(hill, min_nbytes=1)
        problem.floor_nbytes()
        assert np.array_equal(problem.need_nbytes, segment_needs(hill))
