"""The simulator, on iterations worked out on paper."""

import pytest

from lifetime import Hardware
from teraio.planner.plan import Move, MoveKind
from teraio.planner.problem import build_problem
from teraio.planner.simulator import replay


def offload(storage, trigger, nbytes=100):
    return Move(MoveKind.OFFLOAD, storage, nbytes, trigger, trigger + 1)


def reload(storage, trigger, deadline, nbytes=100):
    return Move(MoveKind.RELOAD, storage, nbytes, trigger, deadline)


def run(trace, moves, hardware, budget):
    return replay(build_problem(trace, min_nbytes=1), moves, hardware, budget)


def near(transfers):
    return [(kind, storage, pytest.approx(start), pytest.approx(end)) for kind, storage, start, end in transfers]


class TestHill:
    """One storage, one peak: see the fixture."""

    def test_without_moves_nothing_waits(self, hill, disk):
        result = run(hill, [], disk, 200)
        assert (result.step_s, result.stall_s, result.peak_nbytes) == (5, 0, 200)
        assert (result.written_nbytes, result.read_nbytes, result.timeline) == (0, 0, ())

    def test_the_peak_may_exceed_the_budget(self, hill, disk):
        assert run(hill, [], disk, 150).peak_nbytes == 200

    def test_late_write_and_late_read_are_both_waited_for(self, hill, disk):
        result = run(hill, [offload(0, 1), reload(0, 3, 3)], disk, 100)
        assert (result.step_s, result.stall_s) == pytest.approx((7, 2))
        assert (result.peak_nbytes, result.written_nbytes, result.read_nbytes) == (100, 100, 100)
        assert list(result.timeline) == near([("offload", 0, 2, 3), ("reload", 0, 5, 6)])

    def test_moves_in_good_time_cost_nothing(self, hill, disk):
        result = run(hill, [offload(0, 0), reload(0, 2, 3)], disk, 100)
        assert (result.step_s, result.stall_s, result.peak_nbytes) == (pytest.approx(5), pytest.approx(0), 100)

    def test_half_a_write_in_good_time_is_waited_for_half_a_second(self, hill):
        result = run(hill, [offload(0, 0), reload(0, 2, 3)], Hardware(100.0, 100 / 1.5), 100)
        assert (result.step_s, result.stall_s) == pytest.approx((5.5, 0.5))

    def test_memory_is_not_waited_for_where_the_budget_has_room(self, hill, disk):
        result = run(hill, [offload(0, 1), reload(0, 2, 3)], disk, 200)
        assert (result.stall_s, result.peak_nbytes) == (pytest.approx(0), 200)

    def test_reload_waits_for_its_memory(self, hill, disk):
        """Triggered at the peak, where it does not fit, it starts at the event after it."""
        result = run(hill, [offload(0, 0), reload(0, 1, 3)], disk, 100)
        assert result.peak_nbytes == 100
        assert list(result.timeline) == near([("offload", 0, 1, 2), ("reload", 0, 3, 4)])

    def test_drop_gives_memory_back_at_once_and_writes_nothing(self, hill, disk):
        result = run(hill, [Move(MoveKind.DROP, 0, 100, 1, 1), reload(0, 2, 3)], disk, 100)
        assert (result.stall_s, result.peak_nbytes) == (pytest.approx(0), 100)
        assert (result.written_nbytes, result.read_nbytes) == (0, 100)

    def test_used_while_its_write_runs_it_never_leaves(self, hill, disk):
        result = run(hill, [offload(0, 2), reload(0, 3, 3)], Hardware(100.0, 50.0), 200)
        assert (result.stall_s, result.written_nbytes, result.read_nbytes) == (0, 100, 0)

    def test_reload_without_an_offload_is_nothing(self, hill, disk):
        result = run(hill, [reload(0, 1, 3)], disk, 200)
        assert (result.stall_s, result.read_nbytes) == (0, 0)

    def test_moves_beyond_the_last_event_are_nothing(self, hill, disk):
        assert run(hill, [offload(0, 99)], disk, 200).written_nbytes == 0

    def test_compute_is_slower_while_the_disk_works(self, hill):
        """The write takes one second, in which half a second of work is done."""
        result = run(hill, [offload(0, 0)], Hardware(100.0, 100.0, compute_factor=0.5), 200)
        assert (result.step_s, result.stall_s) == (pytest.approx(5.5), 0)

    def test_latency_is_part_of_each_transfer(self, hill):
        result = run(hill, [offload(0, 1), reload(0, 3, 3)], Hardware(100.0, 100.0, latency_s=0.25), 100)
        assert result.stall_s == pytest.approx(2.5)


