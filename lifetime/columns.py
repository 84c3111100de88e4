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

OpRow = tuple[int, int, int]
EventRow = tuple[int, int, int, int, int, int, int, int]


class TraceBuilder:
    """Rows of operations, uses and events, next to the tracker's storages."""

    def __init__(self, strings: StringTable, tracker: StorageTracker) -> None:
        self._strings = strings
        self._tracker = tracker
        self._ops: list[OpRow] = []
        self._start_ns: list[int] = []
        self._duration_ns: list[int] = []
        self._op_nbytes: list[int] = []
        self._uses: list[tuple[int, int, int]] = []
        self._events: list[EventRow] = []

    @property
    def num_events(self) -> int:
        """Rows of events so far."""
        return len(self._events)

    def begin_op(self, name: str, phase: Phase, module: str) -> int:
        """Add an operation that is about to run; gives its position."""
        row = len(self._ops)
        self._ops.append((self._strings.number(name), phase, self._strings.number(module)))
        self._start_ns.append(0)
        self._duration_ns.append(0)
        self._op_nbytes.append(0)
        self._tracker.num_ops = row + 1
        return row

    def end_op(self, row: int, start_ns: int, end_ns: int) -> None:
        """Stamp an operation that has run."""
        self._start_ns[row] = start_ns
        self._duration_ns[row] = end_ns - start_ns

    def add_uses(self, row: int, uses: Mapping[int, bool]) -> None:
        """Add the storages that operation `row` touched, each with whether it was written."""
        self._uses.extend((row, storage, int(written)) for storage, written in uses.items())
        self._op_nbytes[row] = sum(self._tracker.nbytes[storage] for storage in uses)

    def add_event(
        self, kind: EventKind, phase: Phase, micro_batch: int, ordinal: int, storage: int, nbytes: int, dtype: str
    ) -> int:
        """Add a tick of the event clock; gives its position."""
        number = self._strings.number(dtype)
        self._events.append((kind, phase, micro_batch, ordinal, len(self._ops), storage, nbytes, number))
        return len(self._events) - 1

    def build(self, meta: dict[str, object]) -> Trace:
        """The finished trace."""
        num_ops = len(self._ops)
        tracker = self._tracker
        # Operations nest (one that calls another), so their uses arrive in order of ending: sort by beginning.
        self._uses.sort(key=lambda use: use[0])
        use = _table(self._uses, 3)
        op = _table(self._ops, 3)
        event = _table(self._events, 8)
        zero = np.zeros(num_ops, dtype=np.int64)
        start_ns = _column(self._start_ns)
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
                name=op[0],
                phase=op[1],
                module=op[2],
                start_ns=start_ns - (start_ns[0] if num_ops else 0),
                duration_ns=_column(self._duration_ns),
                nbytes=_column(self._op_nbytes),
                flops=zero,
            ),
            storages,
            UseColumns(*use),
            EventColumns(*event),
            list(self._strings.texts),
            dict(meta),
        )


def _column(values: Iterable[int]) -> Int64Array:
    return np.fromiter((int(value) for value in values), dtype=np.int64)


def _table(rows: list[tuple[int, ...]] | list[OpRow] | list[EventRow] | list[tuple[int, int, int]], width: int) -> list[Int64Array]:
    table = np.array(rows, dtype=np.int64).reshape(len(rows), width)
    return [np.ascontiguousarray(table[:, i]) for i in range(width)]
