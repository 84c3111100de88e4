"""From a recorded iteration to something the runtime can carry out.

Covers the choice of plan and its translation into lists indexed by event. It touches no tensor. The rule: a plan is
used only when replaying it keeps the budget; else the next more thrifty policy is tried, and if none fits there is
none.
"""

import dataclasses
import mmap

import numpy as np

from lifetime import EventKind, Hardware, Trace
from teraio.planner.plan import Limits, Move, Plan
from teraio.planner.planning import make_plan
from teraio.planner.problem import Problem, build_problem
from teraio.planner.simulator import replay
from teraio.runtime.planned_mode import Learnt

_CHUNKS_IN_MEMORY = 3


@dataclasses.dataclass(eq=False)
class Lesson:
    """A recorded iteration with the problem it poses."""

    trace: Trace
    problem: Problem
    needs_nbytes: list[int]
    """What each segment needs when nothing at all is away."""
    persistent_nbytes: int
    carried: tuple[int, int]


def take_lesson(
    trace: Trace,
    *,
    min_nbytes: int,
    persistent_nbytes: int,
    carried: tuple[int, int],
    away_nbytes: int = 0,
    chunk_nbytes: int = 0,
) -> Lesson:
    """Prepare `trace` for planning.

    Args:
        trace: A completed iteration.
        min_nbytes: Storages below this many bytes stay.
        persistent_nbytes: Bytes of model and optimizer when it began.
        carried: Count and bytes of saved storages that were alive when it began.
        away_nbytes: Optimizer state that is on the SSD between steps; a plan need not make room for it.
        chunk_nbytes: State of the largest chunk. While stepping, three chunks are in memory: one being written, one in
            use, one being read.
    """
    plain = build_problem(trace, min_nbytes=min_nbytes)
    stepping = trace.event_columns.kind == EventKind.OPTIMIZER_CHUNK
    away = np.where(stepping, max(0, away_nbytes - _CHUNKS_IN_MEMORY * chunk_nbytes), away_nbytes)
    problem = dataclasses.replace(
        plain, need_nbytes=plain.need_nbytes - away, lead_nbytes=max(0, plain.lead_nbytes - away_nbytes)
    )
    return Lesson(trace, problem, plain.need_nbytes.tolist(), persistent_nbytes, carried)


def find_plan(lesson: Lesson, limits: Limits, hardware: Hardware, policy: str | Plan) -> Plan | None:
    """The plan that `policy` gives, or a thriftier one where it does not fit; None when none fits."""
    # What comes back lies on whole pages: keep what that may add out of the plan.
    padding_nbytes = sum(-c.nbytes % mmap.PAGESIZE for c in lesson.problem.candidates)
    limits = dataclasses.replace(limits, budget_nbytes=max(0, limits.budget_nbytes - padding_nbytes))
    if isinstance(policy, Plan):
        if policy.signature == lesson.trace.signature:
            result = replay(lesson.problem, policy.moves, hardware, limits.budget_nbytes)
            if result.peak_nbytes <= limits.budget_nbytes:
                return policy
        policy = "planned"
    for name in dict.fromkeys((policy, "evict_all")):
        plan = make_plan(lesson.problem, limits, hardware, name)
        if plan.predicted.peak_nbytes <= limits.budget_nbytes:
            return plan
    return None


def translate(lesson: Lesson, plan: Plan) -> Learnt:
    """Lists that the runtime reads at each event."""
    trace = lesson.trace
    columns = trace.event_columns
    dtypes = [trace.strings[i] for i in columns.dtype.tolist()]
    moves: list[list[Move]] = [[] for _ in range(trace.num_events)]
    for move in plan.moves:
        if move.trigger < trace.num_events:  # a plan from a file may name anything
            moves[move.trigger].append(move)
    return Learnt(
        expected=list(zip(columns.kind.tolist(), columns.nbytes.tolist(), dtypes, strict=True)),
        storages=columns.storage.tolist(),
        needs_nbytes=lesson.needs_nbytes,
        moves=moves,
        plan=plan,
        persistent_nbytes=lesson.persistent_nbytes,
        carried=lesson.carried,
    )
