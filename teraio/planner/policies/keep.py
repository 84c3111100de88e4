"""The policy that moves nothing: what a run without teraio does, with teraio's bookkeeping."""

from collections.abc import Sequence

from lifetime import Hardware
from teraio.planner.plan import Limits, Move
from teraio.planner.problem import Problem


def keep(problem: Problem, limits: Limits, hardware: Hardware) -> Sequence[Move]:
    """No moves. It fits only a budget of at least the unlimited peak."""
    return ()
