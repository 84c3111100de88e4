"""Stores that are forgotten, forked, or still busy when the interpreter ends; settings and arguments.

Covers garbage collection, fork, interpreter exit, configuration. The rule: nothing here depends on ``atexit`` running.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from io_backend import BackendConfig, BackendUnavailableError, Extent, Priority, SpillDirectory, open_store
from io_backend import workers as workers_module
from io_backend.ledger import ledger_name
from io_backend.queued_ticket import QueuedTicket, Work
from io_backend.testing import MemoryStore
from io_backend.workers import WorkerPool

if TYPE_CHECKING:
    from conftest import Case

REPOSITORY = Path(__file__).resolve().parents[2]


def io_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("teraio-io-")]


def left_in(root: Path) -> list[str]:
    """What is in a spill root, but for the ledger, which is meant to stay."""
    return [path.name for path in root.iterdir() if path.name != ledger_name()]


def wait_for_threads() -> None:
    for thread in io_threads():
        thread.join(10)
    assert io_threads() == []


def test_an_unclosed_store_is_collected(tmp_path: Path) -> None:
    store: Any = open_store(tmp_path)
    extent = store.allocate(100)
    store.write(b"x" * 100, extent).wait(20)
    reference = weakref.ref(store)
    assert len(io_threads()) == BackendConfig().num_workers
    del store
    gc.collect()
    assert reference() is None
    wait_for_threads()
    assert left_in(tmp_path) == []


def test_a_forgotten_store_finishes_its_tickets(tmp_path: Path) -> None:
    reached, opened = threading.Event(), threading.Event()

    def gate() -> None:
        reached.set()
        assert opened.wait(20)

    store: Any = open_store(tmp_path, config=BackendConfig(num_workers=1))
    back = bytearray(5000)
    extent = store.allocate(5000)
    write = store.write(b"y" * 5000, extent, after=gate)
    read = store.read(extent, back)
    reference = weakref.ref(store)
    assert reached.wait(20)
    del store
    gc.collect()
    opened.set()
    read.wait(20)
    assert write.done()
    assert back == b"y" * 5000
    wait_for_threads()
    assert reference() is None
    assert left_in(tmp_path) == []


def test_a_forked_child_cannot_use_the_store(make_case: Callable[..., Case]) -> None:
    case = make_case()
    extent = case.store.allocate(4)
    case.store.write(b"abcd", extent).wait(20)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            uses = [
                lambda: case.store.allocate(4),
                lambda: case.store.write(b"efgh", extent),
                lambda: case.store.read(extent, bytearray(4)),
                case.store.statistics,
            ]
            for use in uses:
                try:
                    use()
                except BackendUnavailableError as error:
                    if "forked child" not in str(error):
                        os._exit(2)
                else:
                    os._exit(3)
            case.store.free(extent)
            case.store.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    back = bytearray(4)
    case.store.read(extent, back).wait(20)
    assert back == b"abcd"


EXITING = """
import sys
from io_backend import open_store
store = open_store(sys.argv[1])
extent = store.allocate(1 << 26)
tickets = [store.write(bytearray(1 << 26), extent) for _ in range(4)]
extra = sys.argv[2]
if extra == "raise":
    raise RuntimeError("the user's own error")
if extra == "cycle":
    me = [store]; me.append(me); del store
