"""The growing columns of a trace while it is recorded.

Covers appending rows cheaply and turning them into arrays at the end. What the rows mean stands in ``trace``; who
appends them is ``recorder``.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from lifetime.events import EventKind, Phase
from lifetime.strings import StringTable
from lifetime.trace import EventColumns, Int64Array, OpColumns, StorageColumns, Trace, UseColumns
from lifetime.tracker import ALIVE, StorageTracker

_OP_WIDTH = 6  # name, phase, module, start_ns, duration_ns, nbytes
_USE_WIDTH = 3  # op, storage, written
_EVENT_WIDTH = 8  # as EventColumns


class TraceBuilder:
    """Rows of operations, uses and events, next to the tracker's storages."""

    def __init__(self, strings: StringTable, tracker: StorageTracker) -> None:
        self._strings = strings
        self._tracker = tracker
        # Flat: rows as objects would make the garbage collector look at each of them again and again.
        self._ops: list[int] = []
        self._uses: list[int] = []
        self._events: list[int] = []

    @property
    def num_events(self) -> int:
        """Ticks of the event clock so far."""
        return len(self._events) // _EVENT_WIDTH

    def begin_op(self, name: str, phase: Phase, module: str) -> int:
        """Add an operation that is about to run; gives its position."""
        tracker, number = self._tracker, self._strings.number
        row = tracker.num_ops
        self._ops.extend((number(name), phase, number(module), 0, 0, 0))
        tracker.num_ops = row + 1
        return row

    def end_op(self, row: int, start_ns: int, end_ns: int, uses: Mapping[int, bool]) -> None:
        """Stamp an operation that has run, and add the storages that it touched, each with whether it was written."""
        ops, nbytes, total, add = self._ops, self._tracker.nbytes, 0, self._uses.extend
        for storage, written in uses.items():
            add((row, storage, written))
            total += nbytes[storage]
        last = row * _OP_WIDTH + _OP_WIDTH - 1
        ops[last] = total
        ops[last - 1] = end_ns - start_ns
        ops[last - 2] = start_ns

    def add_event(
        self, kind: EventKind, phase: Phase, micro_batch: int, ordinal: int, storage: int, nbytes: int, dtype: str
    ) -> int:
        """Add a tick of the event clock; gives its position."""
        number = self._strings.number(dtype)
        row = self.num_events
        self._events.extend((kind, phase, micro_batch, ordinal, self._tracker.num_ops, storage, nbytes, number))
        return row

    def build(self, meta: dict[str, object]) -> Trace:
        """The finished trace."""
        tracker = self._tracker
        num_ops = tracker.num_ops
        name, phase, module, start_ns, duration_ns, nbytes = _table(self._ops, _OP_WIDTH)
        # Operations on several threads end in another order than they begin: sort by beginning.
        use_op, use_storage, use_written = _table(self._uses, _USE_WIDTH)
        order = np.argsort(use_op, kind="stable")
        storages = StorageColumns(
            name=_column(tracker.name),
            kind=_column(tracker.kind),
            nbytes=_column(tracker.nbytes),
            dtype=_column(tracker.dtype),
            birth_op=_column(tracker.birth_op),
            death_op=_column(num_ops if death == ALIVE else death for death in tracker.death_op),
            freeable_event=_column(tracker.freeable_event),
            shape_end=np.cumsum(_column(len(shape) for shape in tracker.shape)),
            shape=_column(length for shape in tracker.shape for length in shape),
        )
        return Trace(
            OpColumns(
                name=name,
                phase=phase,
                module=module,
                start_ns=start_ns - (start_ns[0] if num_ops else 0),
                duration_ns=duration_ns,
                nbytes=nbytes,
                flops=np.zeros(num_ops, dtype=np.int64),
            ),
            storages,
            UseColumns(use_op[order], use_storage[order], use_written[order]),
            EventColumns(*_table(self._events, _EVENT_WIDTH)),
            list(self._strings.texts),
            dict(meta),
        )


def _column(values: Iterable[int]) -> Int64Array:
    return np.fromiter((int(value) for value in values), dtype=np.int64)


def _table(rows: list[int], width: int) -> list[Int64Array]:
    table = np.array(rows, dtype=np.int64).reshape(-1, width)
    return [np.ascontiguousarray(table[:, i]) for i in range(width)]
