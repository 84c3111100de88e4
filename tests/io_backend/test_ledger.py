"""The ledger: what is counted, by whom, and that keeping it never gets in the way.

Covers several sessions, locks that are held, files that are damaged, foreign, linked or not writable. The rule: a
transfer's outcome never depends on the ledger.
"""

from __future__ import annotations

import datetime
import fcntl
import gc
import json
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from io_backend import BackendConfig, open_store, read_ledger
from io_backend import ledger as module
from io_backend.ledger import Ledger, LedgerKeeper, ledger_name
from io_backend.meter import Meter, TransferOutcome

MIB = 1 << 20


def use_store(root: Path, nbytes: int = MIB, **changes: Any) -> None:
    """A session that writes and reads so many bytes."""
    store = open_store(root, config=BackendConfig(growth_nbytes=4 * MIB, reserve_free_nbytes=0, **changes))
    try:
        extent = store.allocate(nbytes)
        store.write(bytearray(nbytes), extent).wait(20)
        store.read(extent, bytearray(nbytes)).wait(20)
    finally:
        store.close()


def moved(written_nbytes: int, read_nbytes: int = 0) -> Meter:
    """A meter that has counted so much."""
    meter = Meter()
    add(meter, written_nbytes, read_nbytes)
    return meter


def add(meter: Meter, written_nbytes: int, read_nbytes: int = 0) -> None:
    for operation, nbytes in (("write", written_nbytes), ("read", read_nbytes)):
        meter.begin(operation)  # type: ignore[arg-type]
        meter.end(operation, nbytes, TransferOutcome("test"))  # type: ignore[arg-type]


def test_sessions_add_up(tmp_path: Path) -> None:
    assert read_ledger(tmp_path) == Ledger()
    use_store(tmp_path)
    use_store(tmp_path, 3 * MIB)
    ledger = read_ledger(tmp_path)
    assert ledger == Ledger(4 * MIB, 4 * MIB, datetime.date.today().isoformat(), 2)
    path = tmp_path / f"teraio-ledger-{os.geteuid()}.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_session_that_moves_nothing_leaves_no_file(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_each_directory_has_its_own(tmp_path: Path) -> None:
    use_store_on_two = open_store([tmp_path / "a", tmp_path / "b"])
    extents = [use_store_on_two.allocate(MIB) for _ in range(2)]
    for extent in extents:
        use_store_on_two.write(bytearray(MIB), extent).wait(20)
    use_store_on_two.close()
    assert [read_ledger(tmp_path / name).written_nbytes for name in "ab"] == [MIB, MIB]


def test_a_store_that_nobody_closes_is_counted(tmp_path: Path) -> None:
    store: Any = open_store(tmp_path)
    store.write(bytearray(100), store.allocate(100)).wait(20)
    del store
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("teraio-io"):
            thread.join(10)
    assert read_ledger(tmp_path).written_nbytes == 100


def test_a_running_session_enters_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s)
    meter = moved(MIB, 5)
    keeper = LedgerKeeper(tmp_path, meter)
    keeper.tick()
    assert read_ledger(tmp_path) == Ledger()
    now_s += 61
    keeper.tick()
    assert read_ledger(tmp_path).written_nbytes == MIB
    add(meter, 10)
    keeper.tick()
    assert read_ledger(tmp_path).written_nbytes == MIB
    add(meter, 16 << 30)
    keeper.tick()
    assert read_ledger(tmp_path).written_nbytes == MIB + 10 + (16 << 30)
    assert read_ledger(tmp_path).read_nbytes == 5
    assert read_ledger(tmp_path).sessions == 1


def test_a_held_lock_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s)
    meter = moved(MIB)
    keeper = LedgerKeeper(tmp_path, meter)
    now_s += 61
    holder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    keeper.tick()
    assert read_ledger(tmp_path) == Ledger()
    os.close(holder)
    keeper.tick()  # too soon to try again
    assert read_ledger(tmp_path) == Ledger()
    now_s += 1.5
    keeper.tick()
    assert read_ledger(tmp_path).written_nbytes == MIB


def test_closing_gives_up_on_a_held_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_LAST_CALL_S", 0.02)
    holder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with caplog.at_level("INFO"):
        LedgerKeeper(tmp_path, moved(1)).close()
    os.close(holder)
    assert "locked" in caplog.text