@pytest.fixture
def stack(script):
    """Three storages of 100 bytes, packed at events 0 to 2 and unpacked in reverse at 4 to 6, one operation each."""
    saved = [script.storage(100) for _ in range(3)]
    for storage in saved:
        script.op(makes=[storage])
        script.pack(storage)
    script.op()
    script.tick()
    script.op()
    for storage in reversed(saved):
        script.unpack(storage)
        script.op(uses=[storage], frees=[storage])
    return script.trace()


class TestQueues:
    def test_needs(self, stack):
        assert build_problem(stack, min_nbytes=1).need_nbytes.tolist() == [200, 300, 300, 300, 300, 200, 100]

    def test_writes_go_one_after_the_other(self, stack):
        moves = [offload(0, 1), offload(1, 2)]
        result = run(stack, moves, Hardware(100.0, 40.0), 300)
        assert list(result.timeline) == near([("offload", 0, 2, 4.5), ("offload", 1, 4.5, 7)])

    def test_making_room_waits_for_the_oldest_write_alone(self, stack):
        """At event 3 the segment needs 300 bytes: the first write frees enough."""
        result = run(stack, [offload(0, 3), offload(1, 3)], Hardware(100.0, 40.0), 200)
        assert result.stall_s == pytest.approx(2.5)
        assert result.peak_nbytes == 300  # events 1 and 2 could not be helped

    def test_write_that_has_not_begun_when_its_storage_is_used_is_given_up(self, stack):
        """The first write runs for 100 s; the second waits behind it until its storage is used."""
        result = run(stack, [offload(0, 1), offload(2, 3), reload(2, 4, 4)], Hardware(100.0, 1.0), 300)
        assert (result.stall_s, result.written_nbytes, result.read_nbytes) == (0, 100, 0)

    def test_reload_whose_write_is_late_holds_back_those_behind_it(self, stack):
        """Storage 0 is away at 2.5 s, storage 1 would be at 8 s, and is used where it is at 6 s, at event 5."""
        moves = [
            offload(0, 1, nbytes=100), Move(MoveKind.OFFLOAD, 1, 1000, 2, 3),
            Move(MoveKind.RELOAD, 1, 1000, 3, 5), reload(0, 4, 6),
        ]  # fmt: skip
        result = run(stack, moves, Hardware(100.0, 200.0), 10_000)
        reads = [(storage, start) for kind, storage, start, _ in result.timeline if kind == "reload"]
        assert reads == [(0, pytest.approx(6))]

    def test_read_that_the_program_waits_for_goes_first(self, stack):
        moves = [
            offload(0, 1), offload(1, 2), offload(2, 3),
            reload(0, 4, 6), reload(1, 4, 5), reload(2, 4, 4),
        ]  # fmt: skip
        result = run(stack, moves, Hardware(50.0, 10_000.0), 300)
        reads = [storage for kind, storage, _, _ in result.timeline if kind == "reload"]
        assert reads == [0, 2, 1]  # 0 was running already

    def test_read_and_write_at_once_at_full_speed(self, stack):
        result = run(
            stack, [offload(0, 1), offload(1, 3), reload(0, 3, 6)], Hardware(50.0, 50.0, mixed_factor=1.0), 300
        )
        assert list(result.timeline)[1:] == near([("offload", 1, 4, 6), ("reload", 0, 4, 6)])

    def test_read_and_write_at_once_share_a_half_duplex_disk(self, stack):
        """Both run from 4 s at half speed: one second of work takes two."""
        hardware = Hardware(100.0, 100.0, mixed_factor=0.5)
        result = run(stack, [offload(0, 1), offload(1, 3), reload(0, 3, 6)], hardware, 300)
        assert list(result.timeline)[1:] == near([("offload", 1, 4, 6), ("reload", 0, 4, 6)])

    def test_the_longer_one_speeds_up_when_it_is_alone(self, stack):
        """The write has 1 s of work, the read 2 s: shared until 6 s, then the read alone for one second more."""
        hardware = Hardware(50.0, 100.0, mixed_factor=0.5)
        result = run(stack, [offload(0, 1), offload(1, 3), reload(0, 3, 6)], hardware, 300)
        assert list(result.timeline)[1:] == near([("offload", 1, 4, 6), ("reload", 0, 4, 7)])

    def test_on_demand_read_makes_room_first(self, stack):
        """At event 4 the segment needs 300 bytes with storage 2 back: storage 0 must have left before it is read."""
        moves = [offload(2, 3), offload(0, 3), reload(2, 4, 4)]
        result = run(stack, moves, Hardware(100.0, 50.0), 200)
        assert list(result.timeline) == near([("offload", 2, 4, 6), ("offload", 0, 6, 8), ("reload", 2, 8, 9)])
        assert result.stall_s == pytest.approx(4)
