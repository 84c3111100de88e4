"""From a trace to a plan.

Covers the one entry that the session and users call: pick the policy, run it, judge the result. Policies are in
``policies``, the judge is ``simulator``.
"""

from collections.abc import Iterable

from lifetime import Hardware, Trace
from teraio.errors import ConfigError, InfeasibleBudgetError
from teraio.planner.plan import Limits, Plan, Prediction
from teraio.planner.policies import find_policy
from teraio.planner.problem import Problem, build_problem
from teraio.planner.simulator import Simulation, replay
from teraio.sizes import format_nbytes, parse_nbytes

DEFAULT_HARDWARE = Hardware(1.0e9, 1.0e9, mixed_factor=0.5, source="assumed until measured")
"""Modest figures for an SSD that nothing is known of yet."""


def make_plan(problem: Problem, limits: Limits, hardware: Hardware, policy: str) -> Plan:
    """Run `policy` and predict what its moves come to; the predicted peak may exceed the budget."""
    moves = tuple(find_policy(policy)(problem, limits, hardware))
    result = replay(problem, moves, hardware, limits.budget_nbytes)
    predicted = Prediction(result.step_s, result.stall_s, result.peak_nbytes, result.written_nbytes, result.read_nbytes)
    return Plan(policy, problem.signature, limits.budget_nbytes, moves, predicted)


def plan(
    trace: Trace,
    *,
    budget: int | str,
    hardware: Hardware = DEFAULT_HARDWARE,
    policy: str = "planned",
    kinds: str | Iterable[str] = ("activation",),
    host_budget: int | str = 0,
    min_nbytes: int = 1 << 20,
) -> Plan:
    """Plan one iteration offline.

    Args:
        trace: A recorded iteration.
        budget: Bytes of tensor storage on the device at any time.
        hardware: Speeds of the machine that will run it.
        policy: ``keep``, ``evict_all`` or ``planned``.
        kinds: Kinds of storage that may leave. This version moves activations: ``"auto"`` or ``{"activation"}``.
        host_budget: Must be 0 in this version: there is no host tier yet.
        min_nbytes: Storages below this many bytes stay.

    Raises:
        ConfigError: An argument is wrong.
        InfeasibleBudgetError: The policy cannot keep the budget; the floor is named.
    """
    if ({kinds} if isinstance(kinds, str) else set(kinds)) not in ({"activation"}, {"auto"}):
        raise ConfigError(f"kinds must be 'auto' or {{'activation'}} in this version, got {kinds!r}")
    if parse_nbytes(host_budget, name="host_budget") != 0:
        raise ConfigError(
            f"host_budget must be 0 bytes in this version (there is no host tier yet), got {host_budget!r}"
        )
    limits = Limits(parse_nbytes(budget, name="budget"), min_nbytes=min_nbytes)
    problem = build_problem(trace, min_nbytes=min_nbytes)
    result = make_plan(problem, limits, hardware, policy)
    if result.predicted.peak_nbytes > limits.budget_nbytes:
        floor = problem.floor_nbytes()
        raise InfeasibleBudgetError(
            f"policy '{policy}' needs {format_nbytes(result.predicted.peak_nbytes)} where the budget is "
            f"{format_nbytes(limits.budget_nbytes)}; moving activations can reach {format_nbytes(floor)} at the least: "
            "raise the budget, or make the batch or the sequence smaller",
            floor_nbytes=floor,
        )
    return result


def simulate(trace: Trace, plan: Plan, hardware: Hardware = DEFAULT_HARDWARE) -> Simulation:
    """Replay `trace` under `plan` on `hardware`.

    Raises:
        ConfigError: The plan was made for another trace.
    """
    if plan.signature != trace.signature:
        raise ConfigError("the plan was made for another trace: their signatures differ; plan this trace anew")
    problem = build_problem(trace, min_nbytes=0)
    return replay(problem, plan.moves, hardware, plan.budget_nbytes)
