"""The transfer loop under a system that misbehaves.

Covers short and stuck transfers, error numbers, retries, and the way down the ladder. The rule: faults are put in at
``os.pwritev`` and ``os.preadv``, so everything above is real.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from io_backend import BackendError, Priority, ShortTransferError, StorageFullError
from io_backend import direct_io as module

if TYPE_CHECKING:
    from conftest import Case

MIB = 1 << 20
Call = Callable[..., int]
CALLS = {"write": "pwritev", "read": "preadv"}
POSIX = ("posix-direct", "posix-buffered", "posix-misaligned")


def patch_call(patch: pytest.MonkeyPatch, operation: str, wrap: Callable[[Call], Call]) -> None:
    name = CALLS[operation]
    patch.setattr(os, name, wrap(getattr(os, name)))


def failing(code: int, times: int = 1 << 30, only_fd: int | None = None) -> Callable[[Call], Call]:
    """The first ``times`` calls raise."""
    left = [times]

    def wrap(real: Call) -> Call:
        def call(fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
            if left[0] and only_fd in (None, fd):
                left[0] -= 1
                raise OSError(code, os.strerror(code))
            return real(fd, buffers, offset, flags)

        return call

    return wrap


def shortened(limit: int) -> Callable[[Call], Call]:
    """No call moves more than ``limit`` bytes."""

    def wrap(real: Call) -> Call:
        def call(fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
            return real(fd, [memoryview(buffers[0])[:limit]], offset, flags) if limit else 0

        return call

    return wrap


def submit(case: Case, operation: str, extent: Any, buffer: np.ndarray) -> None:
    if operation == "write":
        case.store.write(buffer, extent).wait(20)
    else:
        case.store.read(extent, buffer).wait(20)


@pytest.fixture(params=POSIX)
def case(request: pytest.FixtureRequest, make_case: Callable[..., Case]) -> Case:
    return make_case(request.param)


@pytest.mark.parametrize("limit", [8192, 12288, 1 << 18])
def test_short_transfers_go_on(case: Case, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    extent = case.store.allocate(MIB + 12)
    data, back = case.random(MIB + 12), case.empty(MIB + 12)
    with monkeypatch.context() as patch:
        patch_call(patch, "write", shortened(limit))
        patch_call(patch, "read", shortened(limit))
        submit(case, "write", extent, data)
        submit(case, "read", extent, back)
    assert np.array_equal(back, data)


def test_short_transfers_at_odd_lengths_go_on_at_a_block(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    extent = case.store.allocate(40_000)
    data, back = case.random(40_000), case.empty(40_000)

    def odd(real: Call) -> Call:
        def call(fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
            moved = real(fd, buffers, offset, flags)
            return moved - 1000 if moved > 8192 else moved

        return call

    with monkeypatch.context() as patch:
        patch_call(patch, "write", odd)
        patch_call(patch, "read", odd)
        submit(case, "write", extent, data)
        submit(case, "read", extent, back)
    assert np.array_equal(back, data)
    assert len(case.store.statistics().paths) == 1
    assert case.store.describe().startswith(*case.store.statistics().paths)  # no rung lower


@pytest.mark.parametrize("operation", ["write", "read"])
def test_no_progress_is_an_error(case: Case, monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    extent = case.store.allocate(10_000)
    data = case.random(10_000)
    submit(case, "write", extent, data)
    with monkeypatch.context() as patch:
        patch_call(patch, operation, shortened(0))
        with pytest.raises(ShortTransferError, match=f"{operation} of .* stopped after 0"):
            submit(case, operation, extent, data)
    submit(case, "write", extent, data)
    submit(case, "read", extent, data)


def test_a_truncated_file_is_a_short_read(case: Case) -> None:
    extent = case.store.allocate(100_000)
    data = case.random(100_000)
    submit(case, "write", extent, data)
    os.truncate(case.store.file.fd, 8192)  # type: ignore[attr-defined]
    with pytest.raises(ShortTransferError, match="truncated"):
        submit(case, "read", extent, data)


@pytest.mark.parametrize("operation", ["write", "read"])
@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.EIO, BackendError),
        (errno.ENOSPC, StorageFullError),
        (errno.EDQUOT, StorageFullError),
        (errno.EFBIG, StorageFullError),
        (errno.EROFS, BackendError),
    ],
)
def test_error_numbers(
    case: Case, monkeypatch: pytest.MonkeyPatch, operation: str, code: int, kind: type[BackendError]
) -> None:
    extent = case.store.allocate(10_000)
    data = case.random(10_000)
    expected = data.copy()
    submit(case, "write", extent, data)
    with monkeypatch.context() as patch:
        patch_call(patch, operation, failing(code))
        with pytest.raises(kind) as caught:
            submit(case, operation, extent, data)
    assert type(caught.value) is kind
    assert caught.value.errno == code
    for part in (operation, "10000 bytes", f"offset {extent.offset}", "teraio-", os.strerror(code)):
        assert part in str(caught.value)
    if operation == "read":  # a failed read leaves the extent as it was
        submit(case, "read", extent, data)
        assert np.array_equal(data, expected)
    statistics = case.store.statistics()
    assert statistics.num_writes == 1


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EINTR])
def test_again_means_again(case: Case, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    extent = case.store.allocate(10_000)
    data, back = case.random(10_000), case.empty(10_000)
    with monkeypatch.context() as patch:
        patch_call(patch, "write", failing(code, times=3))
        patch_call(patch, "read", failing(code, times=3))
        submit(case, "write", extent, data)
        submit(case, "read", extent, back)
    assert np.array_equal(back, data)


def test_again_for_ever_is_an_error(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RETRY_PAUSE_S", 0.0)
    with monkeypatch.context() as patch:
        patch_call(patch, "write", failing(errno.EAGAIN))
        with pytest.raises(ShortTransferError, match="try again"):
            submit(case, "write", case.store.allocate(100), case.random(100))


@pytest.mark.parametrize("dontcache", [True, False])
def test_a_lost_write_is_told_to_all_who_wrote(
    make_case: Callable[..., Case], monkeypatch: pytest.MonkeyPatch, dontcache: bool
) -> None:
    """The system reports lost bytes once, to whoever syncs first: here to the other writer."""
    case = make_case("posix-buffered")
    case.store.file.dontcache = case.store.file.dontcache and dontcache  # type: ignore[attr-defined]
    extents = [case.store.allocate(5000) for _ in range(2)]
    held, reached = threading.Event(), threading.Event()
    pwritev = os.pwritev

    def held_behind_the_first(fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        moved = pwritev(fd, buffers, offset, flags)
        if offset == extents[0].offset:
            reached.set()
            assert held.wait(20)
        return moved

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", held_behind_the_first)
        first = case.store.write(case.random(5000), extents[0])
        assert reached.wait(20)
        with monkeypatch.context() as inner:
            inner.setattr(os, "fdatasync", broken)
            with pytest.raises(BackendError) as caught:
                case.store.write(case.random(5000), extents[1], priority=Priority.URGENT).wait(20)
        assert caught.value.errno == errno.EIO
        held.set()
        with pytest.raises(BackendError) as caught:
            first.wait(20)
        assert caught.value.errno == errno.EIO
    for extent in extents:
        data, back = case.random(5000), case.empty(5000)
        submit(case, "write", extent, data)
        submit(case, "read", extent, back)
        assert np.array_equal(back, data)


def broken(*args: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_advice_that_fails_is_no_failure(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.kind == "posix-buffered":
        case.store.file.dontcache = False  # type: ignore[attr-defined]
    monkeypatch.setattr(os, "posix_fadvise", broken)
    extent = case.store.allocate(5000)
    data, back = case.random(5000), case.empty(5000)
    submit(case, "write", extent, data)
    submit(case, "read", extent, back)
    assert np.array_equal(back, data)


def test_paths(make_case: Callable[..., Case]) -> None:
    direct, misaligned = make_case("posix-direct"), make_case("posix-misaligned")
    buffered = make_case("posix-buffered")
    for case in (direct, misaligned, buffered):
        submit(case, "write", case.store.allocate(8192 + 5), case.random(8192 + 5))
    if direct.store.file.direct_fd is None:  # type: ignore[attr-defined]
        pytest.skip("this file system has no O_DIRECT")
    assert direct.store.statistics().paths == {"posix-direct": 8197}
    assert direct.store.statistics().bounced_nbytes == 5
    assert misaligned.store.statistics().paths == {"posix-direct": 8197}
    assert misaligned.store.statistics().bounced_nbytes == 8197
    assert buffered.store.statistics().paths == {"posix-buffered": 8197}
    assert "posix-direct" in direct.store.describe()
    assert "posix-buffered" in buffered.store.describe()
    assert "direct_io is off" in buffered.store.describe()


def test_einval_in_use_goes_down_the_ladder(make_case: Callable[..., Case], monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("posix-direct")
    direct_fd = case.store.file.direct_fd  # type: ignore[attr-defined]
    extent = case.store.allocate(100_000)
    data, back = case.random(100_000), case.empty(100_000)
    with monkeypatch.context() as patch:
        patch_call(patch, "write", failing(errno.EINVAL, times=1, only_fd=direct_fd))
        patch_call(patch, "read", failing(errno.EINVAL, only_fd=direct_fd))
        submit(case, "write", extent, data)
        submit(case, "read", extent, back)
    assert np.array_equal(back, data)
    assert case.store.statistics().paths == {"posix-direct": 100_000, "posix-buffered": 100_000}
    assert case.store.statistics().bounced_nbytes == 100_000


def test_einval_at_the_proof_means_buffered(make_case: Callable[..., Case], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch_call(patch, "write", failing(errno.EINVAL))
        case = make_case("posix-direct")
    assert "opens but does not work" in case.store.describe()
    data, back = case.random(50_001), case.empty(50_001)
    extent = case.store.allocate(50_001)
    submit(case, "write", extent, data)
    submit(case, "read", extent, back)
    assert np.array_equal(back, data)
    assert case.store.statistics().paths == {"posix-buffered": 100_002}


def test_a_lying_device_means_buffered(make_case: Callable[..., Case], monkeypatch: pytest.MonkeyPatch) -> None:
    def zeroes(real: Call) -> Call:
        return lambda fd, buffers, offset, flags=0: len(memoryview(buffers[0]))

    with monkeypatch.context() as patch:
        patch_call(patch, "read", zeroes)
        case = make_case("posix-direct")
    assert "bytes came back changed" in case.store.describe()


def test_no_o_direct_at_all(make_case: Callable[..., Case], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_DIRECT")
    case = make_case("posix-direct")
    submit(case, "write", case.store.allocate(100), case.random(100))
    assert "no O_DIRECT" in case.store.describe()


def test_large_buffers_cross_chunks_and_bounces(make_case: Callable[..., Case]) -> None:
    for kind in POSIX:
        case = make_case(kind, chunk_nbytes=8192, bounce_nbytes=16384, num_workers=2)
        data, back = case.random(100_001), case.empty(100_001)
        extent = case.store.allocate(100_001)
        submit(case, "write", extent, data)
        submit(case, "read", extent, back)
        assert np.array_equal(back, data)
        assert case.store.staging_nbytes == 2 * 16384
