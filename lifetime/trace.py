"""The record of one iteration: operations, storages, uses and events, as plain columns.

Covers the data and what can be read off it: live bytes, inactive periods, active fraction, signature. It does not
record (``recorder``), read or write files (``trace_file``), or decide anything (``teraio.planner``).

A storage is live during operation ``i`` exactly when ``birth_op <= i < death_op``; storages that outlive the
iteration have ``death_op == num_ops``, storages that existed before it have ``birth_op == -1``.
"""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lifetime.errors import TraceError
from lifetime.events import Event, EventKind, Phase, StorageKind

Int64Array = npt.NDArray[np.int64]

_MAX_SUM = 1e18
"""Bytes, and ns, that a whole trace may add up to: sums must not overflow 64 bits."""


class Op(NamedTuple):
    """One operation."""

    name: str
    phase: Phase
    module: str
    start_ns: int
    duration_ns: int
    nbytes: int
    """Bytes of the storages that it touched."""
    flops: int


class StorageLife(NamedTuple):
    """One storage."""

    storage: int
    """Its number: its position among the storages of the trace."""
    name: str
    kind: StorageKind
    nbytes: int
    """Its size; the largest one if it grew."""
    dtype: str
    shape: tuple[int, ...]
    """Shape of the first tensor seen on it."""
    birth_op: int
    death_op: int
    freeable_event: int
    """First event at which only saved tensors held it, -1 when that was never seen."""


class InactivePeriod(NamedTuple):
    """A stretch of operations during which a live storage is not used."""

    storage: int
    nbytes: int
    start_op: int
    """First operation of the stretch; the number of operations when it begins with the next iteration."""
    end_op: int
    """The operation that uses the storage again; smaller than ``start_op`` when the period wraps round."""
    duration_ns: int


@dataclass(slots=True)
class OpColumns:
    """Columns with one row an operation."""

    name: Int64Array
    phase: Int64Array
    module: Int64Array
    start_ns: Int64Array
    duration_ns: Int64Array
    nbytes: Int64Array
    flops: Int64Array


@dataclass(slots=True)
class StorageColumns:
    """Columns with one row a storage; ``shape`` is ragged: row ``i`` is ``shape[shape_end[i-1]:shape_end[i]]``."""

    name: Int64Array
    kind: Int64Array
    nbytes: Int64Array
    dtype: Int64Array
    birth_op: Int64Array
    death_op: Int64Array
    freeable_event: Int64Array
    shape_end: Int64Array
    shape: Int64Array


@dataclass(slots=True)
class UseColumns:
    """Columns with one row a use: an operation reads or writes a storage. Sorted by operation."""

    op: Int64Array
    storage: Int64Array
    written: Int64Array


@dataclass(slots=True)
class EventColumns:
    """Columns with one row a tick of the event clock."""

    kind: Int64Array
    phase: Int64Array
    micro_batch: Int64Array
    ordinal: Int64Array
    op: Int64Array
    storage: Int64Array
    nbytes: Int64Array
    dtype: Int64Array


