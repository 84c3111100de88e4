"""Policies by name. Each is one module with one pure function from a problem to moves."""

from collections.abc import Callable, Sequence

from lifetime import Hardware
from teraio.errors import ConfigError
from teraio.planner.plan import Limits, Move
from teraio.planner.policies.evict_all import evict_all
from teraio.planner.policies.keep import keep
from teraio.planner.policies.planned import planned
from teraio.planner.problem import Problem

ProblemPolicy = Callable[[Problem, Limits, Hardware], Sequence[Move]]

POLICIES: dict[str, ProblemPolicy] = {"keep": keep, "evict_all": evict_all, "planned": planned}


def find_policy(name: str) -> ProblemPolicy:
    """The policy called `name`.

    Raises:
        ConfigError: There is none; the message lists those there are.
    """
    try:
        return POLICIES[name]
    except KeyError:
        raise ConfigError(f"there is no policy {name!r}; choose one of {', '.join(sorted(POLICIES))}") from None
