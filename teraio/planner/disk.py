"""A disk on paper: one queue of writes and one of reads, and how they share the device.

Covers the course of transfers in the simulator, and the same queues as arithmetic over whole plans for policies. It
knows no memory and no events. The rules: each queue moves one transfer at a time, in order; both together obey
``r/R + w/W <= 2 * mixed_factor`` and take equal shares of it.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lifetime import Hardware
from teraio.planner.plan import Move, MoveKind

Float64Array = npt.NDArray[np.float64]

_DONE_S = 1e-12
"""Less work than this is none: what rounding leaves over."""


@dataclass(eq=False, slots=True)
class Transfer:
    """One move on the disk."""

    move: Move
    left_s: float
    """Work left, in seconds at full speed."""
    start_s: float = -1.0
    """When its first byte moved, -1 before."""
    done: bool = False


class Disk:
    """The two queues of a replay. The head of each is running."""

    def __init__(self, hardware: Hardware) -> None:
        self.writes: deque[Transfer] = deque()
        self.reads: deque[Transfer] = deque()
        self._hardware = hardware
        self._alone = min(1.0, 2 * hardware.mixed_factor)
        self._shared = hardware.mixed_factor

    @property
    def is_busy(self) -> bool:
        """Whether anything is running."""
        return bool(self.writes or self.reads)

    def add(self, move: Move, now_s: float) -> Transfer:
        """Queue a move."""
        bytes_per_s = self._hardware.write_bytes_per_s
        if move.kind is MoveKind.RELOAD:
            bytes_per_s = self._hardware.read_bytes_per_s
        transfer = Transfer(move, self._hardware.latency_s + move.nbytes / bytes_per_s)
        self._queue(transfer).append(transfer)
        self._start_heads(now_s)
        return transfer

    def cancel(self, transfer: Transfer) -> bool:
        """Take a transfer that has not begun out of its queue; gives False when it is too late."""
        if transfer.start_s >= 0:
            return False
        self._queue(transfer).remove(transfer)
        return True

    def hurry(self, transfer: Transfer) -> None:
        """Make a queued transfer the next one after what is running."""
        if transfer.start_s < 0:
            queue = self._queue(transfer)
            queue.remove(transfer)
            queue.insert(1, transfer)

    def next_end_s(self) -> float:
        """Seconds until the next transfer ends; there must be one."""
        return min(transfer.left_s for transfer in self._running()) / self._rate()

    def work(self, passing_s: float, now_s: float) -> list[Transfer]:
        """Work for `passing_s` seconds, until `now_s`; gives the transfers that end, writes first.

        The time must not reach beyond the next end.
        """
        rate = self._rate()
        ended = []
        for transfer in list(self._running()):
            transfer.left_s -= passing_s * rate
            if transfer.left_s <= _DONE_S:
                transfer.done = True
                self._queue(transfer).popleft()
                ended.append(transfer)
        if ended:
            self._start_heads(now_s)
        return ended

    def _queue(self, transfer: Transfer) -> deque[Transfer]:
        return self.reads if transfer.move.kind is MoveKind.RELOAD else self.writes

    def _running(self) -> Iterator[Transfer]:
        return (queue[0] for queue in (self.writes, self.reads) if queue)

    def _rate(self) -> float:
        return self._shared if self.writes and self.reads else self._alone

    def _start_heads(self, now_s: float) -> None:
        for transfer in self._running():
            if transfer.start_s < 0:
                transfer.start_s = now_s


def earliest_ends_s(arrival_s: Float64Array, work_s: Float64Array) -> Float64Array:
    """When each transfer of a queue ends, in order of arrival: ``end[i] = max(arrival[i], end[i-1]) + work[i]``."""
    done_s = np.cumsum(work_s)
    return np.asarray(done_s + np.maximum.accumulate(arrival_s - (done_s - work_s)))


def latest_starts_s(deadline_s: Float64Array, work_s: Float64Array) -> Float64Array:
    """When each transfer of a queue must start at the latest, so that it and all behind it end in time."""
    return -earliest_ends_s(-deadline_s[::-1], work_s[::-1])[::-1]
