"""One anonymous, preallocated file in a session directory.

Covers opening it without a name, proving O_DIRECT by real I/O, growing it without ever filling the disk, mapping it.
It does not know extents (``extents``) nor how a buffer travels (``direct_io``).

Rule: the file has no name, so nothing of it outlives the process; every byte of it is allocated before it is handed
out, so a full disk shows when the file grows and not in the middle of a transfer.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import secrets
import threading
import weakref
from typing import TYPE_CHECKING

from io_backend.alignment import DirectAlignment, direct_alignment
from io_backend.buffers import aligned_memory
from io_backend.config import BLOCK_NBYTES, BackendConfig
from io_backend.errors import StorageFullError, map_os_error
from io_backend.quota import Quota

if TYPE_CHECKING:
    from io_backend.spill_directory import SpillDirectory

_logger = logging.getLogger(__name__)
RWF_DONTCACHE = 0x80
"""Buffered I/O that leaves nothing in the page cache (Linux 6.14 on). Source: linux/fs.h; not in ``os`` yet."""

_NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT})
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_NO_ANSWER = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO})
"""What says nothing about O_DIRECT: a store that went on without it would be slow for its whole life."""
_BLOCKS_NBYTES = (BLOCK_NBYTES, 16384, 65536)
_MEMORY_ALIGNMENTS = (64, 512, 4096, 16384, 65536)  # 64 is what torch gives its CPU tensors; NVMe drives often take it
_GIB = 1 << 30


class SpillFile:
    """The open file, and what was found out about it.

    Thread safety: transfers from any thread; ``grow`` under the store's lock. ``close`` only when no transfer runs.
    """

    def __init__(self, directory: SpillDirectory, config: BackendConfig, quota: Quota | None = None) -> None:
        self._quota = quota if quota is not None else Quota(config.max_spill_nbytes)
        self.directory = directory
        self.name = str(directory.path)
        """The path for messages: the file itself has none."""
        self.nbytes = 0
        """Size of the file, all of it allocated."""
        self.num_losses = 0
        """How often the system said that bytes written through the page cache were lost."""
        self._loss_code: int | None = None
        self._sync_lock = threading.Lock()
        self._config = config
        self._fds: list[int] = []  # shared with the finalizer, which must not hold the object
        self._closer = weakref.finalize(self, _close_all, self._fds)
        self._closer.atexit = False
        try:
            self.fd = _open_anonymous(self.name)
            self._fds.append(self.fd)
            self.direct_fd: int | None = None
            """Descriptor for O_DIRECT, or ``None`` if that does not work here."""
            self.block_nbytes = BLOCK_NBYTES
            """Unit of file offsets and lengths for O_DIRECT."""
            self.memory_alignment = BLOCK_NBYTES
            """Bytes to which a buffer's address must be aligned for O_DIRECT."""
            self.reason = self._prove_direct()
            """Why O_DIRECT is used, or why not."""
            self.dontcache = self._prove_dontcache()
            """Whether buffered transfers may use ``RWF_DONTCACHE``."""
            os.ftruncate(self.fd, 0)
        except OSError as error:
            self.close()
            raise map_os_error(error, operation="opening a spill file", path=self.name, offset=0, nbytes=0) from error

    @property
    def granule_nbytes(self) -> int:
        """Alignment of extents: good for O_DIRECT and for mapping."""
        return max(self.block_nbytes, mmap.ALLOCATIONGRANULARITY)

    def close(self) -> None:
        """Close the descriptors; the system gives the space back. Idempotent."""
        self._closer()
        self.nbytes = 0

    def describe(self) -> str:
        """One line about this file."""
        where = f"{self.directory.root} ({self.directory.file_system})"
        if self.direct_fd is not None:
            alignment = f"blocks of {self.block_nbytes} bytes, memory aligned to {self.memory_alignment}"
            return f"posix-direct on {where}, {alignment}: {self.reason}"
        kind = "uncached" if self.dontcache else "cached, dropped after each transfer"
        return f"posix-buffered on {where}, {kind}: {self.reason}"

    def grow(self, shortfall_nbytes: int) -> None:
        """Add at least ``shortfall_nbytes`` allocated bytes, a whole growth step where there is room for it.

        Args:
            shortfall_nbytes: A multiple of the granule.

        Raises:
            StorageFullError: Quota, reserve or file system exhausted. The file has its old size.
            BackendError: The file system refused for another reason. The file has its old size.
        """
        free_nbytes, reserve_nbytes = self._free_and_reserve()
        room_nbytes = free_nbytes - reserve_nbytes
        if shortfall_nbytes > room_nbytes:
            raise StorageFullError(
                errno.ENOSPC,
                f"{self.name} must grow by {shortfall_nbytes} bytes, but its file system has {free_nbytes} free and "
                f"{reserve_nbytes} of them are kept free (reserve_free_nbytes). Free some, or spill elsewhere",
            )
        wanted_nbytes = min(room_nbytes, max(shortfall_nbytes, self._config.growth_nbytes))
        granted_nbytes = self._quota.take(shortfall_nbytes, wanted_nbytes)
        if granted_nbytes is None:
            raise StorageFullError(
                errno.EDQUOT,
                f"{self.name} must grow by {shortfall_nbytes} bytes, but max_spill_nbytes="
                f"{self._quota.limit_nbytes} leaves {self._quota.left_nbytes()}. Raise one of the limits",
            )
        before_nbytes = self.nbytes
        try:
            self._grow_by(
                shortfall_nbytes, max(shortfall_nbytes, granted_nbytes // self.granule_nbytes * self.granule_nbytes)
            )
        finally:
            self._quota.give_back(granted_nbytes - (self.nbytes - before_nbytes))

    def _grow_by(self, shortfall_nbytes: int, step_nbytes: int) -> None:
        try:
            self._extend(step_nbytes)
        except StorageFullError:
            if step_nbytes == shortfall_nbytes:
                raise
            self._extend(shortfall_nbytes)  # a file size limit may allow what is needed though not the whole step

    def sync(self, known_losses: int) -> None:
        """Wait until what was written through the page cache is on the device. Blocks.

        Args:
            known_losses: ``num_losses`` from before the first byte was written.

        Raises:
            OSError: Bytes written meanwhile are lost, perhaps not the caller's: the system tells one of those who ask,
                once, and has forgotten which bytes they were.
        """
        with self._sync_lock:
            try:
                os.fdatasync(self.fd)
            except OSError as error:
                self.num_losses += 1
                self._loss_code = error.errno
                raise
            if self.num_losses != known_losses:
                raise OSError(self._loss_code, "bytes written at the same time were lost, perhaps these")

    def map(self, offset: int, nbytes: int) -> mmap.mmap:
        """Shared read/write mapping of a range; it keeps the file open by itself.

        Raises:
            BackendError: The system does not map it: no descriptor or no address space left.
        """
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        try:
            return mmap.mmap(self.fd, nbytes, flags=mmap.MAP_SHARED, prot=protection, offset=offset)
        except OSError as error:
            raise map_os_error(error, operation="mapping", path=self.name, offset=offset, nbytes=nbytes) from error

    def _free_and_reserve(self) -> tuple[int, int]:
        try:
            state = os.statvfs(self.fd)
        except OSError as error:
            raise map_os_error(
                error, operation="asking for free space", path=self.name, offset=self.nbytes, nbytes=0
            ) from error
        reserve_nbytes = self._config.reserve_free_nbytes
        if reserve_nbytes is None:
            reserve_nbytes = default_reserve_nbytes(state.f_blocks * state.f_frsize)
        return state.f_bavail * state.f_frsize, reserve_nbytes

    def _extend(self, added_nbytes: int) -> None:
        try:
            try:
                os.posix_fallocate(self.fd, self.nbytes, added_nbytes)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                os.ftruncate(self.fd, self.nbytes + added_nbytes)
        except OSError as error:
            # A failed allocation keeps what it had grabbed so far; if that stays, the next growth uses it.
            with contextlib.suppress(OSError):
                os.ftruncate(self.fd, self.nbytes)
            raise map_os_error(
                error, operation="growing the spill file", path=self.name, offset=self.nbytes, nbytes=added_nbytes
            ) from error
        self.nbytes += added_nbytes

    def _prove_direct(self) -> str:
        """Open for O_DIRECT and find the memory alignment by writing and reading back; the reason, for the report."""
        if not self._config.direct_io:
            return "direct_io is off"
        if not hasattr(os, "O_DIRECT"):
            return "this system has no O_DIRECT"
        try:
            # A second open file of the same anonymous inode; the flags of the first stay as they are.
            direct_fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if error.errno in _NO_ANSWER:
                raise
            return f"opening with O_DIRECT failed ({error.strerror})"
        self._fds.append(direct_fd)
        failure = ""
        for block_nbytes, alignment in _candidates(direct_alignment(direct_fd)):
            try:
                if _round_trips(direct_fd, block_nbytes, alignment):
                    self.direct_fd, self.block_nbytes, self.memory_alignment = direct_fd, block_nbytes, alignment
                    return "O_DIRECT proved by a write and a read"
                failure = "bytes came back changed"
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                failure = f"{error.strerror}"
        self._fds.remove(direct_fd)
        _close_all([direct_fd])
        return f"O_DIRECT opens but does not work ({failure})"

    def _prove_dontcache(self) -> bool:
        try:
            return os.pwritev(self.fd, [bytes(BLOCK_NBYTES)], 0, RWF_DONTCACHE) == BLOCK_NBYTES
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            return False


def default_reserve_nbytes(total_nbytes: int) -> int:
    """What is left free on a file system of so many bytes when the settings say nothing."""
    return min(_GIB, total_nbytes // 20)


def _open_anonymous(directory: str) -> int:
    """A file without a name, mode 0600, that nobody can give a name to."""
    # Where the flag does not exist, opening a directory for writing fails with EISDIR, which leads to the second way.
    anonymous = getattr(os, "O_TMPFILE", os.O_DIRECTORY)
    try:
        return os.open(directory, anonymous | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
    name = os.path.join(directory, f"spill-{secrets.token_hex(6)}.bin")
    fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.unlink(name)
    except OSError:  # a file with a name would outlive a killed process
        _close_all([fd])
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    return fd


def _candidates(known: DirectAlignment | None) -> list[tuple[int, int]]:
    """(block, memory alignment) pairs to try in turn: first small alignments, which spare a copy."""
    least_block = known.offset_nbytes if known is not None else 0
    blocks = [nbytes for nbytes in _BLOCKS_NBYTES if nbytes >= least_block]
    return [(block, alignment) for block in blocks for alignment in _MEMORY_ALIGNMENTS if alignment <= block]


def _round_trips(fd: int, block_nbytes: int, alignment: int) -> bool:
    """Write a pattern from memory aligned to exactly ``alignment`` bytes and read it back into such memory."""
    probe_nbytes = 4 * block_nbytes
    memory = aligned_memory(2 * probe_nbytes + 6 * alignment)
    view = memory.view()
    first = -memory.address % (2 * alignment) + alignment  # an odd multiple of the alignment
    second = -(memory.address + first + probe_nbytes) % (2 * alignment) + alignment + first + probe_nbytes
    source, target = view[first : first + probe_nbytes], view[second : second + probe_nbytes]
    pattern = secrets.token_bytes(probe_nbytes)
    ctypes.memmove(memory.address + first, pattern, probe_nbytes)
    # One block further, so that the block itself is tried as an offset.
    if os.pwritev(fd, [source], block_nbytes) != probe_nbytes or os.preadv(fd, [target], block_nbytes) != probe_nbytes:
        return False
    return bytes(target) == pattern


def _close_all(fds: list[int]) -> None:
    """Close them all. Linux has closed a descriptor whatever the call says, and nothing in the file is of use now."""
    while fds:
        fd = fds.pop()
        try:
            os.close(fd)
        except OSError as error:
            _logger.info("closing a spill file: %s", error)
