"""The numbers drawn from measurements, and what people and programs get to see of them.

Covers statistics, JSON, tables and Markdown. Does not cover measuring.
"""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from tools.bench.contender import Family, Missing
from tools.bench.render import render_result, to_markdown
from tools.bench.result import BenchResult, CaseResult, Row, Spread
from tools.bench.workers.case import Case
from tools.bench.workers.clock import Measurement

CASE = Case(workload="read", buffer_nbytes=500_000_000, depth=2, total_nbytes=1_000_000_000)


def row_of(name: str, family: Family, *times_s: float, failure: str | None = None) -> Row:
    """A row whose processor time is a tenth of the elapsed time."""
    measurements = [Measurement(time_s, time_s / 10) for time_s in times_s]
    return Row(name=name, family=family, measurements=measurements, failure=failure)


OURS = row_of("teraio, huge pages", "teraio", 1.0, 0.5, 2.0)
SLOW_FIO = row_of("fio slow", "fio", 4.0, 2.0, 4.0)
FAST_FIO = row_of("fio fast", "fio", 0.8, 0.8, 0.1)
BROKEN_FIO = row_of("fio broken", "fio", 0.1, failure="no such | engine")


@pytest.fixture
def case() -> CaseResult:
    return CaseResult(case=CASE, rows=[OURS, SLOW_FIO, FAST_FIO, BROKEN_FIO])


@pytest.fixture
def bench(case: CaseResult) -> BenchResult:
    return BenchResult(
        machine={"cores": "2", "kernel": "6.1"},
        num_rounds=3,
        contenders={"teraio, huge pages": "posix-direct", "fio slow": "ioengine=slow"},
        missing=[Missing("DeepSpeed, locked tensors", "peer", "not asked for: [--deepspeed]")],
        cases=[case],
    )


def test_spread_is_median_and_range() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([1.0, 2.0]).median == 1.5


def test_throughput_and_cost_of_a_row(case: CaseResult) -> None:
    assert case.gb_per_s(OURS) == Spread(1.0, 0.5, 2.0)
    assert case.cpu_s_per_gb(OURS) == Spread(0.1, 0.05, 0.2)


def test_ratio_is_to_the_best_median_of_fio(case: CaseResult) -> None:
    assert case.best_fio is FAST_FIO
    assert case.ratio_to_best_fio(OURS) == pytest.approx(0.8)
    assert case.ratio_to_best_fio(FAST_FIO) == 1.0
    assert case.ratio_to_best_fio(BROKEN_FIO) is None


def test_without_fio_there_is_no_ratio() -> None:
    case = CaseResult(case=CASE, rows=[OURS, BROKEN_FIO])
    assert case.best_fio is None
    assert case.ratio_to_best_fio(OURS) is None
    assert case.to_dict()["rows"][0]["ratio_to_best_fio"] is None


def test_json_holds_every_measurement_and_every_reason(bench: BenchResult) -> None:
    values = json.loads(json.dumps(bench.to_dict()))
    assert values["machine"]["cores"] == "2"
    assert values["missing"] == {"DeepSpeed, locked tensors": "not asked for: [--deepspeed]"}
    (case,) = values["cases"]
    assert case["best_fio"] == "fio fast"
    assert case["rows"][0]["gb_per_s"] == {"median": 1.0, "min": 0.5, "max": 2.0, "rounds": [1.0, 2.0, 0.5]}
    assert case["rows"][3]["failure"] == "no such | engine"
    assert "gb_per_s" not in case["rows"][3]


def test_outcome_is_teraios_alone(bench: BenchResult) -> None:
    assert bench.teraio_succeeded
    bench.missing.append(Missing("teraio, torch.empty", "teraio", "torch is gone"))
    assert not bench.teraio_succeeded
    bench.missing.pop()
    bench.cases[0].rows.append(row_of("teraio, torch.empty", "teraio", failure="lost"))
    assert not bench.teraio_succeeded


@pytest.mark.parametrize("form", ["terminal", "markdown"])
def test_people_see_numbers_and_reasons(bench: BenchResult, form: str) -> None:
    if form == "markdown":
        text = to_markdown(bench)
    else:
        console = Console(file=io.StringIO(), width=200)
        render_result(bench, console)
        assert isinstance(console.file, io.StringIO)
        text = console.file.getvalue()
    for expected in (
        *("cores", "6.1", "ioengine=slow"),
        "missing: not asked for: [--deepspeed]",
        *("0.50 – 2.00", "0.100", "0.80"),
        "fio broken: failed (no such",
        *("3 rounds", "fio fast"),
    ):
        assert expected in text


def test_markdown_tables_have_equal_columns(bench: BenchResult) -> None:
    for block in to_markdown(bench).split("\n\n"):
        lines = [line for line in block.splitlines() if line.startswith("|")]
        assert len({line.replace("\\|", "").count("|") for line in lines}) <= 1
