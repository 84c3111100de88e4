"""Real file systems that fill up, turn read-only or die.

Covers a small ext4 on a loop device, and one whose device has no room behind it. Does not cover faults that only a
script makes (`test_fault_sweep`). The rule: what is mounted is unmounted whatever happens.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from io_backend import BackendConfig, BackendError, CorruptExtentError, StorageFullError, open_store
from io_backend.spill_file import SpillFile
from tests.io_backend.disk_images import (
    drop_caches,
    free_nbytes,
    mounted,
    reason_against_mounts,
    remount_read_only,
    shut_down,
    thin,
)
from tests.io_backend.gates import TIMEOUT_S

MIB = 1 << 20


@pytest.fixture(scope="module")
def mounts_work(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip where file systems cannot be mounted from images."""
    reason = reason_against_mounts(tmp_path_factory.mktemp("probe"))
    if reason is not None:
        pytest.skip(reason)


@contextlib.contextmanager
def opened(spill: Any, **changes: Any) -> Iterator[Any]:
    events = changes.pop("on_event", None)
    config = BackendConfig(**{"growth_nbytes": MIB, "reserve_free_nbytes": 0, **changes})
    with contextlib.closing(open_store(spill, config=config, backend="posix", on_event=events)) as store:
        yield store


class Kept:
    """Extents and what is in them."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.written: list[tuple[Any, np.ndarray]] = []

    def add(self, nbytes: int = MIB) -> None:
        """One more; an error leaves it out."""
        extent = self.store.allocate(nbytes)
        data = np.random.default_rng(len(self.written)).integers(0, 256, nbytes, dtype=np.uint8)
        try:
            self.store.write(data, extent).wait(TIMEOUT_S)
        except BaseException:
            self.store.free(extent)
            raise
        self.written.append((extent, data))

    def add_until_full(self) -> StorageFullError:
        """As many as there is room for."""
        while True:
            try:
                self.add()
            except StorageFullError as error:
                return error

    def check(self) -> None:
        for extent, data in self.written:
            back = np.zeros_like(data)
            self.store.read(extent, back).wait(TIMEOUT_S)
            assert np.array_equal(back, data)


@pytest.mark.usefixtures("mounts_work")
@pytest.mark.parametrize("direct_io", [True, False])
def test_a_file_system_that_we_fill(tmp_path: Path, direct_io: bool) -> None:
    with mounted(tmp_path, 48 * MIB) as point:
        before = free_nbytes(point)
        with opened(point, direct_io=direct_io) as store:
            kept = Kept(store)
            full = kept.add_until_full()
            assert full.errno == errno.ENOSPC
            assert "Free some" in str(full)
            assert len(kept.written) > 20
            with pytest.raises(StorageFullError):
                store.allocate(64 * MIB)
            kept.check()
            for extent, _ in kept.written[::2]:
                store.free(extent)
            kept.written = kept.written[1::2]
            for _ in range(10):
                kept.add()
            kept.check()
        assert free_nbytes(point) == before


@pytest.mark.usefixtures("mounts_work")
def test_a_file_system_that_another_fills(tmp_path: Path) -> None:
    with mounted(tmp_path, 48 * MIB) as point, opened(point) as store:
        kept = Kept(store)
        for _ in range(5):
            kept.add()
        foreign = point / "foreign"
        with foreign.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free_nbytes(point) - 256 * 1024)
        with pytest.raises(StorageFullError):
            store.allocate(10 * MIB)
        for extent, data in kept.written:  # what was allocated is there: rewriting needs no room
            data[:] = 255 - data
            store.write(data, extent).wait(TIMEOUT_S)
        kept.check()
        foreign.unlink()
        kept.add(10 * MIB)
        kept.check()


@pytest.mark.usefixtures("mounts_work")
def test_a_reserve_is_kept(tmp_path: Path) -> None:
    with mounted(tmp_path, 48 * MIB) as point, opened(point, reserve_free_nbytes=20 * MIB) as store:
        kept = Kept(store)
        assert "reserve_free_nbytes" in str(kept.add_until_full())
        assert free_nbytes(point) >= 20 * MIB
        kept.check()


@pytest.mark.usefixtures("mounts_work")
@pytest.mark.parametrize("direct_io", [True, False])
def test_a_file_system_that_dies(tmp_path: Path, direct_io: bool) -> None:
    """As a disk that is pulled out: every call of the file system fails from then on."""
    with mounted(tmp_path, 48 * MIB) as point, opened(point, direct_io=direct_io) as store:
        kept = Kept(store)
        for _ in range(3):
            kept.add()
        shut_down(point)
        with pytest.raises(BackendError) as caught:
            kept.add()
        assert caught.value.errno == errno.EIO
        with pytest.raises(BackendError):
            store.write(kept.written[0][1], kept.written[0][0]).wait(TIMEOUT_S)
        with pytest.raises(CorruptExtentError):
            store.read(kept.written[0][0], kept.written[0][1]).wait(TIMEOUT_S)
        with pytest.raises(BackendError):
            store.allocate(20 * MIB)


@pytest.mark.usefixtures("mounts_work")
def test_of_two_devices_the_dead_one_is_taken_out(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    events: list[str] = []
    with mounted(tmp_path / "one", 64 * MIB) as point:
        healthy = tmp_path / "two"
        with opened([point, healthy], on_event=events.append) as store:
            kept = Kept(store)
            for _ in range(4):
                kept.add(10 * MIB)
            shut_down(point)
            with contextlib.suppress(BackendError):  # a write that was under way there may fail
                kept.add(10 * MIB)
            for _ in range(3):
                kept.add(10 * MIB)
                kept.add(1000)
            out = [device.out for device in store.statistics().devices]
            assert out[0].startswith("it failed")
            assert out[1] == ""
            assert len(events) == 1
            assert str(point) in events[0]
            for extent, data in kept.written[-4:]:
                back = np.zeros_like(data)
                store.read(extent, back).wait(TIMEOUT_S)
                assert np.array_equal(back, data)


@pytest.mark.usefixtures("mounts_work")
@pytest.mark.parametrize("direct_io", [True, False])
def test_a_file_system_that_turns_read_only(tmp_path: Path, direct_io: bool) -> None:
    """What ext4 does by itself after an error of its device; an orderly remount waits for files to be closed."""
    with mounted(tmp_path, 48 * MIB) as point, opened(point, direct_io=direct_io) as store:
        kept = Kept(store)
        for _ in range(3):
            kept.add()
        remount_read_only(point)
        with pytest.raises(BackendError) as caught:
            store.allocate(20 * MIB)
        assert caught.value.errno == errno.EROFS
        assert "read-only" in str(caught.value)
        kept.check()
        extent, data = kept.written[0]
        with pytest.raises(BackendError) as caught:
            store.write(data, extent).wait(TIMEOUT_S)
        assert caught.value.errno == errno.EROFS
        with pytest.raises(CorruptExtentError):
            store.read(extent, data).wait(TIMEOUT_S)
        kept.written = kept.written[1:]
        kept.check()
    assert list(tmp_path.glob("image")) == []


@pytest.mark.usefixtures("mounts_work")
@pytest.mark.parametrize("dontcache", [True, False])
def test_writes_that_the_page_cache_took_and_the_device_did_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dontcache: bool
) -> None:
    if not dontcache:
        monkeypatch.setattr(SpillFile, "_prove_dontcache", lambda self: False)
    with thin(tmp_path, 96 * MIB, 32 * MIB) as (point, exhaust), opened(point, direct_io=False) as store:
        kept = Kept(store)
        for _ in range(6):
            kept.add()
        exhaust()
        failed = 0
        fresh = [(store.allocate(MIB), np.full(MIB, number, np.uint8)) for number in range(10)]
        tickets = [(extent, data, store.write(data, extent)) for extent, data in fresh]
        accepted = []
        for extent, data, ticket in tickets:
            try:
                ticket.wait(TIMEOUT_S)
                accepted.append((extent, data))
            except BackendError:
                failed += 1
        drop_caches()
        for extent, data in accepted:
            back = np.zeros_like(data)
            store.read(extent, back).wait(TIMEOUT_S)
            assert np.array_equal(back, data)
        assert failed >= 8
        kept.check()
