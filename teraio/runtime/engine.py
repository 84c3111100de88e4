"""The migration engine: the one place that starts, ends and undoes moves of saved storages.

Covers records, the books of what is resident, and waiting. When to move is decided by the modes (``modes``), where
bytes go by the store. The rules:

- What is resident = what the program would hold without teraio, less the *absent* storages, plus all slabs, plus memory
  that a running write still holds after its storage died. One formula for every mode; only the first term differs.
- Memory for a reload is counted before it is taken.
- A storage is written only when nothing but saved tensors holds it, so that no later change can be missed.
- Every wait has a timeout that names what it waited for.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError

import torch

from io_backend import BackendError, Priority, Store, Ticket
from teraio.errors import OffloadError, OffloadTimeout
from teraio.runtime.buffers import ReloadMemory, SlabPool, capacity_nbytes
from teraio.runtime.events import EventLog
from teraio.runtime.residency import Record, Remains, State, StateRecord

MakeRoom = Callable[[int], None]
_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


class Engine:
    """Moves saved storages between memory and the store.

    Thread safety: all methods take ``lock``; records may die anywhere, see `Record`.

    Invariants: ``absent_nbytes`` is the sum over live records with ``absent``. The engine holds no record: only saved
    tensors do, so that a record dies, and its queued write is cancelled, when the last of them goes.
    """

    def __init__(
        self,
        store: Store,
        budget_nbytes: int,
        log: EventLog,
        *,
        io_timeout_s: float,
        memory: ReloadMemory | None = None,
    ) -> None:
        self.store = store
        self.budget_nbytes = budget_nbytes
        self.log = log
        self.lock = threading.RLock()
        self.pool: ReloadMemory = SlabPool() if memory is None else memory
        self.remains: deque[Remains] = deque()
        self._offloading: deque[tuple[weakref.ref[Record], Ticket]] = deque()
        self.absent_nbytes = 0
        self.peak_nbytes = 0
        self.stall_s = 0.0
        self.last_failure = ""
        self.on_death: Callable[[Remains, bool], None] = lambda remains, lingers: None
        """Told of each dead record while the books are tidied, and whether its memory lingers: whether the program is
        done with the storage although a running write still keeps its memory, which the engine then accounts for."""
        self.interrupts = ""
        """What a refusal would leave half done now, in words; empty when it would lose nothing."""
        self._io_timeout_s = io_timeout_s
        self._by_cdata: dict[int, weakref.ref[Record]] = {}
        self._all: dict[int, weakref.ref[Record]] = {}
        self._lingering: list[tuple[Ticket, int]] = []
        self._lingering_nbytes = 0

    # --- records -----------------------------------------------------------------------------------------------------

    def find(self, storage: torch.UntypedStorage) -> Record | None:
        """The record of a storage that is in memory, if it has one."""
        ref = self._by_cdata.get(storage._cdata)
        return ref() if ref is not None else None

    def adopt(self, storage: torch.UntypedStorage, nbytes: int, dtype: torch.dtype) -> Record:
        """A new record for a storage that has none."""
        record = Record(self, storage, nbytes, dtype)
        ref = weakref.ref(record)
        self._by_cdata[record.cdata] = self._all[record.serial] = ref
        return record

    def adopt_state(self, tensor: torch.Tensor) -> StateRecord:
        """A new record for a long-lived tensor; the caller holds it for as long as the tensor may be moved."""
        return StateRecord(self, tensor)

    def all_records(self) -> list[Record]:
        """All live records of saved storages, oldest first, wherever their bytes are."""
        return [record for ref in list(self._all.values()) if (record := ref()) is not None]

    @property
    def num_records(self) -> int:
        """Number of live records, those that died and were not tidied yet included."""
        return len(self._all)

    # --- the books ---------------------------------------------------------------------------------------------------

    def resident_nbytes(self, plain_nbytes: int) -> int:
        """Bytes resident now, when the program without teraio would hold `plain_nbytes`."""
        return plain_nbytes - self.absent_nbytes + self.pool.total_nbytes + self._lingering_nbytes

    def note_peak(self, plain_nbytes: int) -> None:
        """Take the present level into the peak."""
        self.peak_nbytes = max(self.peak_nbytes, self.resident_nbytes(plain_nbytes))

    def tidy(self) -> None:
        """Bury dead records, take ended transfers and returned slabs into the books. Cheap when nothing happened."""
        while self.remains:
            self._bury(self.remains.popleft())
        while self._offloading and self._offloading[0][1].done():
            ref, ticket = self._offloading.popleft()
            record = ref()
            if record is not None and record.ticket is ticket:
                self._end_offload(record, ticket)
        if self._lingering:
            self._lingering = [(ticket, n) for ticket, n in self._lingering if not ticket.done()]
            self._lingering_nbytes = sum(n for _, n in self._lingering)
        self.pool.drain()

    def _bury(self, remains: Remains) -> None:
        self._all.pop(remains.serial, None)
        if (ref := self._by_cdata.get(remains.cdata)) is not None and ref() is None:
            del self._by_cdata[remains.cdata]
        if remains.absent:
            self.absent_nbytes -= remains.nbytes
        ticket = remains.ticket
        lingers = False
        if ticket is not None and not ticket.done() and not ticket.cancel() and _only_a_write_holds(remains):
            lingers = True
            self._lingering.append((ticket, remains.nbytes))
            self._lingering_nbytes += remains.nbytes
        if remains.extent is not None:
            self.store.free(remains.extent)
        self.on_death(remains, lingers)

    # --- offload -----------------------------------------------------------------------------------------------------

    def start_offload(self, record: Record, *, release: bool, priority: Priority = Priority.BACKGROUND) -> bool:
        """Start writing a resident storage that is free; gives False when it cannot be started now."""
        if record.state is State.CLEAN:
            record.release_wanted = record.release_wanted or release
            return not release or self.release(record)
        if record.state is not State.RESIDENT or record.unwritable or not record.is_free(_use_count):
            return False
        storage = record.storage
        assert storage is not None
        try:
            if record.extent is None:
                record.extent = self.store.allocate(record.nbytes, contiguous=record.is_mapped)
            record.ticket = self.store.write(storage, record.extent, priority=priority)
        except BackendError as error:
            self._fail_offload(record, error)
            return False
        record.release_wanted = release
        record.move_to(State.OFFLOADING)
        self._offloading.append((weakref.ref(record), record.ticket))
        return True

    def _end_offload(self, record: Record, ticket: Ticket) -> None:
        record.ticket = None
        error = ticket.exception()
        if error is not None:
            record.move_to(State.RESIDENT)
            self._fail_offload(record, error)
            return
        record.move_to(State.CLEAN)
        if record.release_wanted:
            self.release(record)

    def _fail_offload(self, record: Record, error: BaseException) -> None:
        """The storage stays in memory; a cancelled write is not a failure of the device."""
        if record.extent is not None:
            self.store.free(record.extent)
            record.extent = None
        record.unwritable = True
        self.last_failure = str(error)  # the error itself would keep its frames, and with them the record
        self.log.add(f"a write to the spill directory failed, the tensor stays in memory: {error}", level=30)

    def release(self, record: Record) -> bool:
        """Give the memory of a clean storage back; gives False when something else still holds it."""
        if record.state is not State.CLEAN or not record.give_up_memory(self.store.map, _use_count):
            return False
        self._by_cdata.pop(record.cdata, None)
        record.move_to(State.OFFLOADED)
        record.release_wanted = False
        record.on_slab = False
        if not record.absent:
            record.absent = True
            self.absent_nbytes += record.nbytes
        self.pool.drain()
        return True

    # --- reload ------------------------------------------------------------------------------------------------------

    def reload_cost_nbytes(self, record: Record) -> int:
        """New memory that a reload of `record` would take."""
        return 0 if self.pool.idle_fits(record.nbytes) else capacity_nbytes(record.nbytes)

    def start_reload(self, record: Record, priority: Priority) -> bool:
        """Set memory aside and start reading an offloaded storage; the caller has made room."""
        if record.state is not State.OFFLOADED:
            return False
        assert record.extent is not None
        storage = self.pool.allocate(record.nbytes)
        try:
            ticket = self.store.read(record.extent, storage, priority=priority)
        except BackendError as error:
            raise OffloadError(f"{record} could not be read back, it stays on the SSD: {error}") from error
        record.move_to(State.RELOADING)
        record.storage, record.ticket = storage, ticket
        return True

    def fetch(self, record: Record, make_room: MakeRoom) -> torch.UntypedStorage:
        """The storage in memory, at once where it is, else after reading it: compute waits for this.

        Raises:
            OffloadError: The read failed; the storage stays on the SSD with its bytes.
            OffloadTimeout: The read did not end in time; it stays on the SSD with its bytes.
        """
        if record.state is State.OFFLOADING and record.ticket is not None and record.ticket.cancel():
            self._undo_offload(record)
        if record.state is State.OFFLOADED:
            make_room(self.reload_cost_nbytes(record))
            self.start_reload(record, Priority.URGENT)
        if record.state is State.RELOADING:
            assert record.ticket is not None
            if not record.ticket.done():
                record.ticket.raise_priority(Priority.URGENT)
            self.end_reload(record)
        assert record.storage is not None
        return record.storage

    def _undo_offload(self, record: Record) -> None:
        """The write had not started: the storage is used again first."""
        record.ticket = None
        record.move_to(State.RESIDENT)
        if record.extent is not None:
            self.store.free(record.extent)
            record.extent = None

    def end_reload(self, record: Record) -> None:
        """Wait for a running read and take its bytes over.

        Raises:
            OffloadError: It failed; the storage stays on the SSD with its bytes.
            OffloadTimeout: It did not end in time; the storage stays on the SSD with its bytes.
        """
        ticket, storage = record.ticket, record.storage
        assert ticket is not None
        assert storage is not None
        record.ticket = None
        try:
            self._wait_for_end(ticket, str(record))
            failure = ticket.exception()
        except BaseException:
            record.move_to(State.OFFLOADED)
            record.storage = None
            raise
        if failure is not None:
            record.move_to(State.OFFLOADED)
            record.storage = None
            # Not raised itself: the store keeps it, and with a traceback it would keep every frame down to the loss.
            raise OffloadError(f"{record} could not be read back, it stays on the SSD: {failure}") from failure
        record.move_to(State.CLEAN)
        record.on_slab = True
        record.take_memory(storage)
        if record.serial in self._all:
            self._by_cdata[record.cdata] = weakref.ref(record)

    # --- waiting -----------------------------------------------------------------------------------------------------

    def _wait_for_end(self, ticket: Ticket, what: str) -> None:
        """Wait until a transfer has ended, well or not; the time counts as stall.

        Raises:
            OffloadTimeout: It did not end within the configured time; it goes on.
        """
        if ticket.done():
            return
        start_s = time.perf_counter()
        try:
            ticket.wait(self._io_timeout_s)
        except (BackendError, CancelledError) as error:
            # Who needs the bytes looks at the outcome. The ticket keeps the error: with a traceback it would keep every
            # frame down to the program's loss, and so the graph, for as long as the store keeps the ticket.
            error.__traceback__ = None
        except TimeoutError as error:
            raise OffloadTimeout(f"{what}: no end after {self._io_timeout_s} s: {error}") from error
        finally:
            self.stall_s += time.perf_counter() - start_s

    def wait_for_one_offload(self) -> bool:
        """Wait until the oldest running write has ended, well or not; gives False when none is running."""
        if not self._offloading:
            return False
        ref, ticket = self._offloading[0]
        ticket.raise_priority(Priority.URGENT)  # compute waits: reads ahead must not overtake it
        self._wait_for_end(ticket, str(ref() or "a saved storage that has died"))
        self.tidy()
        return True

    def wait_for_lingering(self) -> bool:
        """Wait for a running write of a storage that has died meanwhile; gives False when there is none."""
        if not self._lingering:
            return False
        self._wait_for_end(self._lingering[0][0], "a saved storage that has died")
        self.tidy()
        return True


def _only_a_write_holds(remains: Remains) -> bool:
    """Whether the memory of a dead record lives on for no other reason than a running write."""
    storage = remains.memory() if remains.memory is not None else None
    return storage is not None and (_use_count is None or _use_count(storage._cdata) <= 1)
