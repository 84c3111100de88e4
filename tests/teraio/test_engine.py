"""The engine moves storages without losing a byte, and its books are right whatever happens.

Covers single moves, and a state machine that mixes them with failures, late transfers and death. The invariant: bytes
read back are those that were saved; what the engine says is resident equals a recount.
"""

from __future__ import annotations

import errno
import gc
import threading
import time
import weakref
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import teraio
from io_backend import BackendConfig, Priority
from io_backend.testing import Fault, FaultStore, MemoryStore, fail, hold
from teraio.runtime.engine import Engine
from teraio.runtime.events import EventLog
from teraio.runtime.residency import Record, State

NBYTES = 8192


def _storage(nbytes: int = NBYTES, fill: int = 1) -> torch.UntypedStorage:
    generator = torch.Generator().manual_seed(fill)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).untyped_storage()


def _bytes(storage: torch.UntypedStorage) -> bytes:
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)).numpy().tobytes()


def _no_room_needed(nbytes: int) -> None:
    """Enough there is."""


@pytest.fixture
def store() -> Iterator[FaultStore]:
    store = FaultStore(MemoryStore(BackendConfig(num_workers=2)))  # one of them for background writes
    yield store
    store.close()


@pytest.fixture
def engine(store: FaultStore) -> Engine:
    return Engine(store, 1 << 30, EventLog(), io_timeout_s=30.0)


def _finish(engine: Engine) -> None:
    while engine.wait_for_one_offload() or engine.wait_for_lingering():
        pass
    engine.tidy()


def _adopt(engine: Engine, fill: int = 1, nbytes: int = NBYTES) -> Record:
    return engine.adopt(_storage(nbytes, fill), nbytes, torch.uint8)


def test_there_and_back(engine: Engine, store: FaultStore) -> None:
    record = _adopt(engine)
    before = _bytes(record.storage)  # type: ignore[arg-type]
    assert engine.start_offload(record, release=True)
    _finish(engine)
    assert record.state is State.OFFLOADED
    assert record.storage is None
    assert engine.absent_nbytes == NBYTES
    assert engine.resident_nbytes(NBYTES) == 0
    asked: list[int] = []
    storage = engine.fetch(record, asked.append)
    assert asked == [NBYTES]
    assert _bytes(storage) == before
    assert record.state is State.CLEAN
    assert engine.resident_nbytes(NBYTES) == NBYTES
    assert engine.find(storage) is record
    # It is clean: giving it back again writes nothing, and its slab is there for the next.
    del storage
    assert engine.start_offload(record, release=True)
    assert record.state is State.OFFLOADED
    assert store.statistics().num_writes == 1
    assert engine.reload_cost_nbytes(record) == 0
    assert _bytes(engine.fetch(record, asked.append)) == before
    assert engine.pool.total_nbytes == NBYTES


def test_what_is_held_is_not_written(engine: Engine, store: FaultStore) -> None:
    storage = _storage()
    record = engine.adopt(storage, NBYTES, torch.uint8)
    assert not engine.start_offload(record, release=True)
    tensor = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (8,), (1,))
    del storage
    assert not engine.start_offload(record, release=True)  # a tensor holds it
    array = tensor.numpy()
    del tensor
    gc.collect()
    assert not engine.start_offload(record, release=True)  # an array does
    del array
    assert engine.start_offload(record, release=True)
    _finish(engine)
    assert store.statistics().num_writes == 1


def test_what_is_taken_up_again_while_it_is_written_stays(engine: Engine, store: FaultStore) -> None:
    gate, reached = threading.Event(), threading.Event()
    store.add(Fault("write", hold(gate, reached)))
    record = _adopt(engine)
    before = _bytes(record.storage)  # type: ignore[arg-type]
    assert engine.start_offload(record, release=True)
    assert reached.wait(10)
    storage = engine.fetch(record, _no_room_needed)  # served from the buffer in flight
    assert _bytes(storage) == before
    assert store.statistics().num_reads == 0
    gate.set()
    _finish(engine)
    assert record.state is State.CLEAN
    assert record.storage is not None
    assert not engine.release(record)  # `storage` holds it
    del storage
    assert engine.release(record)
    assert _bytes(engine.fetch(record, _no_room_needed)) == before


