"""What tests of the recorder look at in a trace."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lifetime import Recorder, Trace

Finish = Callable[[Recorder], Trace]
Step = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]


def lives(trace: Trace) -> list[tuple[int, int, int]]:
    """(nbytes, birth, death) of each storage."""
    return [(s.nbytes, s.birth_op, s.death_op) for s in trace.storages]


def uses(trace: Trace, op: int) -> dict[int, bool]:
    """The storages that operation `op` touched, each with whether it was written."""
    columns = trace.use_columns
    rows = zip(columns.op.tolist(), columns.storage.tolist(), columns.written.tolist(), strict=True)
    return {storage: bool(written) for row, storage, written in rows if row == op}


def names(trace: Trace) -> list[str]:
    """Names of the operations, in order."""
    return [op.name for op in trace.ops]
