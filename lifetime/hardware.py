"""What a machine can do, as numbers a planner needs.

Covers the record and its file. It does not measure (``io_backend`` and ``teraio.measure_hardware`` do). Rates that can
hold at once obey ``r <= R``, ``w <= W`` and ``r/R + w/W <= 2 * mixed_factor``.
"""

import dataclasses
import json
import math
import numbers
from pathlib import Path

from lifetime.errors import TraceError


@dataclasses.dataclass(frozen=True, slots=True)
class Hardware:
    """Speeds and sizes of one training device and its SSDs."""

    read_bytes_per_s: float
    """SSD to device."""
    write_bytes_per_s: float
    """Device to SSD."""
    latency_s: float = 0.0
    """Seconds that a request takes beyond its bytes."""
    mixed_factor: float = 1.0
    """1.0: reads and writes do not disturb each other; 0.5: they share one channel."""
    compute_factor: float = 1.0
    """Share of compute speed kept while I/O runs."""
    host_bytes_per_s: float = 0.0
    """Device to host memory and back, 0 for none."""
    device_nbytes: int = 0
    """Memory of the training device, 0 for unknown."""
    host_nbytes: int = 0
    """Host memory that may hold offloaded tensors."""
    peak_flops: float = 0.0
    """Operations per second of the training device, 0 for unknown."""
    memory_bytes_per_s: float = 0.0
    """Speed of the training device's memory, 0 for unknown."""
    source: str = ""
    """Where the numbers come from: a measurement, a data sheet."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "source":
                if not isinstance(value, str):
                    raise TraceError(f"Hardware.source must be a text, got {value!r}")
            elif isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise TraceError(f"Hardware.{field.name} must be a number, got {value!r}")
            elif not math.isfinite(value) or value < 0:
                raise TraceError(f"Hardware.{field.name} must be finite and not negative, got {value!r}")
        for name in ("read_bytes_per_s", "write_bytes_per_s"):
            if getattr(self, name) == 0:
                raise TraceError(f"Hardware.{name} must be above 0 bytes per second")
        for name in ("mixed_factor", "compute_factor"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise TraceError(f"Hardware.{name} must be above 0 and at most 1, got {value!r}")

    def save(self, path: str | Path) -> None:
        """Write the record as JSON."""
        text = json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True, default=float)  # numpy's numbers, too
        Path(path).write_text(f"{text}\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Hardware":
        """Read a record that `save` wrote.

        Raises:
            TraceError: The file is not such a record.
            OSError: The file cannot be read.
        """
        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(**fields)
        except (ValueError, TypeError, RecursionError) as error:
            raise TraceError(f"{path} is not a hardware record written by teraio: {error}") from error
