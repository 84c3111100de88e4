"""What a session did: the numbers and the table.

Covers the record. Numbers come from the engine, the store and the iteration controller; drawing for terminals beyond
plain text is the tools' business.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from teraio.sizes import format_nbytes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A snapshot. Bytes are totals since entry unless the name says per step; times are seconds."""

    iterations: int
    """Completed training iterations."""
    budget_nbytes: int
    peak_nbytes: int
    """Most bytes of tensor storage resident at any time since entry."""
    unlimited_peak_nbytes: int
    """What the peak would have been without a limit; 0 until an iteration was recorded."""
    unseen_nbytes: int
    """Anonymous memory of the process that grew beyond tensors, slabs and state: kernels' scratch, the interpreter."""
    written_nbytes: int
    read_nbytes: int
    stall_s: float
    """Time compute waited for transfers."""
    written_nbytes_per_step: int
    """Median of the planned steps, of all steps while there are none."""
    read_nbytes_per_step: int
    stall_s_per_step: float
    step_s: float
    """Median step time, from boundary to boundary."""
    step_times_s: tuple[float, ...]
    """The last 1000 steps."""
    fraction_of_ideal: float
    """Estimate: step time less stall, over step time."""
    predicted_step_s: float
    predicted_peak_nbytes: int
    paths: Mapping[str, int]
    """Bytes by transport."""
    skipped: Mapping[str, int]
    """Bytes of saved tensors that stayed resident, by reason."""
    events: tuple[str, ...]
    """Fallbacks, warnings, advice."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            name: dict(value) if isinstance(value, Mapping) else list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }

    def __str__(self) -> str:
        rows = [
            ("iterations", f"{self.iterations}"),
            ("budget", format_nbytes(self.budget_nbytes)),
            ("peak", format_nbytes(self.peak_nbytes)),
            (
                "peak without a limit",
                format_nbytes(self.unlimited_peak_nbytes) if self.unlimited_peak_nbytes else "not known yet",
            ),
            ("step", f"{self.step_s:.3f} s"),
            ("stall per step", f"{self.stall_s_per_step:.3f} s"),
            ("fraction of ideal", f"{self.fraction_of_ideal:.3f} (estimated)"),
            ("written", f"{format_nbytes(self.written_nbytes)} ({format_nbytes(self.written_nbytes_per_step)} a step)"),
            ("read", f"{format_nbytes(self.read_nbytes)} ({format_nbytes(self.read_nbytes_per_step)} a step)"),
            ("paths", ", ".join(f"{path} {format_nbytes(n)}" for path, n in self.paths.items()) or "none"),
            ("stayed resident", ", ".join(f"{why} {format_nbytes(n)}" for why, n in self.skipped.items()) or "nothing"),
        ]
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value}" for name, value in rows]
        return "\n".join([*lines, *(f"note: {text}" for text in self.events)])