def test_a_queued_write_is_taken_back(engine: Engine, store: FaultStore) -> None:
    gate, reached = threading.Event(), threading.Event()
    store.add(Fault("write", hold(gate, reached)))
    first, second = _adopt(engine, 1), _adopt(engine, 2)
    engine.start_offload(first, release=True)
    engine.start_offload(second, release=True)
    assert reached.wait(10)
    engine.fetch(second, _no_room_needed)
    assert second.state is State.RESIDENT
    assert second.extent is None
    gate.set()
    _finish(engine)
    assert store.statistics().num_writes == 1
    assert not second.unwritable
    assert engine.start_offload(second, release=True)  # and may leave another time
    _finish(engine)
    assert second.state is State.OFFLOADED


@pytest.mark.parametrize("operation", ["write", "allocate"])
def test_a_failed_write_leaves_it_in_memory(engine: Engine, store: FaultStore, operation: str) -> None:
    store.add(Fault(operation, fail(errno.ENOSPC)))  # type: ignore[arg-type]
    record = _adopt(engine)
    before = _bytes(record.storage)  # type: ignore[arg-type]
    engine.start_offload(record, release=True)
    _finish(engine)
    assert record.state is State.RESIDENT
    assert record.unwritable
    assert _bytes(engine.fetch(record, _no_room_needed)) == before
    assert store.statistics().live_nbytes == 0
    assert engine.log.texts()
    alive = weakref.ref(record)
    del record
    assert alive() is None  # the error that is remembered does not hold it
    _finish(engine)
    assert engine.num_records == 0


def test_a_failed_read_leaves_it_on_the_ssd(engine: Engine, store: FaultStore) -> None:
    record = _adopt(engine)
    before = _bytes(record.storage)  # type: ignore[arg-type]
    engine.start_offload(record, release=True)
    _finish(engine)
    store.add(Fault("read", fail(errno.EIO)))
    for _ in range(3):
        with pytest.raises(teraio.OffloadError, match=rf"#{record.serial} .*stays on the SSD"):
            engine.fetch(record, _no_room_needed)
        assert record.state is State.OFFLOADED
        assert record.storage is None
        engine.tidy()
        assert engine.pool.total_nbytes == engine.pool.idle_nbytes <= NBYTES
    store.clear()
    assert _bytes(engine.fetch(record, _no_room_needed)) == before
    alive = weakref.ref(record)
    del record
    assert alive() is None


def test_a_read_that_does_not_end(store: FaultStore) -> None:
    engine = Engine(store, 1 << 30, EventLog(), io_timeout_s=0.1)
    record = _adopt(engine)
    before = _bytes(record.storage)  # type: ignore[arg-type]
    engine.start_offload(record, release=True)
    _finish(engine)
    gate = threading.Event()
    store.add(Fault("read", hold(gate)))
    with pytest.raises(teraio.OffloadTimeout, match=rf"#{record.serial} .*0\.1 s"):
        engine.fetch(record, _no_room_needed)
    assert record.state is State.OFFLOADED
    assert engine.stall_s >= 0.1
    store.clear()
    gate.set()
    assert _bytes(engine.fetch(record, _no_room_needed)) == before


def test_a_write_that_does_not_end(store: FaultStore) -> None:
    engine = Engine(store, 1 << 30, EventLog(), io_timeout_s=0.1)
    gate = threading.Event()
    store.add(Fault("write", hold(gate)))
    record = _adopt(engine)
    engine.start_offload(record, release=True)
    with pytest.raises(teraio.OffloadTimeout, match=rf"#{record.serial} "):
        engine.wait_for_one_offload()
    assert record.state is State.OFFLOADING
    gate.set()
    _finish(engine)
    assert record.state is State.OFFLOADED


