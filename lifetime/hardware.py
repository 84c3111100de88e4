"""What a machine can do, as numbers a planner needs.

Covers the record and its file. It does not measure (``io_backend`` and ``teraio.measure_hardware`` do). Rates that can
hold at once obey ``r <= R``, ``w <= W`` and ``r/R + w/W <= 2 * mixed_factor``.
"""

import dataclasses
import json
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
    host_nbytes: int = 0
    peak_flops: float = 0.0
    memory_bytes_per_s: float = 0.0
    source: str = ""
    """Where the numbers come from: a measurement, a data sheet."""

    def __post_init__(self) -> None:
        for name in ("read_bytes_per_s", "write_bytes_per_s"):
            value = getattr(self, name)
            if not value > 0:
                raise TraceError(f"Hardware.{name} must be above 0 bytes per second, got {value!r}")
        for name in ("mixed_factor", "compute_factor"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise TraceError(f"Hardware.{name} must be above 0 and at most 1, got {value!r}")
        if self.latency_s < 0:
            raise TraceError(f"Hardware.latency_s must not be negative, got {self.latency_s!r} s")

    def save(self, path: str | Path) -> None:
        """Write the record as JSON."""
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Hardware":
        """Read a record that `save` wrote.

        Raises:
            TraceError: The file is not such a record.
            OSError: The file cannot be read.
        """
        try:
            fields = json.loads(Path(path).read_text())
            return cls(**fields)
        except (json.JSONDecodeError, UnicodeDecodeError, TypeError) as error:
            raise TraceError(f"{path} is not a hardware record written by teraio: {error}") from error
