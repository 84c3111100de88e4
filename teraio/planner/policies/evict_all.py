"""The policy that moves everything: the floor of memory, and the ceiling of traffic."""

from collections.abc import Sequence

from lifetime import Hardware
from teraio.planner.plan import Limits, Move, MoveKind, sort_moves
from teraio.planner.problem import Problem


def evict_all(problem: Problem, limits: Limits, hardware: Hardware) -> Sequence[Move]:
    """Every candidate leaves as soon as nothing else holds it and returns at the event that uses it."""
    moves = []
    for c in problem.candidates:
        gone = min(c.free_event + 1, c.use_event)
        moves.append(Move(MoveKind.OFFLOAD, c.storage, c.nbytes, c.free_event, gone, "everything leaves"))
        moves.append(Move(MoveKind.RELOAD, c.storage, c.nbytes, c.use_event, c.use_event, "used here"))
    return sort_moves(moves)
