"""A life of a store, from opening to closing, that must stay right whatever the system does to it.

Covers allocating odd sizes, writing together and alone, reading back, rewriting, cancelling, freeing, growing, mapping.
The rules: bytes that a read returned are the bytes of the last write; what failed is typed, and raised where the
contract says; after one fault the same step succeeds; whatever happened, nothing is left afterwards.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import TypeVar

import numpy as np

from io_backend import BackendConfig, BackendError, CorruptExtentError, Extent, Priority, Store, Ticket, open_store
from tests.io_backend.gates import Gate, wait_for

KIB = 1 << 10
PAGE_NBYTES = 4096
SIZES = {"a": 1, "b": 4097, "c": 100_003, "d": 600_001}
ORPHAN = "teraio-1-333333333333"
TIMEOUT_S = 20.0
_T = TypeVar("_T")


class ScriptedRun:
    """One run in one or several directories; ``errors`` has what went wrong."""

    def __init__(
        self,
        roots: Sequence[Path],
        *,
        aligned: bool = True,
        direct_io: bool = True,
        once: bool = True,
        patience_s: float = TIMEOUT_S,
        on_timeout: Callable[[], object] | None = None,
    ) -> None:
        """Prepare it.

        Args:
            roots: One a device.
            aligned: Whether buffers begin on a page.
            direct_io: As the setting.
            once: Whether at most one call fails, so that trying again must help.
            patience_s: How long a first wait takes.
            on_timeout: Lets go of what the test itself holds when that was too short; without it, it is a hang.
        """
        self.errors: list[str] = []
        self.opened = False
        self._roots = roots
        self._aligned = aligned
        self._once = once
        self._patience_s = patience_s
        self._on_timeout = on_timeout
        self._config = BackendConfig(
            starts_ledger=False,  # `test_ledger` covers its calls
            chunk_nbytes=256 * KIB,
            bounce_nbytes=128 * KIB,
            growth_nbytes=1024 * KIB,
            reserve_free_nbytes=0,
            num_workers=1,
            direct_io=direct_io,
            allow_unsafe_spill=True,  # in memory: thousands of runs, and no other program's use of the disk in them
        )
        self._filler = np.random.default_rng(len(roots))
        self._extents: dict[str, Extent] = {}
        self._contents: dict[str, np.ndarray | None] = {}

    def __call__(self) -> None:
        """Live it. What is not a typed error goes to the caller, as a failed test."""
        roots = self._roots if len(self._roots) > 1 else self._roots[0]
        store = self._step(lambda: open_store(roots, config=self._config, backend="posix", on_event=self.errors.append))
        if store is None:
            return
        self.opened = True
        try:
            self._live(store)
        finally:
            try:
                store.close(self._patience_s)
            except TimeoutError as error:
                self._let_go(error)
                store.close(TIMEOUT_S)

    def _let_go(self, error: TimeoutError) -> None:
        """What was too slow is held by the test, or this is a hang."""
        if self._on_timeout is None:
            raise AssertionError("a hang") from error
        self.errors.append(repr(error))
        self._on_timeout()

    def _live(self, store: Store) -> None:
        for name, nbytes in SIZES.items():
            self._allocate(store, name, nbytes)
        with self._held_back(store):  # so that neighbours can go in one call
            writes = [(name, self._submit_write(store, name)) for name in SIZES]
        for name, ticket in writes:
            self._end_write(name, ticket)
        self._read_all(store)
        with self._held_back(store):
            again = self._submit_write(store, "b"), self._submit_write(store, "d")
            given_up = self._submit_write(store, "a")
            if given_up is not None:
                assert given_up.cancel()
        for name, ticket in zip("bda", (*again, given_up), strict=True):
            self._end_write(name, ticket)
        self._read_all(store)
        self._free(store, "c")
        self._allocate(store, "e", (2 << 20) + 1)
        self._end_write("e", self._submit_write(store, "e"))
        self._map(store)
        self._read_all(store)
        for name in list(self._extents):
            self._free(store, name)
        assert store.statistics().live_nbytes == 0
        assert store.statistics().queued == 0

    def _step(self, action: Callable[[], _T]) -> _T | None:
        """Do it; a typed error is noted."""
        try:
            return action()
        except BackendError as error:
            self.errors.append(f"{type(error).__name__}: {error}")
            return None

    def _allocate(self, store: Store, name: str, nbytes: int) -> None:
        extent = self._step(lambda: store.allocate(nbytes))
        if extent is None:
            extent = self._step(lambda: store.allocate(nbytes))
            assert extent is not None or not self._once, self.errors
        if extent is not None:
            self._extents[name] = extent

    def _free(self, store: Store, name: str) -> None:
        extent = self._extents.pop(name, None)
        self._contents.pop(name, None)
        if extent is not None:
            store.free(extent)

    @contextlib.contextmanager
    def _held_back(self, store: Store):  # type: ignore[no-untyped-def]
        """Nothing starts inside the block, on any device."""
        members = [member.store for member in getattr(store, "_members", ())] or [store]
        held: list[tuple[Store, Extent, Gate]] = []
        for member in members:
            extent = self._step(lambda member=member: member.allocate(0))
            if extent is not None:
                held.append((member, extent, Gate()))
                member.write(b"", extent, priority=Priority.URGENT, after=held[-1][2])
        for _, _, gate in held:
            wait_for(gate.reached)
        yield
        for member, extent, gate in held:
            gate.opened.set()
            member.free(extent)

    def _submit_write(self, store: Store, name: str) -> Ticket | None:
        if name not in self._extents:
            return None
        extent = self._extents[name]
        data = self._buffer(extent.nbytes)
        data[:] = self._filler.integers(0, 256, extent.nbytes, dtype=np.uint8)
        ticket = store.write(data, extent)
        self._contents[name] = data.copy()
        return ticket

    def _end_write(self, name: str, ticket: Ticket | None) -> None:
        if ticket is not None and not self._ended(ticket):
            self._contents[name] = None

    def _ended(self, ticket: Ticket) -> bool:
        try:
            try:
                ticket.wait(self._patience_s)
            except TimeoutError as error:
                self._let_go(error)
                ticket.wait(TIMEOUT_S)
        except (BackendError, CancelledError) as error:
            self.errors.append(f"{type(error).__name__}: {error}")
        assert isinstance(ticket.exception(), CancelledError) == ticket.cancelled
        return ticket.exception() is None

    def _read_all(self, store: Store) -> None:
        buffers = {name: self._buffer(extent.nbytes) for name, extent in self._extents.items()}
        with self._held_back(store):
            tickets = {name: store.read(self._extents[name], buffer) for name, buffer in buffers.items()}
        for name, ticket in tickets.items():
            expected = self._contents.get(name)
            ended = self._ended(ticket)
            if expected is None:
                assert isinstance(ticket.exception(), CorruptExtentError), name
                continue
            if not ended:  # the extent has kept its bytes
                assert not isinstance(ticket.exception(), CorruptExtentError)
                ended = self._ended(store.read(self._extents[name], buffers[name]))
                assert ended or not self._once, self.errors
            assert not ended or np.array_equal(buffers[name], expected), name
        for name in tickets:
            if self._contents.get(name) is None:
                self._end_write(name, self._submit_write(store, name))
            if self._contents[name] is None:
                self._end_write(name, self._submit_write(store, name))
                assert self._contents[name] is not None or not self._once, self.errors

    def _map(self, store: Store) -> None:
        extent = self._extents.get("b")
        if extent is None:
            return
        mapping = self._step(lambda: store.map(extent))
        if mapping is None:
            return
        expected = self._contents.get("b")
        if expected is not None:
            assert mapping[:] == expected.tobytes()
            mapping[5:10] = b"hello"
            expected[5:10] = np.frombuffer(b"hello", np.uint8)
        else:
            mapping[:] = b"x" * extent.nbytes
            self._contents["b"] = np.full(extent.nbytes, ord("x"), np.uint8)
        mapping.close()

    def _buffer(self, nbytes: int) -> np.ndarray:
        around = np.zeros(nbytes + 2 * PAGE_NBYTES, np.uint8)
        start = -around.ctypes.data % PAGE_NBYTES + (0 if self._aligned else 13)
        return around[start : start + nbytes]


def leave_an_orphan(root: Path) -> None:
    """What a dead session may have left, so that there is something to reclaim."""
    (root / ORPHAN).mkdir(parents=True)
    (root / ORPHAN / "lease").touch()
    (root / ORPHAN / "spill-0123456789ab.bin").touch()


def held() -> tuple[int, list[str]]:
    """Open descriptors and I/O threads of this process."""
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("teraio-io-")]
    return len(os.listdir("/proc/self/fd")), threads


def sessions(roots: Sequence[Path]) -> list[str]:
    """What lies in the directories."""
    return [path.name for root in roots if root.exists() for path in root.iterdir()]
