"""The demo's order of segments, its numbers and its verdict, from records made up here; and how they are shown."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from tools.demo.comparison import ORDER, compare, counted_times_s, default_budget_nbytes, num_steps, unseen_nbytes
from tools.demo.render import outcome, render_result, render_segment
from tools.demo.result import DemoResult, has_succeeded
from tools.demo.spec import SegmentSpec
from tools.demo.worker_process import OnStep, SegmentRecord

MIB = 1 << 20
PLAIN_PEAK_NBYTES = 1000 * MIB
BUDGET_NBYTES = 580 * MIB

SPEC = SegmentSpec(mode="teraio", steps=5)


def ignore_step(spec: SegmentSpec, num_done: int, step_s: float) -> None:
    """No progress bar here."""


class FakeRunner:
    """Answers each segment with a made-up record, changed by the attributes set on it."""

    def __init__(self) -> None:
        self.specs: list[SegmentSpec] = []
        self.plain_step_s = [2.0, 2.0]
        self.changes: dict[int, dict[str, Any]] = {}
        """Fields to change in the record of the segment with this number (0 is the measuring one)."""

    def __call__(self, spec: SegmentSpec, on_step: OnStep) -> SegmentRecord:
        """Answer one segment."""
        number = len(self.specs)
        self.specs.append(spec)
        step_s = self.plain_step_s[number // 3] if spec.mode == "plain" else 2.5
        record = SegmentRecord(
            spec=spec,
            losses=[(5.5 - step / 8).hex() for step in range(spec.steps)],
            step_times_s=[9.0, 9.0, 9.0][: spec.steps] + [step_s] * (spec.steps - 3),
            rss_baseline_nbytes=200 * MIB,
            rss_peak_nbytes=(1250 if spec.mode == "plain" else 800) * MIB,
            weights_sha256="ab" * 32,
            peak_nbytes=PLAIN_PEAK_NBYTES if spec.mode == "plain" else 540 * MIB,
            torch="2.99",
            threads=2,
        )
        if spec.mode == "teraio":
            record.session_peak_nbytes = 545 * MIB
            record.report = {
                "written_nbytes": 2000 * MIB,
                "read_nbytes": 1500 * MIB,
                "stall_s": 0.25,
                "paths": {"posix-direct": 3400 * MIB, "host": 0, "posix-buffered": 100 * MIB},
                "events": ["advice"],
            }
        return replace(record, **self.changes.get(number, {}))


def compared(runner: FakeRunner | None = None) -> DemoResult:
    """Compare with made-up records."""
    return compare(SPEC, ignore_step, run=runner or FakeRunner())


def test_the_measuring_segment_comes_first_and_then_the_modes_in_turn() -> None:
    runner = FakeRunner()
    compared(runner)
    measuring, *timed = runner.specs
    assert measuring.exact_malloc
    assert measuring.mode == "plain"
    assert tuple(spec.mode for spec in timed) == ORDER == ("plain", "teraio", "plain", "teraio")
    assert {replace(spec, mode="plain", measuring_steps=0) for spec in timed} == {timed[0]}
    assert [spec.measuring_steps > 0 for spec in runner.specs] == [True, False, True, False, True]
    assert not any(spec.exact_malloc for spec in timed)
    assert sum(spec.steps + spec.measuring_steps for spec in runner.specs) == num_steps(SPEC)


def test_the_budget_is_a_share_of_the_plain_peak_in_whole_mib() -> None:
    runner = FakeRunner()
    assert compared(runner)["budget_nbytes"] == BUDGET_NBYTES
    assert {spec.budget for spec in runner.specs[1:]} == {BUDGET_NBYTES}
    assert default_budget_nbytes(PLAIN_PEAK_NBYTES + MIB) == BUDGET_NBYTES
    assert default_budget_nbytes(1000) == MIB


def test_a_given_budget_is_the_one_the_first_worker_understood() -> None:
    runner = FakeRunner()
    runner.changes[0] = {"budget_nbytes": 600 * MIB}
    result = compare(replace(SPEC, budget="600MiB"), ignore_step, run=runner)
    assert runner.specs[0].budget == "600MiB"
    assert result["budget_nbytes"] == 600 * MIB


def test_the_learning_steps_do_not_count() -> None:
    result = compared()
    assert result["plain"]["step_s"] == 2.0
    assert result["teraio"]["step_s"] == 2.5
    assert result["fraction_of_ideal"] == pytest.approx(0.8)
    assert result["plain"]["step_times_s"][0] == [9.0, 9.0, 9.0, 2.0, 2.0]


def test_a_short_segment_keeps_its_last_step() -> None:
    record = SegmentRecord(spec=SPEC, step_times_s=[3.0, 2.0])
    assert counted_times_s(record) == [2.0]


def test_moved_bytes_are_summed_over_the_segments() -> None:
    result = compared()
    assert result["written_nbytes"] == 4000 * MIB
    assert result["written_nbytes_per_step"] == 400 * MIB
    assert result["read_nbytes_per_step"] == 300 * MIB
    assert result["stall_s"] == pytest.approx(0.5)
    assert result["stall_s_per_step"] == pytest.approx(0.05)
    assert result["paths"] == {"posix-direct": 6800 * MIB, "host": 0, "posix-buffered": 200 * MIB}
    assert result["events"] == ["advice"]


def test_unseen_is_growth_beyond_the_tensors_and_never_negative() -> None:
    assert compared()["unseen_nbytes"] == 50 * MIB
    record = FakeRunner()(SPEC, ignore_step)
    assert unseen_nbytes(replace(record, peak_nbytes=5000 * MIB)) == 0
    assert unseen_nbytes(replace(record, peak_nbytes=500 * MIB, device_peak_nbytes=520 * MIB)) == 20 * MIB


@pytest.mark.parametrize(("second_s", "noisy"), [(2.0, False), (2.09, False), (2.11, True), (1.5, True)])
def test_plain_runs_that_differ_are_noisy(second_s: float, noisy: bool) -> None:
    runner = FakeRunner()
    runner.plain_step_s = [2.0, second_s]
    assert compared(runner)["noisy"] is noisy


def test_success() -> None:
    result = compared()
    assert result["bit_identical"]
    assert result["plain_repeats"]
    assert result["within_budget"]
    assert has_succeeded(result)
    assert "same bits" in outcome(result)


@pytest.mark.parametrize("change", [{"weights_sha256": "cd" * 32}, {"losses": [(1.0).hex()] * 5}])
@pytest.mark.parametrize(("number", "plain_repeats"), [(2, True), (4, True), (3, False)])
def test_other_bits_fail(number: int, plain_repeats: bool, change: dict[str, Any]) -> None:
    runner = FakeRunner()
    runner.changes[number] = change
    result = compared(runner)
    assert not result["bit_identical"]
    assert result["plain_repeats"] is plain_repeats
    assert result["weights_equal"] is ("losses" in change)
    assert not has_succeeded(result)
    assert ("differ from the plain run" in outcome(result)) is plain_repeats


@pytest.mark.parametrize("name", ["peak_nbytes", "session_peak_nbytes"])
def test_a_peak_over_the_budget_fails(name: str) -> None:
    runner = FakeRunner()
    runner.changes[4] = {name: BUDGET_NBYTES}
    assert has_succeeded(compared(runner))
    runner = FakeRunner()
    runner.changes[4] = {name: BUDGET_NBYTES + 1}
    result = compared(runner)
    assert not has_succeeded(result)
    assert "The budget was not kept" in outcome(result)


def rendered(result: DemoResult) -> str:
    """What a person would see on a wide terminal."""
    console = Console(file=io.StringIO(), width=120)
    render_result(result, console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_a_saved_result_can_be_shown() -> None:
    text = rendered(json.loads(json.dumps(compared())))
    for part in (
        "1000 MiB",  # plain's peak
        "540 MiB",  # teraio's
        "1.03 GiB",  # plain's growth
        "600 MiB",  # teraio's
        "2.00 s",
        "2.50 s",
        "580 MiB",  # budget
        "400 MiB a step, 3.91 GiB in all",
        "300 MiB a step, 2.93 GiB in all",
        "50.0 ms a step, 500.0 ms in all",
        "0.800",
        "posix-direct 6.64 GiB, posix-buffered 200 MiB",
        "abababababab",
        "torch 2.99",
        "note: advice",
        "at 80% of the plain speed.",
    ):
        assert part in text
    assert "host" not in text
    assert "busy" not in text


def test_a_noisy_result_says_so() -> None:
    runner = FakeRunner()
    runner.plain_step_s = [2.0, 3.0]
    assert "busy" in rendered(compared(runner))


def test_one_segment_shows_losses_and_hash() -> None:
    console = Console(file=io.StringIO(), width=80)
    render_segment(FakeRunner()(SPEC, ignore_step), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"step 1: loss 5.500000 ({(5.5).hex()})" in text
    assert "ab" * 32 in text
    assert "545 MiB" in text
