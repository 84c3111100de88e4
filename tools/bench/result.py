"""What was measured, and the numbers drawn from it.

Covers medians, ranges, the comparison with the best of fio, and the result as JSON.
Does not measure (``rounds``) or lay anything out (``render``).
Must stay true: GB are 10^9 bytes, and a ratio is one of medians over the same rounds.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .contender import Family, Missing
from .workers.case import Case
from .workers.clock import Measurement

GB = 1e9


@dataclass(frozen=True, slots=True)
class Spread:
    """A number over the rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """The spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(kw_only=True, slots=True)
class Row:
    """One contender in one case."""

    name: str
    family: Family
    measurements: list[Measurement] = field(default_factory=list)
    """One per round."""
    failure: str | None = None
    """Why it did not finish the case; its numbers do not count then."""

    @property
    def succeeded(self) -> bool:
        """Whether there are numbers."""
        return self.failure is None and bool(self.measurements)


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """One case: a row per contender, measured in turns."""

    case: Case
    rows: list[Row]

    def gb_per_s(self, row: Row) -> Spread:
        """Throughput of a row that succeeded."""
        return Spread.of(self._speeds(row))

    def cpu_s_per_gb(self, row: Row) -> Spread:
        """Processor seconds a GB of a row that succeeded."""
        return Spread.of(self._costs(row))

    @property
    def best_fio(self) -> Row | None:
        """The row of fio with the highest median throughput; ``None`` without any."""
        rows = [row for row in self.rows if row.family == "fio" and row.succeeded]
        return max(rows, key=lambda row: self.gb_per_s(row).median, default=None)

    def ratio_to_best_fio(self, row: Row) -> float | None:
        """Median throughput as a share of the best of fio's; ``None`` where one of the two is missing."""
        best = self.best_fio
        if best is None or not row.succeeded:
            return None
        return self.gb_per_s(row).median / self.gb_per_s(best).median

    def to_dict(self) -> dict[str, Any]:
        """The case with every measurement, as JSON can hold it."""
        best = self.best_fio
        return {
            **self.case.to_dict(),
            "best_fio": None if best is None else best.name,
            "rows": [self._row_to_dict(row) for row in self.rows],
        }

    def _row_to_dict(self, row: Row) -> dict[str, Any]:
        values: dict[str, Any] = {"contender": row.name, "family": row.family, "failure": row.failure}
        if row.succeeded:
            values["gb_per_s"] = _to_dict(self.gb_per_s(row), self._speeds(row))
            values["cpu_s_per_gb"] = _to_dict(self.cpu_s_per_gb(row), self._costs(row))
            values["ratio_to_best_fio"] = self.ratio_to_best_fio(row)
        return values

    def _speeds(self, row: Row) -> list[float]:
        return [self.case.total_nbytes / GB / each.elapsed_s for each in row.measurements]

    def _costs(self, row: Row) -> list[float]:
        return [each.cpu_s / (self.case.total_nbytes / GB) for each in row.measurements]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchResult:
    """The whole benchmark."""

    machine: dict[str, str]
    """Facts about the machine and the versions, by name."""
    num_rounds: int
    contenders: dict[str, str]
    """Description of each contender that ran, by name."""
    missing: list[Missing]
    cases: list[CaseResult]

    @property
    def teraio_succeeded(self) -> bool:
        """Whether each of teraio's own contenders finished each case."""
        return not any(missing.family == "teraio" for missing in self.missing) and all(
            row.succeeded for case in self.cases for row in case.rows if row.family == "teraio"
        )

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON can hold it."""
        return {
            "machine": self.machine,
            "rounds": self.num_rounds,
            "contenders": self.contenders,
            "missing": {missing.name: missing.reason for missing in self.missing},
            "cases": [case.to_dict() for case in self.cases],
        }


def _to_dict(spread: Spread, rounds: list[float]) -> dict[str, Any]:
    """A spread and what it came from."""
    return {"median": spread.median, "min": spread.least, "max": spread.most, "rounds": rounds}
