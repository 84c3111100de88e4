"""The doubles that ship: scripted faults do what they say, and only to the operations meant.

Covers ``FaultStore`` and the limits of ``MemoryStore``. The contract itself is tested in `test_contract_round_trips`.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator

import pytest

from io_backend import BackendError, BackendUnavailableError, ShortTransferError, StorageFullError
from io_backend.testing import Fault, FaultStore, MemoryStore, fail, hold, short, slow

TIMEOUT_S = 20.0


@pytest.fixture
def store() -> Iterator[FaultStore]:
    store = FaultStore(MemoryStore())
    yield store
    store.close()


def test_fail_by_index(store: FaultStore) -> None:
    store.add(Fault("write", fail(errno.ENOSPC), index=1))
    extents = [store.allocate(4) for _ in range(3)]
    tickets = [store.write(b"abcd", extent) for extent in extents]
    tickets[0].wait(TIMEOUT_S)
    tickets[2].wait(TIMEOUT_S)
    with pytest.raises(StorageFullError, match="No space left"):
        tickets[1].wait(TIMEOUT_S)


def test_fail_by_extent(store: FaultStore) -> None:
    bad, good = store.allocate(4), store.allocate(4)
    store.add(Fault("read", fail(), where=lambda extent: extent == bad))
    for extent in (bad, good):
        store.write(b"abcd", extent)
    back = bytearray(4)
    store.read(good, back).wait(TIMEOUT_S)
    assert back == b"abcd"
    with pytest.raises(BackendError) as caught:
        store.read(bad, back).wait(TIMEOUT_S)
    assert caught.value.errno == errno.EIO
    store.clear()
    store.read(bad, back).wait(TIMEOUT_S)


def test_short(store: FaultStore) -> None:
    store.add(Fault("write", short(2)))
    with pytest.raises(ShortTransferError, match="2 bytes"):
        store.write(b"abcd", store.allocate(4)).wait(TIMEOUT_S)


def test_hold_and_slow_keep_the_callers_after(store: FaultStore) -> None:
    event, reached, ran = threading.Event(), threading.Event(), threading.Event()
    store.add(Fault("write", hold(event, reached)))
    store.add(Fault("write", slow(0.001)))
    ticket = store.write(b"abcd", store.allocate(4), after=ran.set)
    assert reached.wait(TIMEOUT_S)
    assert not ran.is_set()
    assert not ticket.done()
    event.set()
    ticket.wait(TIMEOUT_S)
    assert ran.is_set()
    assert "2 scripted faults" in store.describe()


def test_allocate_faults(store: FaultStore) -> None:
    store.add(Fault("allocate", fail(errno.EDQUOT), index=0))
    with pytest.raises(StorageFullError, match="quota"):
        store.allocate(4)
    store.free(store.allocate(4))


def test_memory_store_limits() -> None:
    store = MemoryStore(capacity_nbytes=8192)
    extent = store.allocate(5000)
    with pytest.raises(StorageFullError, match="capacity_nbytes=8192"):
        store.allocate(1)
    with pytest.raises(BackendUnavailableError, match="no file"):
        store.map(extent)
    store.free(extent)
    store.allocate(8192)
    store.close()
