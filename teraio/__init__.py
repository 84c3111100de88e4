"""teraio: train PyTorch models whose tensors do not fit in memory, by keeping the idle ones on an SSD.

``with teraio.offload(model, optimizer, budget="6GiB", spill="/mnt/nvme0"):`` round the training loop; losses, gradients
and weights stay what they were, bit for bit.
"""

import os

# torch reads this once, at its first allocation: large tensors then lie on huge pages, which transfers need to go
# without a copy. A value that the user set stays.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import lifetime as _lifetime

if not hasattr(_lifetime, "Recorder"):
    raise ImportError(
        f"teraio needs its own package 'lifetime', but 'lifetime' was imported from {_lifetime.__file__}: "
        "rename that file, or run the script from another directory"
    )

from teraio.config import Config
from teraio.errors import (
    ConfigError,
    InfeasibleBudgetError,
    InternalError,
    OffloadError,
    OffloadTimeout,
    PlanFormatError,
    PlanMismatchError,
    TeraioError,
)
from teraio.iterations import StepRecord
from teraio.planner.plan import Move, MoveKind, Plan
from teraio.planner.planning import plan, simulate
from teraio.planner.simulator import Simulation
from teraio.report import Report
from teraio.session import Session, offload
from teraio.sizes import format_nbytes, parse_nbytes

__all__ = [
    "Config",
    "ConfigError",
    "InfeasibleBudgetError",
    "InternalError",
    "Move",
    "MoveKind",
    "OffloadError",
    "OffloadTimeout",
    "Plan",
    "PlanFormatError",
    "PlanMismatchError",
    "Report",
    "Session",
    "Simulation",
    "StepRecord",
    "TeraioError",
    "format_nbytes",
    "offload",
    "parse_nbytes",
    "plan",
    "simulate",
]
