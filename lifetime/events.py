"""The words of a trace: phases, kinds of event, kinds of storage.

Covers the enumerations that traces, plans and the runtime share, with their meaning. It does not record (see
``recorder``) nor decide (see ``teraio.planner``). The values are part of the trace file format: add, never renumber.
"""

from enum import IntEnum
from typing import NamedTuple


class Phase(IntEnum):
    """What the program is doing."""

    FORWARD = 0
    """Running the model, or anything else outside the two below."""
    BACKWARD = 1
    """Inside a backward pass of autograd."""
    OPTIMIZER = 2
    """Inside ``optimizer.step()``."""


class EventKind(IntEnum):
    """Kinds of tick of the event clock."""

    PACK = 0
    """Autograd saved a tensor, after the operation that needs it later has run."""
    UNPACK = 1
    """Autograd is about to use a saved tensor."""
    MODULE_ENTER = 2
    """A root module or a block is about to run."""
    MODULE_EXIT = 3
    """A root module or a block has run."""
    NODE = 4
    """A node of the backward graph is about to run."""
    GRAD_ACCUMULATED = 5
    """A parameter's gradient has been accumulated."""
    OPTIMIZER_CHUNK = 6
    """A chunk of parameters is about to be stepped."""


class StorageKind(IntEnum):
    """What a storage holds."""

    ACTIVATION = 0
    """Saved by autograd for the backward pass."""
    PARAMETER = 1
    """A parameter or a buffer of the model."""
    GRADIENT = 2
    """The ``.grad`` of a parameter."""
    OPTIMIZER = 3
    """State that an optimizer keeps between steps."""
    INPUT = 4
    """Existed before the iteration and belongs to the user: a batch, a target."""
    TEMPORARY = 5
    """Born and dead within the iteration, and not saved."""


class Event(NamedTuple):
    """One tick of the event clock."""

    kind: EventKind
    phase: Phase
    micro_batch: int
    """Number of backward passes finished in this iteration before the event."""
    ordinal: int
    """Position among the events of the same kind in this iteration."""
    op: int
    """Number of operations that had begun before the event."""
    storage: int
    """Index of the storage concerned, -1 for none."""
    nbytes: int
    """Size of that storage; for a module event, a fingerprint of its inputs."""
    dtype: str
    """Type of the saved tensor, empty where there is none."""
