"""A trace as a planner sees it: what memory each stretch needs, and what could leave when.

Covers turning a trace into arrays over *segments*. Segment ``k`` is what runs from event ``k`` until event ``k + 1``.
It decides nothing (policies do). The rule: ``need_nbytes[k]`` is what the program holds at most within segment ``k``
when nothing is offloaded, so that subtracting what is away at event ``k`` bounds what is resident until the next event.
"""

from collections.abc import Iterator
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
    lead_nbytes: int = 0
    """Most bytes live before the first event: no move can lower that."""

    @property
    def num_events(self) -> int:
        """Number of events, and of segments."""
        return len(self.need_nbytes)

    @property
    def peak_nbytes(self) -> int:
        """The peak when nothing is offloaded."""
        return int(self.need_nbytes.max(initial=self.lead_nbytes))

    def floor_nbytes(self) -> int:
        """The lowest peak that moving these candidates can reach: all of them away for all of their idle time."""
        level = self.need_nbytes.copy()
        for c in self.candidates:
            level[c.free_event : c.use_event] -= c.nbytes
        return int(level.max(initial=self.lead_nbytes))


def segment_needs(trace: Trace) -> Int64Array:
    """Most bytes live within each segment of `trace`, ``[num_events]``.

    A segment without operations holds no more than the operation before it left, and is charged no more than what the
    operation after it needs.
    """
    if trace.num_ops == 0:
        return np.zeros(trace.num_events, dtype=np.int64)
    curve, event_op = trace.memory_curve(), trace.event_columns.op
    # One row more at each end, so that row `op` is the operation before an event and row `op + 1` the one after it.
    curve = np.concatenate((curve[:1], curve, curve[-1:]))
    needs = np.maximum.reduceat(curve, event_op + 1)
    is_empty = np.diff(event_op, append=trace.num_ops) == 0
    return np.where(is_empty, np.minimum(curve[event_op], curve[event_op + 1]), needs)


def build_problem(trace: Trace, *, min_nbytes: int) -> Problem:
    """The planning problem of `trace`; storages below `min_nbytes` bytes stay."""
    event_op = trace.event_columns.op
    elapsed_s = np.concatenate(([0.0], np.cumsum(trace.op_columns.duration_ns))) / 1e9
    start_s = elapsed_s[event_op]
    lead_ops = int(event_op[0]) if trace.num_events else trace.num_ops
    return Problem(
        signature=trace.signature,
        need_nbytes=segment_needs(trace),
        start_s=start_s,
        duration_s=np.diff(start_s, append=elapsed_s[-1]),
        candidates=tuple(sorted(_candidates(trace, min_nbytes), key=lambda c: (c.free_event, c.use_event, c.storage))),
        step_s=float(elapsed_s[-1]),
        lead_nbytes=int(trace.memory_curve()[:lead_ops].max(initial=0)),
    )


def _candidates(trace: Trace, min_nbytes: int) -> Iterator[Candidate]:
    packs, unpacks = _saved_storages(trace)
    uses = _uses(trace)
    for storage, last_pack in packs.items():
        life = trace.storages[storage]
        if life.kind is not StorageKind.ACTIVATION or life.nbytes < max(min_nbytes, 1) or life.birth_op < 0:
            continue
        if life.freeable_event < 0 and trace.meta.get("holders_known"):
            continue  # something held it for all of its idle time: it cannot leave
        period = _idle_period(trace, life.freeable_event, last_pack, unpacks.get(storage, []), uses[storage])
        if period is not None:
            yield Candidate(storage, life.nbytes, *period, life.name or f"storage {storage}")


def _saved_storages(trace: Trace) -> tuple[dict[int, int], dict[int, list[int]]]:
    """The event of the last pack, and the events of all unpacks, of each storage."""
    packs: dict[int, int] = {}
    unpacks: dict[int, list[int]] = {}
    columns = trace.event_columns
    for k, (kind, storage) in enumerate(zip(columns.kind.tolist(), columns.storage.tolist(), strict=True)):
        if storage >= 0 and kind == EventKind.PACK:
            packs[storage] = k
        elif storage >= 0 and kind == EventKind.UNPACK:
            unpacks.setdefault(storage, []).append(k)
    return packs, unpacks


def _uses(trace: Trace) -> list[Int64Array]:
    """The operations that use each storage, in order."""
    order = np.argsort(trace.use_columns.storage, kind="stable")
    bounds = np.searchsorted(trace.use_columns.storage[order], np.arange(1, trace.num_storages))
    return np.split(trace.use_columns.op[order], bounds) if trace.num_storages else []


def _idle_period(
    trace: Trace, freeable_event: int, last_pack: int, unpacks: list[int], uses: Int64Array
) -> tuple[int, int] | None:
    """From the event at which saved tensors alone hold a storage to the unpack that uses it; None if there is none.

    Where the recording does not say who held it, it is taken to be free after the last use before that unpack.
    """
    after = freeable_event if freeable_event >= 0 else last_pack
    use = next((k for k in unpacks if k > after), -1)
    if use < 0 or after < last_pack < use:
        return None
    if freeable_event >= 0:
        return freeable_event, use
    event_op = trace.event_columns.op
    last_use = int(uses[uses < event_op[use]].max(initial=-1))
    free = max(last_pack + 1, int(np.searchsorted(event_op, last_use, side="right")))
    return (free, use) if free < use else None