def test_many_at_once_lose_nothing(tmp_path: Path) -> None:
    keepers = [LedgerKeeper(tmp_path, moved(1000 + number)) for number in range(16)]
    threads = [threading.Thread(target=keeper.close) for keeper in keepers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert read_ledger(tmp_path).written_nbytes == sum(1000 + number for number in range(16))
    assert read_ledger(tmp_path).sessions == 16


def test_closing_twice_counts_once(tmp_path: Path) -> None:
    keeper = LedgerKeeper(tmp_path, moved(7))
    keeper.close()
    keeper.close()
    assert read_ledger(tmp_path).written_nbytes == 7


def test_a_forked_child_enters_nothing(tmp_path: Path) -> None:
    keeper = LedgerKeeper(tmp_path, moved(7))
    child = os.fork()
    if child == 0:
        keeper.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert read_ledger(tmp_path) == Ledger()


GOOD = {"kind": "teraio-ledger", "version": 1, "written_nbytes": 5, "read_nbytes": 6, "since": "2026-01-02"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "\x00\xff",
        "[" * 100_000,
        json.dumps(GOOD),  # lacks the sessions
        json.dumps({**GOOD, "sessions": -1}),
        json.dumps({**GOOD, "sessions": True}),
        json.dumps({**GOOD, "sessions": "1"}),
        json.dumps({**GOOD, "sessions": 1, "since": "yesterday"}),
        json.dumps({**GOOD, "sessions": 1, "since": 5}),
        json.dumps({**GOOD, "sessions": 1, "version": 2}),
        json.dumps({**GOOD, "sessions": 1, "kind": "other"}),
    ],
)
def test_a_file_that_cannot_be_used_is_put_aside(tmp_path: Path, text: str) -> None:
    path = tmp_path / ledger_name()
    path.write_text(text)
    assert str(path) in read_ledger(tmp_path).note
    use_store(tmp_path)
    assert read_ledger(tmp_path).written_nbytes == MIB
    assert path.with_name(f"{path.name}.damaged").read_text() == text


def test_old_entries_are_kept(tmp_path: Path) -> None:
    (tmp_path / ledger_name()).write_text(json.dumps({**GOOD, "sessions": 3}))
    LedgerKeeper(tmp_path, moved(10, 20)).close()
    assert read_ledger(tmp_path) == Ledger(15, 26, "2026-01-02", 4)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside.json"
    outside.write_text(json.dumps({**GOOD, "sessions": 3}))
    root = tmp_path / "root"
    root.mkdir()
    (root / ledger_name()).symlink_to(outside)
    use_store(root)
    assert json.loads(outside.read_text())["written_nbytes"] == 5
    assert read_ledger(root).note


def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ledger_name())
    assert "plain file" in read_ledger(tmp_path).note


def fail_with(error: Exception) -> Callable[..., None]:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("error", [OSError(28, "full"), PermissionError(13, "no"), RuntimeError("a bug")])
def test_failures_disturb_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    monkeypatch.setattr(module.json_file, "replace_object", fail_with(error))
    with caplog.at_level("INFO"):
        use_store(tmp_path)
    assert "could not be kept" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_what_a_full_disk_kept_out_is_entered_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = LedgerKeeper(tmp_path, moved(9))
    with monkeypatch.context() as patch:
        patch.setattr(module.json_file, "replace_object", fail_with(OSError(28, "full")))
        keeper.close()
    keeper.close()
    assert read_ledger(tmp_path).written_nbytes == 9
    assert read_ledger(tmp_path).sessions == 1


def test_a_measurement_keeps_a_ledger_and_starts_none(tmp_path: Path) -> None:
    use_store(tmp_path, starts_ledger=False)
    assert list(tmp_path.iterdir()) == []
    use_store(tmp_path)
    use_store(tmp_path, starts_ledger=False)
    assert read_ledger(tmp_path).written_nbytes == 2 * MIB


def test_bytes_a_day() -> None:
    ledger = Ledger(1000, 0, "2026-01-01", 1)
    assert ledger.bytes_per_day(datetime.date(2026, 1, 10)) == 100
    assert ledger.bytes_per_day(datetime.date(2026, 1, 1)) == 1000
    assert Ledger().bytes_per_day() is None
