"""Counts of what a store has moved and how long it was busy.

Covers totals by direction and by transport, and the time in which at least one transfer of a direction ran.
It does not know about space (``extents`` does) nor about queued work (``workers`` does).

Rule: bytes count once a transfer has succeeded, before its ticket is done, so whoever waited sees them.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from io_backend.store import Operation


@dataclasses.dataclass(frozen=True, slots=True)
class TransferOutcome:
    """How one transfer went."""

    path: str
    """Transport used, e.g. ``posix-direct``."""
    bounced_nbytes: int = 0
    """Bytes copied through staging memory on the way."""


@dataclasses.dataclass(slots=True)
class DirectionTotals:
    """What one direction has done so far."""

    nbytes: int = 0
    num: int = 0
    busy_s: float = 0.0
    running: int = 0
    busy_since_s: float = 0.0


class Meter:
    """Collects the totals of one store.

    Thread safety: all methods from any thread; the lock is never held while anything else is called.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[Operation, DirectionTotals] = {"write": DirectionTotals(), "read": DirectionTotals()}
        self._paths: dict[str, int] = {}
        self._bounced_nbytes = 0

    def begin(self, operation: Operation) -> None:
        """A transfer starts."""
        now_s = time.monotonic()
        with self._lock:
            totals = self._totals[operation]
            if totals.running == 0:
                totals.busy_since_s = now_s
            totals.running += 1

    def end(self, operation: Operation, nbytes: int, outcome: TransferOutcome | None, *, counted: bool = True) -> None:
        """A transfer that began has ended; ``outcome`` is ``None`` if it failed, and its bytes do not count then.

        ``counted``: whether it adds to the number of transfers.
        """
        now_s = time.monotonic()
        with self._lock:
            totals = self._totals[operation]
            totals.running -= 1
            if totals.running == 0:
                totals.busy_s += now_s - totals.busy_since_s
            if outcome is not None:
                totals.num += counted
                totals.nbytes += nbytes
                if nbytes:
                    self._paths[outcome.path] = self._paths.get(outcome.path, 0) + nbytes
                self._bounced_nbytes += outcome.bounced_nbytes

    def reset(self) -> None:
        """Forget what was counted; no transfer may be running."""
        with self._lock:
            self._totals = {"write": DirectionTotals(), "read": DirectionTotals()}
            self._paths = {}
            self._bounced_nbytes = 0

    def moved_nbytes(self) -> tuple[int, int]:
        """Bytes written and read so far. Takes no lock, so that a garbage collection may ask: each number is right."""
        totals = self._totals
        return totals["write"].nbytes, totals["read"].nbytes

    def snapshot(self) -> tuple[DirectionTotals, DirectionTotals, dict[str, int], int]:
        """Totals of writes and of reads (running ones included in the busy time), bytes by path, bounced bytes."""
        now_s = time.monotonic()
        with self._lock:
            writes, reads = (dataclasses.replace(self._totals[name]) for name in ("write", "read"))
            paths, bounced_nbytes = dict(self._paths), self._bounced_nbytes
        for totals in (writes, reads):
            if totals.running:
                totals.busy_s += now_s - totals.busy_since_s
        return writes, reads, paths, bounced_nbytes
