"""What the benchmark measures: a contender, and why one could not be had.

Covers the protocol and the errors. ``fio`` and ``worker_process`` implement it.
Does not know what contenders there are: ``lineup`` does.
Must stay true: a contender that cannot run says why in words that a table can show, and the others go on.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from .workers.case import Case
from .workers.clock import Measurement

Family = Literal["teraio", "fio", "peer"]


class ContenderError(Exception):
    """A contender cannot be opened, or could not do a case; ``str()`` is the reason, one line."""


class Contender(Protocol):
    """Something whose I/O is measured. One case is prepared at a time."""

    name: str
    family: Family
    description: str
    """One line: version and settings."""

    def prepare(self, case: Case) -> None:
        """Make everything that a measurement needs; raises ``ContenderError``."""

    def measure(self) -> Measurement:
        """Run the prepared case once; raises ``ContenderError``."""

    def release(self) -> None:
        """Drop what ``prepare`` made; raises ``ContenderError``."""

    def close(self) -> None:
        """Give everything back; never raises."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A contender that could not be opened."""

    name: str
    family: Family
    reason: str
