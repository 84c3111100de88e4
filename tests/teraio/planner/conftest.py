"""Iterations written by hand, small enough to work out on paper.

Covers a script of operations, saved tensors and events that becomes a `lifetime.Trace`. The rule: nothing is implied;
what the script does not say did not happen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from lifetime import EventKind, Hardware, StorageKind, Trace
from lifetime.trace import EventColumns, Int64Array, OpColumns, StorageColumns, UseColumns

OLDER = -1
"""Birth of what existed before the iteration."""


class Script:
    """One iteration, told in order."""

    def __init__(self) -> None:
        self._durations_ns: list[int] = []
        self._storages: list[list[int]] = []  # nbytes, kind, birth_op, death_op, freeable_event
        self._uses: list[tuple[int, int]] = []
        self._events: list[tuple[int, int, int, int]] = []  # kind, op, storage, nbytes

    def storage(self, nbytes: int, kind: StorageKind = StorageKind.ACTIVATION, *, older: bool = False) -> int:
        """A storage, born in the operation that makes it, or before the iteration."""
        self._storages.append([nbytes, kind, OLDER if older else -2, -2, -1])
        return len(self._storages) - 1

    def op(
        self,
        seconds: float = 1,
        *,
        makes: Sequence[int] = (),
        uses: Sequence[int] = (),
        frees: Sequence[int] = (),
        temporary: int = 0,
    ) -> None:
        """An operation; `frees` die right after it, `temporary` bytes live in it alone."""
        row = len(self._durations_ns)
        self._durations_ns.append(round(seconds * 1e9))
        makes = list(makes)
        if temporary:
            makes.append(self.storage(temporary, StorageKind.TEMPORARY))
            frees = [*frees, makes[-1]]
        for storage in makes:
            self._storages[storage][2] = row
        self._uses += [(row, storage) for storage in {*makes, *uses}]
        for storage in frees:
            self._storages[storage][3] = row + 1

    def pack(self, storage: int) -> int:
        """Autograd saves it; gives the event."""
        return self._event(EventKind.PACK, storage)

    def unpack(self, storage: int) -> int:
        """Autograd is about to use it; gives the event."""
        return self._event(EventKind.UNPACK, storage)

    def tick(self) -> int:
        """Any other event."""
        return self._event(EventKind.NODE, -1)

    def free_at(self, storage: int, event: int) -> None:
        """The recording says that from this event only saved tensors held it."""
        self._storages[storage][4] = event

    def trace(self) -> Trace:
        """The finished record, checked."""
        num_ops, num_events = len(self._durations_ns), len(self._events)
        durations = _column(self._durations_ns)
        nbytes, kinds, births, deaths, freeable = _columns(self._storages, 5)
        op, storage = _columns(sorted(self._uses), 2)
        event_kind, event_op, event_storage, event_nbytes = _columns(self._events, 4)
        nothing, no_event = np.zeros(num_ops, dtype=np.int64), np.zeros(num_events, dtype=np.int64)
        empty = np.zeros(len(nbytes), dtype=np.int64)
        trace = Trace(
            OpColumns(nothing, nothing, nothing, np.cumsum(durations) - durations, durations, nothing, nothing),
            StorageColumns(
                name=empty,
                kind=kinds,
                nbytes=nbytes,
                dtype=empty,
                birth_op=births,
                death_op=np.where(deaths == -2, num_ops, deaths),
                freeable_event=freeable,
                shape_end=empty,
                shape=_column([]),
            ),
            UseColumns(op, storage, np.zeros(len(op), dtype=np.int64)),
            EventColumns(
                event_kind, no_event, no_event, np.arange(num_events), event_op, event_storage, event_nbytes, no_event
            ),
            [""],
        )
        trace.validate()
        return trace

    def _event(self, kind: EventKind, storage: int) -> int:
        nbytes = self._storages[storage][0] if storage >= 0 else 0
        self._events.append((kind, len(self._durations_ns), storage, nbytes))
        return len(self._events) - 1


def _column(values: Sequence[int]) -> Int64Array:
    return np.array(values, dtype=np.int64)


def _columns(rows: Sequence[Sequence[int]], width: int) -> list[Int64Array]:
    table = np.array(rows, dtype=np.int64).reshape(len(rows), width)
    return [np.ascontiguousarray(column) for column in table.T]


@pytest.fixture(scope="session")
def new_script() -> Callable[[], Script]:
    """Gives empty scripts."""
    return Script


@pytest.fixture
def script() -> Script:
    """One empty script."""
    return Script()


@pytest.fixture
def hill() -> Trace:
    """One storage of 100 bytes, idle over a peak of 200 bytes; each operation takes a second.

    ============  ===  ===  ===  ===  ===
    operation      0    1    2    3    4
    event before       p 0  t 1  t 2  u 3
    live bytes    100  100  200  100  100
    ============  ===  ===  ===  ===  ===
    """
    script = Script()
    saved = script.storage(100)
    script.op(makes=[saved])
    script.pack(saved)
    script.op()
    script.tick()
    script.op(temporary=100)
    script.tick()
    script.op()
    script.unpack(saved)
    script.op(uses=[saved], frees=[saved])
    return script.trace()


@pytest.fixture
def disk() -> Hardware:
    """100 bytes a second either way, both at once."""
    return Hardware(100.0, 100.0)
