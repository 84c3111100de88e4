"""The course of the benchmark: in each round of a case, every contender runs once, in an order that rotates.

Covers the order, and what happens when a contender fails: it is out of the case, and the others go on.
Does not start or stop contenders (``lineup`` does) and computes nothing (``result`` does).
Must stay true: whatever a contender needs is prepared before the first round of its case, outside its clock.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

from .contender import Contender, ContenderError
from .result import CaseResult, Row
from .workers.case import Case

Item = TypeVar("Item")

OnMeasured = Callable[[Case, str], None]
"""Called after each measurement (also a failed one) with the case and the contender's name."""


def rotated(items: Sequence[Item], round_number: int) -> list[Item]:
    """The items in the order of a round: each round begins one further, so that nobody always runs first."""
    if not items:
        return []
    start = round_number % len(items)
    return [*items[start:], *items[:start]]


def run_case(case: Case, contenders: Sequence[Contender], num_rounds: int, on_measured: OnMeasured) -> CaseResult:
    """Measure all contenders in one case, in turns. Blocks.

    Args:
        case: What each moves in a measurement.
        contenders: Open ones.
        num_rounds: Measurements of each.
        on_measured: Called after each measurement.

    Returns:
        A row per contender, in their order.
    """
    rows = {contender.name: Row(name=contender.name, family=contender.family) for contender in contenders}
    try:
        for contender in contenders:
            _attempt(rows[contender.name], functools.partial(contender.prepare, case))
        for round_number in range(num_rounds):
            for contender in rotated(contenders, round_number):
                row = rows[contender.name]
                if row.failure is None:
                    _attempt(row, functools.partial(_measure, contender, row))
                on_measured(case, contender.name)
    finally:
        for contender in contenders:
            _attempt(rows[contender.name], contender.release)
    return CaseResult(case=case, rows=list(rows.values()))


def _measure(contender: Contender, row: Row) -> None:
    """One measurement, into the row."""
    row.measurements.append(contender.measure())


def _attempt(row: Row, act: Callable[[], object]) -> None:
    """Act; the first failure is kept in the row."""
    try:
        act()
    except ContenderError as error:
        row.failure = row.failure or str(error)