@pytest.mark.parametrize("held", [False, True])
def test_a_record_that_dies_while_it_is_written(engine: Engine, store: FaultStore, held: bool) -> None:
    deaths: list[bool] = []
    engine.on_death = lambda remains, lingers: deaths.append(lingers)
    gate, reached = threading.Event(), threading.Event()
    store.add(Fault("write", hold(gate, reached)))
    record = _adopt(engine)
    assert record.storage is not None
    memory = weakref.ref(record.storage)
    engine.start_offload(record, release=True)
    assert reached.wait(30)
    user = torch.empty(0, dtype=torch.uint8).set_(record.storage, 0, (NBYTES,), (1,)) if held else None
    del record
    engine.tidy()
    # What the program still holds is in its own count; what only the write keeps is in no other.
    assert deaths == [not held]
    assert engine.resident_nbytes(NBYTES if held else 0) == NBYTES
    gate.set()
    _finish(engine)
    while not held and memory() is not None:  # the worker's last frame goes a moment later
        time.sleep(0.001)
    assert engine.resident_nbytes(NBYTES if held else 0) == (NBYTES if held else 0)
    del user


def test_a_record_that_dies_while_it_is_read(engine: Engine, store: FaultStore) -> None:
    record = _adopt(engine)
    engine.start_offload(record, release=True)
    _finish(engine)
    gate, reached = threading.Event(), threading.Event()
    store.add(Fault("read", hold(gate, reached)))
    assert engine.start_reload(record, Priority.DEADLINE)
    assert reached.wait(10)
    del record
    engine.tidy()
    assert engine.num_records == 0
    assert engine.absent_nbytes == 0
    assert engine.resident_nbytes(0) == NBYTES  # the slab is still being filled
    gate.set()
    deadline = threading.Event()
    for _ in range(100):
        engine.tidy()
        if engine.pool.idle_nbytes:
            break
        deadline.wait(0.02)
    assert engine.pool.trim(NBYTES) == NBYTES
    assert engine.resident_nbytes(0) == 0
    assert store.statistics().live_nbytes == 0


def test_a_fork_of_a_record_that_dies_leaves_its_twin_in_address_alone(engine: Engine) -> None:
    # The allocator gives the address of a dead storage to the next: the table must know the living one.
    for fill in range(50):
        record = _adopt(engine, fill)
        assert engine.find(record.storage) is record  # type: ignore[arg-type]
        del record
    engine.tidy()
    assert engine.num_records == 0
    assert not engine._by_cdata


