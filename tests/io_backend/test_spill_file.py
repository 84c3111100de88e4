"""Growing, limits and full disks: what happens to the spill file, seen through a store.

Covers quota, reserve, failed and unsupported preallocation, file size limits, file systems without anonymous files.
The rule: after a refusal the store works on, with the file at its old size.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from io_backend import BackendError, Priority, StorageFullError, open_store
from tests.io_backend.gates import TIMEOUT_S, Gate

if TYPE_CHECKING:
    from conftest import Case

MIB = 1 << 20


def round_trip(case: Case, nbytes: int = 100_000) -> None:
    data, back = case.random(nbytes), case.empty(nbytes)
    extent = case.store.allocate(nbytes)
    case.store.write(data, extent)
    case.store.read(extent, back).wait(20)
    assert np.array_equal(back, data)
    case.store.free(extent)


def test_growth_in_steps_and_reuse(make_case: Callable[..., Case]) -> None:
    case = make_case(growth_nbytes=4 * MIB)
    for _ in range(10):
        extents = [case.store.allocate(MIB) for _ in range(4)]
        for extent in extents:
            case.store.free(extent)
    assert case.store.statistics().file_nbytes == 4 * MIB
    case.store.allocate(9 * MIB)
    assert case.store.statistics().file_nbytes == 9 * MIB


def test_extents_of_several_directories_alternate(make_case: Callable[..., Case]) -> None:
    case = make_case("posix-two-directories")
    assert [case.store.allocate(10).file_index for _ in range(4)] == [0, 1, 0, 1]
    assert case.store.statistics().high_water_nbytes == 4 * 4096


def test_quota(make_case: Callable[..., Case]) -> None:
    case = make_case(max_spill_nbytes=6 * MIB)
    kept = case.store.allocate(5 * MIB)
    with pytest.raises(StorageFullError, match="max_spill_nbytes=6291456") as caught:
        case.store.allocate(2 * MIB)
    assert caught.value.errno == errno.EDQUOT
    round_trip(case)
    case.store.free(kept)
    case.store.allocate(6 * MIB)
    assert case.store.statistics().file_nbytes <= 6 * MIB


def test_reserve(make_case: Callable[..., Case]) -> None:
    case = make_case(reserve_free_nbytes=1 << 60)
    with pytest.raises(StorageFullError, match="reserve_free_nbytes") as caught:
        case.store.allocate(1)
    assert caught.value.errno == errno.ENOSPC
    assert case.store.statistics().live_nbytes == 0


def test_the_other_directory_takes_over(make_case: Callable[..., Case], monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("posix-two-directories")
    real, first = os.posix_fallocate, case.store._members[0].store.file  # type: ignore[attr-defined]

    def full(fd: int, offset: int, length: int) -> None:
        if fd == first.fd:
            raise OSError(errno.ENOSPC, "full")
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert [case.store.allocate(MIB).file_index for _ in range(3)] == [1, 1, 1]


def test_a_failed_preallocation_is_given_back(make_case: Callable[..., Case], monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case()
    round_trip(case)
    fd = case.store.file.fd  # type: ignore[attr-defined]
    size = os.fstat(fd).st_size
    real = os.posix_fallocate

    def grabs_then_fails(fd: int, offset: int, length: int) -> None:
        real(fd, offset, length // 2 // 4096 * 4096)
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", grabs_then_fails)
        with pytest.raises(StorageFullError, match="No space left"):
            case.store.allocate(64 * MIB)
    assert os.fstat(fd).st_size == size
    assert os.fstat(fd).st_blocks * 512 <= size + MIB
    round_trip(case, 5 * MIB)


def test_file_systems_without_preallocation(make_case: Callable[..., Case], monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    round_trip(make_case())


def test_file_systems_without_anonymous_files(
    make_case: Callable[..., Case], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = os.open

    def no_tmpfile(path: str, flags: int, *args: int, **options: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no")
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", no_tmpfile)
    case = make_case()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["lease"]
    round_trip(case)


@pytest.fixture
def small_file_limit() -> Iterator[int]:
    """A limit of 8 MiB on file sizes in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * MIB, hard))
    yield 8 * MIB
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, handler)


def test_file_size_limit(make_case: Callable[..., Case], small_file_limit: int) -> None:
    case = make_case(growth_nbytes=64 * MIB)
    round_trip(case, 5 * MIB)
    with pytest.raises(StorageFullError, match="file size limit") as caught:
        case.store.allocate(16 * MIB)
    assert caught.value.errno == errno.EFBIG
    round_trip(case, 5 * MIB)


def test_growth_ahead_ends_where_no_step_fits(make_case: Callable[..., Case], small_file_limit: int) -> None:
    case = make_case(growth_nbytes=64 * MIB)
    for _ in range(5):
        round_trip(case, 5 * MIB)
    assert case.store.statistics().file_nbytes <= 5 * MIB + 65536  # not a little more after each transfer


def test_map_waits_for_a_write_that_came_while_it_waited(make_case: Callable[..., Case]) -> None:
    case = make_case()
    extent = case.store.allocate(5000)
    gates = [Gate(), Gate()]
    data, back = case.random(5000), case.empty(5000)
    mapped: list[mmap.mmap] = []
    case.store.write(case.random(5000), extent, after=gates[0])
    thread = threading.Thread(target=lambda: mapped.append(case.store.map(extent)))
    thread.start()
    case.store.write(data, extent, after=gates[1])
    gates[0].opened.set()
    assert gates[1].reached.wait(TIMEOUT_S)
    thread.join(0.2)  # it has every chance to forget the second write
    read = case.store.read(extent, back, priority=Priority.URGENT)
    gates[1].opened.set()
    read.wait(TIMEOUT_S)
    assert np.array_equal(back, data)
    thread.join(TIMEOUT_S)
    assert mapped[0][:] == data.tobytes()
    mapped[0].close()


def test_a_mapping_that_the_system_refuses(make_case: Callable[..., Case], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: object, **options: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    case = make_case()
    extent = case.store.allocate(5000)
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", refuses)
        with pytest.raises(BackendError, match="mapping of 5000 bytes") as caught:
            case.store.map(extent)
    assert caught.value.errno == errno.ENOMEM
    case.store.free(extent)
    assert case.store.statistics().live_nbytes == 0


def test_map_shares_bytes_with_transfers(make_case: Callable[..., Case]) -> None:
    case = make_case()
    extent = case.store.allocate(10_000)
    data = case.random(10_000)
    case.store.write(data, extent)
    mapping = case.store.map(extent)
    assert mapping[:] == data.tobytes()
    mapping[:5] = b"hello"
    back = case.empty(10_000)
    case.store.read(extent, back).wait(20)
    assert back[:5].tobytes() == b"hello"
    assert np.array_equal(back[5:], data[5:])
    case.store.free(extent)
    assert case.store.statistics().live_nbytes == extent.capacity_nbytes
    mapping.close()
    assert case.store.statistics().live_nbytes == 0


def test_a_mapping_survives_the_store(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    mapping = store.map(store.allocate(4096))
    store.close()
    mapping[:3] = b"abc"
    assert mapping[:3] == b"abc"
    mapping.close()


def test_an_unusable_directory_gives_a_typed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, buffers: object, offset: int, flags: int = 0) -> int:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "pwritev", broken)
    with pytest.raises(BackendError, match="opening a spill file") as caught:
        open_store(tmp_path)
    assert caught.value.errno == errno.EIO
    assert list(tmp_path.iterdir()) == []
