"""A trace as a planner sees it: what memory each stretch needs, and what could leave when.

Covers turning a trace into arrays over *segments*. Segment ``k`` is what runs from event ``k`` until event ``k + 1``.
It decides nothing (policies do). The rule: ``need_nbytes[k]`` is what the program holds at most within segment ``k`` when
nothing is offloaded, so that subtracting what is away at event ``k`` bounds what is resident until event ``k + 1``.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lifetime import EventKind, StorageKind, Trace

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]


class Candidate(NamedTuple):
    """A storage that may leave, and the stretch in which it is idle."""

    storage: int
    nbytes: int
    free_event: int
    """First event at which nothing but saved tensors holds it."""
    use_event: int
    """The event that needs it again."""
    name: str


@dataclass(frozen=True, eq=False)
class Problem:
    """Memory need and candidates of one iteration."""

    signature: str
    need_nbytes: Int64Array
    """Most bytes live within each segment, ``[num_events]``."""
    start_s: Float64Array
    """When each event happens if nothing ever waits, ``[num_events]``."""
    duration_s: Float64Array
    """Length of each segment, ``[num_events]``."""
    candidates: tuple[Candidate, ...]
    """In order of ``free_event``."""
    step_s: float
    """The whole iteration if nothing ever waits."""

    @property
    def num_events(self) -> int:
        """Number of events, and of segments."""
        return len(self.need_nbytes)

    def floor_nbytes(self) -> int:
        """The lowest peak that moving these candidates can reach: all of them away for all of their idle time."""
        level = self.need_nbytes.copy()
        for c in self.candidates:
            level[c.free_event : c.use_event] -= c.nbytes
        return int(level.max(initial=0))


def segment_needs(trace: Trace) -> Int64Array:
    """Most bytes live within each segment of `trace`, ``[num_events]``."""
    curve = trace.memory_curve()
    event_op = trace.event_columns.op
    needs = np.zeros(trace.num_events, dtype=np.int64)
    ends = np.append(event_op[1:], trace.num_ops)
    for k in range(trace.num_events):
        # An empty segment holds what its surroundings hold: the operation that comes next bounds it.
        stop = max(int(ends[k]), int(event_op[k]) + 1)
        needs[k] = curve[event_op[k] : stop].max(initial=0)
    if trace.num_events and trace.num_ops and event_op[-1] >= trace.num_ops:
        needs[event_op >= trace.num_ops] = curve[-1]
    return needs


def build_problem(trace: Trace, *, min_nbytes: int) -> Problem:
    """The planning problem of `trace`; storages below `min_nbytes` bytes stay."""
    columns = trace.event_columns
    elapsed_s = np.concatenate(([0.0], np.cumsum(trace.op_columns.duration_ns))) / 1e9
    start_s = elapsed_s[columns.op]
    duration_s = np.diff(np.append(start_s, elapsed_s[-1]))
    return Problem(
        signature=trace.signature,
        need_nbytes=segment_needs(trace),
        start_s=start_s,
        duration_s=duration_s,
        candidates=tuple(_candidates(trace, min_nbytes)),
        step_s=float(elapsed_s[-1]),
    )


def _candidates(trace: Trace, min_nbytes: int) -> list[Candidate]:
    columns = trace.event_columns
    packs: dict[int, int] = {}
    unpacks: dict[int, list[int]] = {}
    for k, (kind, storage) in enumerate(zip(columns.kind.tolist(), columns.storage.tolist(), strict=True)):
        if storage >= 0 and kind == EventKind.PACK:
            packs[storage] = k
        elif storage >= 0 and kind == EventKind.UNPACK:
            unpacks.setdefault(storage, []).append(k)
    found = []
    for storage, last_pack in packs.items():
        life = trace.storages[storage]
        if life.kind is not StorageKind.ACTIVATION or life.nbytes < min_nbytes or life.birth_op < 0:
            continue
        free = life.freeable_event if life.freeable_event >= 0 else _free_event(trace, storage, last_pack, unpacks)
        uses = [k for k in unpacks.get(storage, []) if k > free]
        if free >= 0 and uses and not any(k > last_pack for k in unpacks.get(storage, []) if k < free):
            found.append(Candidate(storage, life.nbytes, free, uses[0], life.name or f"storage {storage}"))
    return sorted(found, key=lambda c: (c.free_event, c.use_event, c.storage))


def _free_event(trace: Trace, storage: int, last_pack: int, unpacks: dict[int, list[int]]) -> int:
    """First event after the last use before the first unpack; used where the recording does not say who held it."""
    event_op = trace.event_columns.op
    first_unpack = unpacks.get(storage, [-1])[0]
    if first_unpack < 0:
        return -1
    uses = trace.use_columns.op[trace.use_columns.storage == storage]
    before = uses[uses < event_op[first_unpack]]
    last_use = int(before.max(initial=-1))
    return max(last_pack + 1, int(np.searchsorted(event_op, last_use, side="right")))
