"""What one measurement moves: the workload, the size of its buffers and how many are in flight.

Covers the case and its streams, as numbers that travel to a worker as JSON.
Does not choose cases: the parent's ``cases`` does.
Must stay true: every contender takes its bytes, sizes and depths from here, so that all do the same work.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Workload = Literal["read", "write", "mixed"]
Operation = Literal["read", "write"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """Transfers of one direction over a range of a case's buffers."""

    operation: Operation
    first: int
    """Number of its first buffer; the stream's place in a file begins at ``first * buffer_nbytes``."""
    num_buffers: int
    depth: int
    """Transfers in flight at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One measurement, the same for every contender."""

    workload: Workload
    buffer_nbytes: int
    depth: int
    """Transfers in flight at most, both directions together."""
    total_nbytes: int
    """Bytes moved, a multiple of two buffers."""

    @property
    def num_buffers(self) -> int:
        """Transfers of a measurement."""
        return self.total_nbytes // self.buffer_nbytes

    @property
    def streams(self) -> tuple[Stream, ...]:
        """What runs at the same time: one stream, or, mixed, one per direction over a half of the bytes each."""
        if self.workload != "mixed":
            return (Stream(operation=self.workload, first=0, num_buffers=self.num_buffers, depth=self.depth),)
        half, depth = self.num_buffers // 2, max(1, self.depth // 2)
        return (
            Stream(operation="read", first=0, num_buffers=half, depth=depth),
            Stream(operation="write", first=half, num_buffers=half, depth=depth),
        )

    def to_dict(self) -> dict[str, Any]:
        """The case as JSON can hold it; ``Case(**values)`` is the way back."""
        return asdict(self)