@dataclass(eq=False)
class Trace:
    """One iteration, from its first operation to its boundary.

    Thread safety: immutable by convention; share it freely.
    """

    op_columns: OpColumns
    storage_columns: StorageColumns
    use_columns: UseColumns
    event_columns: EventColumns
    strings: list[str]
    """Interned names; columns ``name``, ``module`` and ``dtype`` hold positions in it."""
    meta: dict[str, object] = field(default_factory=dict)
    """Free facts about the recording: torch version, device, unseen bytes."""

    @property
    def num_ops(self) -> int:
        """Number of operations."""
        return len(self.op_columns.name)

    @property
    def num_storages(self) -> int:
        """Number of storages."""
        return len(self.storage_columns.name)

    @property
    def num_events(self) -> int:
        """Number of ticks of the event clock."""
        return len(self.event_columns.kind)

    @cached_property
    def ops(self) -> list[Op]:
        """The operations in the order in which they began."""
        c, s = self.op_columns, self.strings
        rows = zip(
            *(column.tolist() for column in (c.name, c.phase, c.module, c.start_ns, c.duration_ns, c.nbytes, c.flops)),
            strict=True,
        )
        return [
            Op(s[n], Phase(p), s[m], start, duration, nbytes, flops) for n, p, m, start, duration, nbytes, flops in rows
        ]

    @cached_property
    def storages(self) -> list[StorageLife]:
        """The storages in the order in which they were first seen."""
        c, s = self.storage_columns, self.strings
        ends = [0, *c.shape_end.tolist()]
        shape = c.shape.tolist()
        columns = (c.name, c.kind, c.nbytes, c.dtype, c.birth_op, c.death_op, c.freeable_event)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [
            StorageLife(i, s[n], StorageKind(k), nbytes, s[d], tuple(shape[ends[i] : ends[i + 1]]), birth, death, free)
            for i, (n, k, nbytes, d, birth, death, free) in enumerate(rows)
        ]

    @cached_property
    def events(self) -> list[Event]:
        """The ticks of the event clock, in order."""
        c, s = self.event_columns, self.strings
        columns = (c.kind, c.phase, c.micro_batch, c.ordinal, c.op, c.storage, c.nbytes, c.dtype)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [Event(EventKind(k), Phase(p), m, o, op, st, n, s[d]) for k, p, m, o, op, st, n, d in rows]

    def memory_curve(self) -> Int64Array:
        """Live bytes during each operation, ``[num_ops]``: what the iteration holds when nothing is offloaded."""
        c = self.storage_columns
        change = np.zeros(self.num_ops + 1, dtype=np.int64)
        np.add.at(change, np.clip(c.birth_op, 0, self.num_ops), c.nbytes)
        np.subtract.at(change, np.clip(c.death_op, 0, self.num_ops), c.nbytes)
        return np.cumsum(change)[: self.num_ops]

    @property
    def peak_nbytes(self) -> int:
        """Highest point of the memory curve."""
        return int(self.memory_curve().max(initial=0))

    def inactive_periods(self) -> list[InactivePeriod]:
        """Every stretch between two uses of a storage, wrapping round the iteration for those that outlive it.

        Source: TERAIO (arXiv 2506.06472), section 3.1: an intermediate tensor is inactive between two uses; a global
        one also from its last use to its first in the next iteration.
        """
        uses, c = self.use_columns, self.storage_columns
        order = np.lexsort((uses.op, uses.storage))
        op, storage = uses.op[order], uses.storage[order]
        elapsed_ns = np.concatenate(([0], np.cumsum(self.op_columns.duration_ns))).tolist()
        periods: list[InactivePeriod] = []
        same = storage[1:] == storage[:-1]
        for i in np.flatnonzero(same & (op[1:] > op[:-1] + 1)).tolist():
            start, end, s = int(op[i]) + 1, int(op[i + 1]), int(storage[i])
            periods.append(InactivePeriod(s, int(c.nbytes[s]), start, end, elapsed_ns[end] - elapsed_ns[start]))
        bounds = np.flatnonzero(~same) + 1  # where the uses of the next storage begin
        firsts = [0, *bounds.tolist()] if len(op) else []
        lasts = [*(bounds - 1).tolist(), len(op) - 1] if len(op) else []
        for first, last in zip(firsts, lasts, strict=True):
            start, end, s = int(op[last]) + 1, int(op[first]), int(storage[first])
            lasting = c.birth_op[s] == -1 and c.death_op[s] == self.num_ops
            if lasting and (start < self.num_ops or end > 0):
                duration = elapsed_ns[-1] - elapsed_ns[start] + elapsed_ns[end]
                periods.append(InactivePeriod(s, int(c.nbytes[s]), start, end, duration))
        return periods

    def active_fraction(self) -> npt.NDArray[np.float64]:
        """Share of the live bytes that each operation touches, ``[num_ops]``, between 0 and 1."""
        live = self.memory_curve()
        # A storage that lies on a runtime's buffer later on counts 0 from its birth, and did count when it was used.
        touched = np.minimum(self.op_columns.nbytes, live)
        return np.divide(touched, live, out=np.zeros(self.num_ops), where=live > 0)

    @cached_property
    def signature(self) -> str:
        """Hash over (kind, ordinal, nbytes, dtype) of the events: two iterations with the same one can share a plan."""
        c = self.event_columns
        digest = hashlib.sha256()
        for column in (c.kind, c.ordinal, c.nbytes):
            digest.update(np.ascontiguousarray(column, dtype="<i8").tobytes())
        digest.update("\0".join(self.strings[i] for i in c.dtype.tolist()).encode())
        return digest.hexdigest()

    def save(self, path: str | Path) -> None:
        """Write the trace to one file; see `lifetime.trace_file` for the format."""
        from lifetime.trace_file import save_trace

        save_trace(self, path)

    @classmethod
    def load(cls, path: str | Path) -> "Trace":
        """Read a trace that `save` wrote.

        Raises:
            TraceFormatError: The file is damaged, foreign or newer than this version.
            OSError: The file cannot be read.
        """
        from lifetime.trace_file import load_trace

        return load_trace(path)

    def validate(self) -> None:
        """Check that the columns fit together.

        Raises:
            TraceError: They do not; the message names the first misfit.
        """
        for group in (self.op_columns, self.storage_columns, self.use_columns, self.event_columns):
            self._check_lengths(group)
        o, s, u, e = self.op_columns, self.storage_columns, self.use_columns, self.event_columns
        texts, ops, storages, events = len(self.strings), self.num_ops, self.num_storages, self.num_events
        for name, column, low, high in (
            ("op name", o.name, 0, texts),
            ("op module", o.module, 0, texts),
            ("op phase", o.phase, 0, len(Phase)),
            ("op duration_ns", o.duration_ns, 0, None),
            ("op nbytes", o.nbytes, 0, None),
            ("op flops", o.flops, 0, None),
            ("storage name", s.name, 0, texts),
            ("storage dtype", s.dtype, 0, texts),
            ("storage kind", s.kind, 0, len(StorageKind)),
            ("storage nbytes", s.nbytes, 0, None),
            ("storage birth_op", s.birth_op, -1, ops + 1),
            ("storage death_op", s.death_op, 0, ops + 1),
            ("storage freeable_event", s.freeable_event, -1, events + 1),
            ("storage shape_end", s.shape_end, 0, len(s.shape) + 1),
            ("storage shape", s.shape, 0, None),
            ("use op", u.op, 0, ops),
            ("use storage", u.storage, 0, storages),
            ("use written", u.written, 0, 2),
            ("event kind", e.kind, 0, len(EventKind)),
            ("event phase", e.phase, 0, len(Phase)),
            ("event micro_batch", e.micro_batch, 0, None),
            ("event ordinal", e.ordinal, 0, None),
            ("event op", e.op, 0, ops + 1),
            ("event storage", e.storage, -1, storages),
            ("event dtype", e.dtype, 0, texts),
        ):
            self._check_range(name, column, low, high)
        for name, column in (("storage shape_end", s.shape_end), ("use op", u.op), ("event op", e.op)):
            if len(column) > 1 and (column[1:] < column[:-1]).any():
                raise TraceError(f"trace column '{name}' must not decrease")
        for name, column in (("op duration_ns", o.duration_ns), ("storage nbytes", s.nbytes)):
            if column.sum(dtype=np.float64) >= _MAX_SUM:
                raise TraceError(f"trace column '{name}' adds up to more than {_MAX_SUM:.0e}, beyond any machine")
        if (s.birth_op > s.death_op).any():
            raise TraceError("trace column 'storage birth_op' must not exceed 'storage death_op'")
        if len(s.shape) != (int(s.shape_end[-1]) if storages else 0):
            raise TraceError(f"trace column 'storage shape' has {len(s.shape)} lengths that belong to no storage")

    @staticmethod
    def _check_lengths(group: OpColumns | StorageColumns | UseColumns | EventColumns) -> None:
        for name in group.__slots__:
            column = getattr(group, name)
            if column.dtype != np.int64 or column.ndim != 1:
                raise TraceError(f"trace column '{name}' must be one row of int64, found {column.dtype} {column.shape}")
        lengths = {name: len(getattr(group, name)) for name in group.__slots__ if name != "shape"}
        if len(set(lengths.values())) > 1:
            raise TraceError(f"trace columns of {type(group).__name__} differ in length: {lengths}")

    @staticmethod
    def _check_range(name: str, column: Int64Array, low: int, high: int | None) -> None:
        if len(column) and (column.min() < low or (high is not None and column.max() >= high)):
            bound = "" if high is None else f" and below {high}"
            raise TraceError(
                f"trace column '{name}' must be at least {low}{bound}, found {column.min()}..{column.max()}"
            )