class EngineMachine(RuleBasedStateMachine):
    """Any order of moves, faults and deaths; the model is a dictionary of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: list[threading.Event] = []

    @initialize(verify=st.booleans())
    def start(self, verify: bool) -> None:
        self.store = FaultStore(MemoryStore(BackendConfig(num_workers=2, verify=verify)))
        self.engine = Engine(self.store, 1 << 30, EventLog(), io_timeout_s=30.0)
        self.records: dict[int, Record] = {}
        self.expected: dict[int, bytes] = {}
        self.held: dict[int, torch.UntypedStorage] = {}
        self.serial = 0

    def teardown(self) -> None:
        for gate in self.gates:
            gate.set()
        self.held.clear()
        self.records.clear()
        _finish(self.engine)
        # Reads of the dead may still be running.
        self.store.close()
        self.engine.tidy()
        assert self.engine.num_records == 0
        assert self.engine.absent_nbytes == 0
        assert not self.engine._by_cdata
        assert self.engine.resident_nbytes(0) == self.engine.pool.total_nbytes == self.engine.pool.idle_nbytes

    def pick(self, data: st.DataObject, *states: State) -> Record | None:
        choices = [key for key, record in self.records.items() if not states or record.state in states]
        if not choices:
            return None
        return self.records[data.draw(st.sampled_from(choices), label="record")]

    # --- the program ---

    @rule(pages=st.integers(1, 3), odd=st.integers(0, 5), hold_it=st.booleans())
    def adopt(self, pages: int, odd: int, hold_it: bool) -> None:
        if len(self.records) >= 6:
            return
        self.serial += 1
        nbytes = pages * 4096 - odd
        storage = _storage(nbytes, self.serial)
        record = self.engine.adopt(storage, nbytes, torch.uint8)
        self.records[record.serial] = record
        self.expected[record.serial] = _bytes(storage)
        if hold_it:
            self.held[record.serial] = storage

    @rule(data=st.data())
    def drop_record(self, data: st.DataObject) -> None:
        record = self.pick(data)
        if record is not None:
            del self.records[record.serial]
            self.held.pop(record.serial, None)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        del self.held[data.draw(st.sampled_from(sorted(self.held)))]

    @rule(data=st.data(), hold_it=st.booleans())
    def fetch(self, data: st.DataObject, hold_it: bool) -> None:
        record = self.pick(data)
        if record is None or (self.gates and not self.gates[-1].is_set()):
            return
        try:
            storage = self.engine.fetch(record, _no_room_needed)
        except teraio.OffloadError:
            assert record.state is State.OFFLOADED
            return
        record.release_wanted = False
        assert _bytes(storage) == self.expected[record.serial]
        if hold_it:
            self.held[record.serial] = storage

    # --- the modes ---

    @rule(data=st.data(), release=st.booleans())
    def start_offload(self, data: st.DataObject, release: bool) -> None:
        record = self.pick(data)
        if record is not None:
            free = record.serial not in self.held
            started = self.engine.start_offload(record, release=release)
            if started:
                assert free or record.state is State.CLEAN

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        record = self.pick(data)
        if record is not None:
            clean = record.state is State.CLEAN
            free = record.serial not in self.held
            assert self.engine.release(record) == (clean and free)

    @rule(data=st.data(), priority=st.sampled_from(Priority))
    def start_reload(self, data: st.DataObject, priority: Priority) -> None:
        record = self.pick(data, State.OFFLOADED)
        if record is not None:
            assert self.engine.start_reload(record, priority)

    @rule(nbytes=st.integers(0, 20000))
    def trim(self, nbytes: int) -> None:
        before = self.engine.pool.idle_nbytes
        freed = self.engine.pool.trim(nbytes)
        assert min(nbytes, before) <= freed <= before

    # --- the world ---

    @rule(operation=st.sampled_from(["write", "read", "allocate"]), code=st.sampled_from([errno.EIO, errno.ENOSPC]))
    def break_device(self, operation: str, code: int) -> None:
        self.store.add(Fault(operation, fail(code)))  # type: ignore[arg-type]

    @rule()
    def repair_device(self) -> None:
        self.store.clear()

    @precondition(lambda self: not self.gates or self.gates[-1].is_set())
    @rule(operation=st.sampled_from(["write", "read"]))
    def hold_device(self, operation: str) -> None:
        self.gates.append(threading.Event())
        self.store.add(Fault(operation, hold(self.gates[-1])))  # type: ignore[arg-type]

    @precondition(lambda self: self.gates and not self.gates[-1].is_set())
    @rule()
    def let_device_go(self) -> None:
        self.gates[-1].set()
        self.store.clear()

    @precondition(lambda self: not self.gates or self.gates[-1].is_set())
    @rule()
    def wait(self) -> None:
        _finish(self.engine)
        assert not any(record.state is State.OFFLOADING for record in self.records.values())

    # --- what must hold ---

    @invariant()
    def books_equal_a_recount(self) -> None:
        engine = self.engine
        engine.tidy()
        assert engine.absent_nbytes == sum(record.nbytes for record in self.records.values() if record.absent)
        assert {record.serial for record in engine.all_records()} == set(self.records)
        assert engine.num_records == len(self.records)
        pool = engine.pool
        assert 0 <= pool.idle_nbytes <= pool.total_nbytes
        assert pool.idle_nbytes == sum(len(slab) for slabs in pool._idle.values() for slab in slabs)
        for record in self.records.values():
            in_memory = record.storage is not None
            assert in_memory == (record.state is not State.OFFLOADED)
            assert record.absent or record.state in (State.RESIDENT, State.OFFLOADING, State.CLEAN)
            assert (record.extent is not None) == (record.state is not State.RESIDENT)
            assert (record.ticket is not None) == (record.state in (State.OFFLOADING, State.RELOADING))
            if in_memory and record.state is not State.RELOADING:
                assert engine.find(record.storage) is record
                assert _bytes(record.storage) == self.expected[record.serial]


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=60, stateful_step_count=30)
