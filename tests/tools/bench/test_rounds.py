"""The order in which contenders run, and that one that fails does not stop the others.

Covers the course of a case with scripted contenders. Does not cover numbers: ``test_result`` does.
"""

from __future__ import annotations

import pytest

from tools.bench.cases import all_cases
from tools.bench.contender import ContenderError, Family
from tools.bench.rounds import rotated, run_case
from tools.bench.workers.case import Case
from tools.bench.workers.clock import Measurement

CASE = Case(workload="read", buffer_nbytes=1 << 20, depth=2, total_nbytes=8 << 20)


class Scripted:
    """A contender that writes down its calls and fails in the one it is told to."""

    family: Family = "fio"
    description = "scripted"

    def __init__(self, name: str, calls: list[str], fails_in: str = "") -> None:
        self.name = name
        self._calls = calls
        self._fails_in = fails_in

    def prepare(self, case: Case) -> None:
        self._do("prepare")

    def measure(self) -> Measurement:
        self._do("measure")
        return Measurement(1.0, 0.5)

    def release(self) -> None:
        self._do("release")

    def close(self) -> None:
        self._do("close")

    def _do(self, what: str) -> None:
        self._calls.append(f"{what} {self.name}")
        if what == self._fails_in:
            raise ContenderError(f"{what} went wrong")


def test_each_round_begins_one_further() -> None:
    assert [rotated("abc", number) for number in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]
    assert rotated("", 3) == []


def test_rounds_interleave_and_everything_is_prepared_before() -> None:
    calls: list[str] = []
    measured: list[str] = []
    contenders = [Scripted(name, calls) for name in "abc"]
    result = run_case(CASE, contenders, 2, lambda case, name: measured.append(name))
    assert [call for call in calls if not call.startswith("measure")] == [
        *("prepare a", "prepare b", "prepare c"),
        *("release a", "release b", "release c"),
    ]
    assert calls[3:-3] == [f"measure {name}" for name in "abcbca"]
    assert measured == list("abcbca")
    assert [(row.name, len(row.measurements), row.failure) for row in result.rows] == [
        (name, 2, None) for name in "abc"
    ]


@pytest.mark.parametrize(("fails_in", "num_measured"), [("prepare", 0), ("measure", 1), ("release", 3)])
def test_who_fails_is_out_of_the_case_and_the_others_go_on(fails_in: str, num_measured: int) -> None:
    calls: list[str] = []
    result = run_case(CASE, [Scripted("a", calls, fails_in), Scripted("b", calls)], 3, lambda case, name: None)
    bad, good = result.rows
    assert bad.failure == f"{fails_in} went wrong"
    assert not bad.succeeded
    assert calls.count("measure a") == num_measured
    assert calls.count("release a") == 1
    assert good.succeeded
    assert len(good.measurements) == 3


def test_other_errors_are_bugs_and_still_release() -> None:
    calls: list[str] = []

    def interrupt(case: Case, name: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_case(CASE, [Scripted("a", calls), Scripted("b", calls)], 1, interrupt)
    assert calls[-2:] == ["release a", "release b"]


@pytest.mark.parametrize("quick", [False, True])
def test_every_case_moves_whole_buffers_each_way(quick: bool) -> None:
    cases = all_cases(quick=quick)
    assert len({(case.workload, case.buffer_nbytes) for case in cases}) == len(cases) == 9
    for case in cases:
        assert sum(stream.num_buffers for stream in case.streams) * case.buffer_nbytes == case.total_nbytes
        assert sum(stream.depth for stream in case.streams) == case.depth
        places = [
            number for stream in case.streams for number in range(stream.first, stream.first + stream.num_buffers)
        ]
        assert places == list(range(case.num_buffers))
        assert Case(**case.to_dict()) == case
