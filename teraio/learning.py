"""From a recorded iteration to something the runtime can carry out.

Covers the choice of plan and its translation into lists indexed by event. It touches no tensor. The rule: a plan is
used only when replaying it keeps the budget; else the next more thrifty policy is tried, and if none fits there is
none.
"""

import dataclasses

from lifetime import Hardware, Trace
from teraio.planner.plan import Limits, Move, Plan
from teraio.planner.planning import make_plan
from teraio.planner.problem import Problem, build_problem
from teraio.runtime.planned_mode import Learnt


@dataclasses.dataclass(eq=False)
class Lesson:
    """A recorded iteration with the problem it poses."""

    trace: Trace
    problem: Problem
    persistent_nbytes: int
    carried: tuple[int, int]


def take_lesson(trace: Trace, *, min_nbytes: int, persistent_nbytes: int, carried: tuple[int, int]) -> Lesson:
    """Prepare `trace` for planning."""
    return Lesson(trace, build_problem(trace, min_nbytes=min_nbytes), persistent_nbytes, carried)


def find_plan(lesson: Lesson, limits: Limits, hardware: Hardware, policy: str | Plan) -> Plan | None:
    """The plan that `policy` gives, or a thriftier one where it does not fit; None when none fits."""
    if isinstance(policy, Plan):
        if policy.signature == lesson.trace.signature:
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
        moves[move.trigger].append(move)
    return Learnt(
        expected=list(zip(columns.kind.tolist(), columns.nbytes.tolist(), dtypes, strict=True)),
        storages=columns.storage.tolist(),
        needs_nbytes=lesson.problem.need_nbytes.tolist(),
        moves=moves,
        plan=plan,
        persistent_nbytes=lesson.persistent_nbytes,
        carried=lesson.carried,
    )
