"""Planning: pure functions from a trace to a plan. No tensor, no thread, no file but the plan's own."""

from teraio.planner.plan import Limits, Move, MoveKind, Plan, Prediction
from teraio.planner.planning import DEFAULT_HARDWARE, plan, simulate
from teraio.planner.simulator import Simulation

__all__ = ["DEFAULT_HARDWARE", "Limits", "Move", "MoveKind", "Plan", "Prediction", "Simulation", "plan", "simulate"]
