"""The arguments of `teraio.offload`, checked and brought into shape.

Covers what each may be and the message when it is not. It starts nothing. The rule: a wrong argument is a `ConfigError`
that names the argument, the value and what would be accepted.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from io_backend.user_cache import default_spill_directory
from teraio.budget import default_budget_nbytes
from teraio.errors import ConfigError, InfeasibleBudgetError
from teraio.planner.plan import Plan
from teraio.planner.policies import POLICIES
from teraio.runtime.swap import can_exchange
from teraio.sizes import format_nbytes, parse_nbytes
from teraio.state_size import state_nbytes

_SUSPICIOUS_NBYTES = 1 << 16
"""A budget below this was probably meant in another unit."""

Budget = int | str | Mapping[Any, int | str] | None


def spill_directories(spill: str | Path | Sequence[str | Path] | None) -> list[Path]:
    """The directories to spill to. One that is named must be there: the disk may just not be mounted.

    Raises:
        ConfigError: Neither a path nor a list of paths, one of them is no directory, or named twice.
    """
    if spill is None:
        if not os.environ.get("TERAIO_SPILL"):
            return [default_spill_directory()]
        spill = default_spill_directory()
    if not isinstance(spill, (str, os.PathLike, Sequence)):
        raise ConfigError(f"spill must be a directory or a list of directories, got {spill!r}")
    directories = [spill] if isinstance(spill, (str, os.PathLike)) else list(spill)
    if not directories or not all(isinstance(directory, (str, os.PathLike)) for directory in directories):
        raise ConfigError(f"spill must be a directory or a list of directories, got {spill!r}")
    paths = [Path(directory) for directory in directories]
    for directory, path in zip(directories, paths, strict=True):
        if not os.fspath(directory) or "\0" in os.fspath(directory) or (path.exists() and not path.is_dir()):
            raise ConfigError(f"spill names {os.fspath(directory)!r}, which is no directory")
        if not path.exists():
            raise ConfigError(
                f"spill names {os.fspath(directory)!r}, which does not exist: mount the SSD, or make the directory"
            )
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError(f"spill names a directory twice, got {[os.fspath(path) for path in paths]}: one for each SSD")
    return paths


def check_trace_file(trace_to: Any) -> Path | None:
    """The file to write the trace to, if one is wanted.

    Raises:
        ConfigError: Not a path, or of a directory that does not exist.
    """
    if trace_to is None:
        return None
    if not isinstance(trace_to, (str, os.PathLike)):
        raise ConfigError(f"trace_to must be the path of a file, got {trace_to!r}")
    path = Path(trace_to)
    if path.is_dir() or not path.absolute().parent.is_dir():
        what = "is a directory" if path.is_dir() else "lies in a directory that does not exist"
        raise ConfigError(f"trace_to is {str(path)!r}, which {what}: name a file in one that does")
    return path


def resolve_policy(policy: str | Path | Plan) -> str | Plan:
    """A policy's name, or a plan, read from its file where a path is given.

    Raises:
        ConfigError: None of these.
        PlanFormatError: The file is not a plan.
    """
    if isinstance(policy, Plan):
        return policy
    if not isinstance(policy, (str, os.PathLike)):
        raise ConfigError(f"policy must be a name, a teraio.Plan or the path of a plan file, got {policy!r}")
    if policy in POLICIES:
        return str(policy)
    path = Path(policy)
    if path.is_file():
        return Plan.load(path)
    raise ConfigError(
        f"policy must be one of {', '.join(sorted(POLICIES))}, a teraio.Plan, or a plan file, got {str(policy)!r}, "
        "and there is no such file"
    )


def check_state_fits(
    models: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer], budget_nbytes: int
) -> None:
    """Refuse a budget below the state that cannot leave.

    Raises:
        InfeasibleBudgetError: It names the budget, the state, and the remedy.
    """
    held_nbytes = state_nbytes(models, optimizers)
    if held_nbytes > budget_nbytes:
        raise InfeasibleBudgetError(
            f"the budget is {format_nbytes(budget_nbytes)}, but the state of model and optimizer that stays resident "
            f"takes {format_nbytes(held_nbytes)}: raise the budget to more than that"
            + (" (a number without a unit is bytes)" if budget_nbytes < _SUSPICIOUS_NBYTES else ""),
            floor_nbytes=held_nbytes,
        )


def check_kinds(kinds: str | Iterable[str]) -> bool | None:
    """Whether optimizer state moves: True, False, or None for when it must."""
    if kinds == "auto":
        return None
    listed = [kinds] if isinstance(kinds, str) else list(kinds) if isinstance(kinds, Iterable) else [kinds]
    if not all(isinstance(kind, str) for kind in listed):
        raise ConfigError(f"kinds must be 'auto' or a set of kinds, got {kinds!r}")
    chosen = set(listed)
    if not {"activation"} <= chosen <= {"activation", "optimizer"}:
        raise ConfigError(
            "kinds must be 'auto', {'activation'} or {'activation', 'optimizer'} in this version, "
            f"got {sorted(chosen)}"
        )
    if "optimizer" in chosen and not can_exchange():
        raise ConfigError(f"moving optimizer state needs torch 2.13 or newer, this is {torch.__version__}")
    return "optimizer" in chosen


def check_device(models: list[torch.nn.Module]) -> None:
    """Refuse models that are not on the CPU.

    Raises:
        ConfigError: It names the first parameter that is elsewhere.
    """
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.device.type != "cpu":
                raise ConfigError(
                    f"parameter {name} is on {parameter.device}: this version offloads on the CPU only, where memory "
                    "is the fast tier; move the model to 'cpu'"
                )


def resolve_budget_nbytes(budget: Budget, held_nbytes: int) -> int:
    """The budget in bytes; without one, a share of what is free and of the `held_nbytes` already taken.

    Raises:
        ConfigError: Not a size, or for another device.
    """
    if budget is None:
        return default_budget_nbytes(held_nbytes)
    if isinstance(budget, Mapping):
        devices = {str(device): size for device, size in budget.items()}
        if set(devices) != {"cpu"}:
            raise ConfigError(f"budget names devices {sorted(devices)}, expected just 'cpu' in this version")
        budget = devices["cpu"]
    nbytes = parse_nbytes(budget, name="budget")
    if nbytes == 0:
        raise ConfigError("budget must be above 0 bytes")
    return nbytes


def as_list_of(value: Any, kind: type[Any], name: str) -> list[Any]:
    """`value` as a list of `kind`; none, one or several.

    Raises:
        ConfigError: Something else is among them; `name` is what the message calls the argument.
    """
    values = [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
    for item in values:
        if not isinstance(item, kind):
            raise ConfigError(f"{name} must be a {kind.__name__} or a sequence of them, got {type(item).__name__}")
        if isinstance(item, torch.jit.ScriptModule):
            raise ConfigError(f"{name} is a TorchScript module, which takes no hooks: give the module it was made from")
    if len({id(item) for item in values}) < len(values):
        raise ConfigError(f"{name} names the same object twice")
    return values