"""


@pytest.mark.parametrize("extra", ["plain", "raise", "cycle"])
def test_interpreter_exit_with_io_in_flight(tmp_path: Path, extra: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", EXITING, str(tmp_path), extra],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == (1 if extra == "raise" else 0)
    assert [line for line in done.stderr.splitlines() if "Error" in line or "Exception" in line] == (
        ["RuntimeError: the user's own error"] if extra == "raise" else []
    )
    SpillDirectory.create(tmp_path).close()
    assert left_in(tmp_path) == []


def test_importing_opens_nothing() -> None:
    code = "import io_backend, sys, threading; assert 'torch' not in sys.modules; assert threading.active_count() == 1"
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60, env=env)


def test_a_worker_survives_anything(make_case: Callable[..., Case], caplog: pytest.LogCaptureFixture) -> None:
    case = make_case("memory", num_workers=1)

    def exits() -> None:
        raise SystemExit(3)

    def callback_exits(_: object) -> None:
        raise SystemExit(4)

    extent = case.store.allocate(1)
    opened = threading.Event()
    ticket = case.store.write(b"x", extent, after=lambda: opened.wait(20) and exits())
    ticket.add_done_callback(callback_exits)
    opened.set()
    with pytest.raises(SystemExit):
        ticket.wait(20)
    case.store.write(b"x", extent).wait(20)
    assert "unexpected error in an I/O worker" in caplog.text


def test_no_threads_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(threading.Thread):
        def start(self) -> None:
            if self.name == "teraio-io-1":
                raise RuntimeError("can't start new thread")
            super().start()

    monkeypatch.setattr(workers_module.threading, "Thread", Refusing)
    with pytest.raises(BackendUnavailableError, match="could not start 2"):
        WorkerPool(2)
    wait_for_threads()


class Nothing:
    """Work that moves nothing and joins nothing."""

    def __call__(self) -> None:
        """Done."""

    def joins(self, works: Sequence[Work], following: Work) -> bool:
        return False

    def run_together(self, works: Sequence[Work]) -> list[BaseException | None]:
        raise AssertionError("joins nothing")


def test_a_swallowed_wake_up_is_passed_on() -> None:
    pool = WorkerPool(0)  # this test is the worker
    extent = Extent(0, 0, 1, 4096)
    tickets = [QueuedTicket("read", extent, Priority.DEADLINE, Nothing(), pool=pool) for _ in range(2)]
    for ticket in tickets:
        pool.add(ticket)
    assert pool.wait_for_work()
    assert pool.take() == ([tickets[0]], False)
    assert not pool._wake.empty()
    assert pool.wait_for_work()
    assert pool.take() == ([tickets[1]], False)
    assert pool._wake.empty()


def test_an_idle_worker_wakes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "_IDLE_WAKE_S", 0.001)
    store = MemoryStore()
    extent = store.allocate(1)
    for _ in range(20):
        store.write(b"x", extent).wait(20)
    store.close()


def test_backends_by_name(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailableError, match="posix"):
        open_store(tmp_path, backend="kvikio")
    with pytest.raises(ValueError, match="unknown backend"):
        open_store(tmp_path, backend="tape")
    with pytest.raises(ValueError, match="at least one"):
        open_store([])
    open_store(str(tmp_path), backend="posix").close()


def test_a_bad_second_directory_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="cannot use"):
        open_store([tmp_path / "good", tmp_path / "file"])
    assert list((tmp_path / "good").iterdir()) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chunk_nbytes", 1000),
        ("chunk_nbytes", 2 << 30),
        ("bounce_nbytes", 0),
        ("growth_nbytes", -4096),
        ("num_workers", 0),
        ("num_workers", 1000),
        ("reserve_free_nbytes", -1),
        ("max_spill_nbytes", -1),
        ("io_timeout_s", 0.0),
        ("io_timeout_s", float("nan")),
    ],
)
def test_settings_are_checked(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        BackendConfig(**{field: value})  # type: ignore[arg-type]


def test_a_suspicious_wait_dumps_the_queue(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("io_backend.queued_ticket._SUSPICIOUS_S", 0.0)
    store = MemoryStore(BackendConfig(num_workers=1))
    reached, gate = threading.Event(), threading.Event()
    stuck = store.write(b"stuck", store.allocate(5), after=lambda: (reached.set(), gate.wait(20)))
    assert reached.wait(20)
    queued = [store.write(b"later", store.allocate(5)) for _ in range(60)]
    with caplog.at_level("WARNING", "io_backend"), pytest.raises(TimeoutError):
        stuck.wait(0.01)
    gate.set()
    queued[-1].wait(20)
    store.close()
    record = caplog.records[0]
    lines = record.getMessage().splitlines()
    assert "60 waiting, 1 running" in lines[0]
    assert "running, submitted" in lines[1]
    assert all("background: queued" in line for line in lines[2:-1])
    assert lines[-1] == "  and 11 more"
