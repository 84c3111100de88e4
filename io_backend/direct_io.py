"""Moving one buffer to or from a spill file, down a ladder of ways.

Covers the three rungs: O_DIRECT from the buffer itself, O_DIRECT through an aligned bounce buffer, the page cache;
splitting into calls, short transfers, retries, and the unaligned tail.
It does not decide order or priority, nor where in the file a buffer goes.

Rule: on disk, offsets and lengths are whole blocks; in the caller's buffer, not one byte beyond its length is touched.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from io_backend.buffers import BouncePool, Memory, copy_bytes
from io_backend.errors import ShortTransferError
from io_backend.meter import TransferOutcome
from io_backend.spill_file import RWF_DONTCACHE, SpillFile

if TYPE_CHECKING:
    from io_backend.store import Operation

_NOT_THIS_WAY = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
_MAX_RETRIES = 100
_RETRY_PAUSE_S = 0.001
_STRAIGHT = TransferOutcome("posix-direct")


def transfer(
    operation: Operation, file: SpillFile, offset: int, memory: Memory, *, chunk_nbytes: int, bounces: BouncePool
) -> TransferOutcome:
    """Move all of ``memory`` to (``write``) or from (``read``) ``offset`` of the file. Blocks.

    Args:
        operation: The direction.
        file: An open spill file that reaches at least to the end of the range, rounded up to a block.
        offset: Byte offset in the file, a multiple of the block.
        memory: At least one byte.
        chunk_nbytes: Bytes per system call.
        bounces: Where staging memory comes from.

    Raises:
        ShortTransferError: No progress. Part of the bytes may have moved.
        OSError: As the system reports it. Part of the bytes may have moved.
    """
    aligned = memory.address % file.memory_alignment == 0
    if aligned and memory.nbytes <= chunk_nbytes and _in_one_call(operation, file, offset, memory):
        return _STRAIGHT
    chunk_nbytes = -(-chunk_nbytes // file.block_nbytes) * file.block_nbytes
    move = functools.partial(_move, operation, file.name, chunk_nbytes=chunk_nbytes)
    if file.direct_fd is not None:
        rungs = [_straight, _bounced] if aligned else [_bounced]
        for rung in rungs:
            try:
                return TransferOutcome("posix-direct", rung(operation, move, file, offset, memory, bounces))
            except OSError as error:
                # Some file systems accept the open and the first transfers, then refuse: start again one rung lower.
                if error.errno not in _NOT_THIS_WAY:
                    raise
    _buffered(operation, move, file, offset, memory, chunk_nbytes)
    return TransferOutcome("posix-buffered")


def _in_one_call(operation: Operation, file: SpillFile, offset: int, memory: Memory) -> bool:
    """The common case, without what else may be needed: that costs more processor time than the call itself.

    Gives whether all bytes have moved; if not, nothing is known of them.
    """
    if file.direct_fd is None or memory.nbytes % file.block_nbytes:
        return False
    try:
        return _call(operation, file.direct_fd, [memory.view()], offset, 0) == memory.nbytes
    except OSError as error:
        if error.errno not in _NOT_THIS_WAY:
            raise
        return False


def transfer_together(
    operation: Operation, file: SpillFile, pieces: Sequence[tuple[int, int, Memory]], bounces: BouncePool
) -> list[TransferOutcome]:
    """Move several buffers, each of at least one byte, whose ranges of the file lie side by side, in one call. Blocks.

    Args:
        operation: The direction.
        file: An open spill file that reaches to the end of the last range.
        pieces: (offset in the file, bytes of the range, memory) in the order of the file.
        bounces: Where staging memory comes from; the ranges together fit into one.

    Raises:
        OSError: As the system reports it, or a short call. Any of the bytes may have moved: move each by itself.
    """
    direct = file.direct_fd is not None
    with bounces.lend() as bounce:
        staged: list[tuple[Memory, int]] = []
        views, position = [], 0
        for _, capacity_nbytes, memory in pieces:
            aligned = memory.address % file.memory_alignment == 0 and memory.nbytes == capacity_nbytes
            if direct and aligned:
                views.append(memory.view())
                continue
            views.append(bounce.view()[position : position + capacity_nbytes])
            staged.append((memory, bounce.address + position))
            position += capacity_nbytes
        if operation == "write":
            for memory, address in staged:
                copy_bytes(address, memory.address, memory.nbytes)
        fd = file.fd if file.direct_fd is None else file.direct_fd
        flags = 0 if direct or not file.dontcache else RWF_DONTCACHE
        start, total_nbytes = pieces[0][0], sum(len(view) for view in views)
        settled = contextlib.nullcontext() if direct else _settled(operation, file, start, total_nbytes)
        with settled:
            moved = _call(operation, fd, views, start, flags)
            if moved != total_nbytes:
                raise ShortTransferError(f"{operation} of {len(pieces)} pieces moved {moved} of {total_nbytes} bytes")
        if operation == "read":
            for memory, address in staged:
                copy_bytes(memory.address, address, memory.nbytes)
    path = "posix-direct" if direct else "posix-buffered"
    bounced = {id(memory) for memory, _ in staged}
    return [TransferOutcome(path, memory.nbytes if id(memory) in bounced else 0) for _, _, memory in pieces]


def _straight(
    operation: Operation, move: Callable[..., None], file: SpillFile, offset: int, memory: Memory, bounces: BouncePool
) -> int:
    """O_DIRECT on the buffer; only the last partial block is staged. Returns the bytes staged."""
    body_nbytes = memory.nbytes // file.block_nbytes * file.block_nbytes
    if body_nbytes:
        move(file.direct_fd, memory.view()[:body_nbytes], offset, granule=file.block_nbytes)
    tail = Memory(memory.address + body_nbytes, memory.nbytes - body_nbytes, memory.readonly, memory.owner)
    return _bounced(operation, move, file, offset + body_nbytes, tail, bounces) if tail.nbytes else 0


def _bounced(
    operation: Operation, move: Callable[..., None], file: SpillFile, offset: int, memory: Memory, bounces: BouncePool
) -> int:
    """O_DIRECT through an aligned staging buffer, piece by piece. Returns the bytes staged."""
    with bounces.lend() as bounce:
        for start in range(0, memory.nbytes, bounce.nbytes):
            piece_nbytes = min(bounce.nbytes, memory.nbytes - start)
            blocks = bounce.view()[: -(-piece_nbytes // file.block_nbytes) * file.block_nbytes]
            if operation == "write":
                # Behind the last byte the staging memory's old content goes along: our own bytes, never read back.
                copy_bytes(bounce.address, memory.address + start, piece_nbytes)
                move(file.direct_fd, blocks, offset + start, granule=file.block_nbytes)
            else:
                move(file.direct_fd, blocks, offset + start, granule=file.block_nbytes)
                copy_bytes(memory.address + start, bounce.address, piece_nbytes)
    return memory.nbytes


def _buffered(
    operation: Operation, move: Callable[..., None], file: SpillFile, offset: int, memory: Memory, chunk_nbytes: int
) -> None:
    """Through the page cache, leaving nothing in it: cached spill bytes would count against a memory limit."""
    view = memory.view()
    if file.dontcache:
        chunk_nbytes = memory.nbytes
    for start in range(0, memory.nbytes, chunk_nbytes):
        piece = view[start : start + chunk_nbytes]
        with _settled(operation, file, offset + start, len(piece)):
            move(file.fd, piece, offset + start, granule=1, flags=RWF_DONTCACHE if file.dontcache else 0)


@contextlib.contextmanager
def _settled(operation: Operation, file: SpillFile, offset: int, nbytes: int) -> Iterator[None]:
    """Around a buffered transfer: what the block wrote is on the device and out of the cache when it ends well.

    The page cache takes every byte and loses those that the device refuses: only a sync tells.
    """
    known_losses = file.num_losses
    yield
    if operation == "write":
        file.sync(known_losses)
    if not file.dontcache:
        with contextlib.suppress(OSError):  # advice: the bytes have moved, with it or without
            os.posix_fadvise(file.fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def _move(
    operation: Operation,
    path: str,
    fd: int,
    view: memoryview,
    offset: int,
    *,
    chunk_nbytes: int,
    granule: int,
    flags: int = 0,
) -> None:
    """Move the whole view, in calls of ``chunk_nbytes``, going on after short ones at a multiple of ``granule``."""
    position, stalls = 0, 0
    while position < len(view):
        piece = view[position : position + chunk_nbytes]
        moved = _call(operation, fd, [piece], offset + position, flags)
        progress = moved if moved == len(piece) else moved // granule * granule
        position += progress
        stalls = 0 if progress else stalls + 1
        if stalls == 2:  # asked twice: the end of the file, or a device that takes no more
            raise ShortTransferError(
                f"{operation} of {len(view)} bytes at offset {offset} of {path} stopped after {position}: the last "
                f"call moved {moved} of {len(piece)} bytes and another one no more. The file may have been truncated; "
                "check the file system and the kernel log"
            )


def _call(operation: Operation, fd: int, views: list[memoryview], offset: int, flags: int) -> int:
    """One system call, repeated while the system says "again" (interrupted calls Python repeats by itself)."""
    for _ in range(_MAX_RETRIES):
        try:
            if operation == "write":
                return os.pwritev(fd, views, offset, flags)
            return os.preadv(fd, views, offset, flags)
        except (BlockingIOError, InterruptedError):
            time.sleep(_RETRY_PAUSE_S)
    raise ShortTransferError(
        errno.EAGAIN,
        f"{operation} of {sum(map(len, views))} bytes at file offset {offset}: the system said {_MAX_RETRIES} times to "
        "try again",
    )
