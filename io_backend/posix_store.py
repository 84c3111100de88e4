"""The store that works everywhere: local files, O_DIRECT, worker threads.

Covers spreading extents over one spill file per directory and joining the allocator, the file and the transfer loop.
It does not implement queueing and ordering (``queued_store``) nor the transfer itself (``direct_io``).

Rule: the store owns its directories and files from construction on, also when the construction fails.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from io_backend import direct_io
from io_backend.buffers import BouncePool, Memory
from io_backend.config import BackendConfig
from io_backend.errors import BackendUnavailableError, StorageFullError
from io_backend.extents import ExtentAllocator
from io_backend.meter import TransferOutcome
from io_backend.queued_store import QueuedStore, Space
from io_backend.spill_directory import SpillDirectory
from io_backend.spill_file import GRANULE_NBYTES, SpillFile
from io_backend.store import Extent

if TYPE_CHECKING:
    from io_backend.store import Operation, Store


class PosixStore(QueuedStore):
    """Extents in anonymous files, one per directory, used in turn.

    Thread safety and invariants: as the ``Store`` protocol says.
    """

    def __init__(self, directories: Sequence[SpillDirectory], config: BackendConfig | None = None) -> None:
        """Open a spill file in each directory and start the workers.

        Args:
            directories: At least one; owned by the store from here on, even if this raises.
            config: Settings; ``None`` takes the defaults.

        Raises:
            BackendError: A file could not be opened, or no thread started. Everything is closed again.
        """
        if not directories:
            raise ValueError("a store needs at least one spill directory")
        config = config if config is not None else BackendConfig()
        self._directories = list(directories)
        self._files: list[SpillFile] = []
        self._allocators = [ExtentAllocator(GRANULE_NBYTES) for _ in directories]
        self._next_file = 0
        self._high_water_nbytes = 0
        self._bounces = BouncePool(config.bounce_nbytes)
        try:
            for directory in directories:
                self._files.append(SpillFile(directory, config))
            super().__init__(config.num_workers * len(directories), config)
        except BaseException:
            self._release()
            raise

    @property
    def staging_nbytes(self) -> int:
        """Bytes of staging memory at most: one bounce buffer per worker."""
        return self._pool.num_workers * self._bounces.nbytes

    def describe(self) -> str:
        """One line: for each directory the transport, file system, alignment and reason."""
        return "; ".join(file.describe() for file in self._files)

    def _claim_space(self, nbytes: int) -> Extent:
        """Try each file in turn, first those that need not grow more than the others."""
        first, self._next_file = self._next_file, (self._next_file + 1) % len(self._files)
        failure: StorageFullError | None = None
        for step in range(len(self._files)):
            index = (first + step) % len(self._files)
            try:
                offset = self._claim_in(index, nbytes)
            except StorageFullError as error:
                failure = error
                continue
            self._high_water_nbytes = max(self._high_water_nbytes, sum(each.live_nbytes for each in self._allocators))
            return Extent(index, offset, nbytes, self._allocators[index].round_up(nbytes))
        if failure is None:
            raise AssertionError("no file was tried")
        raise failure

    def _claim_in(self, index: int, nbytes: int) -> int:
        """Offset of a range in one file, which grows if it must; raises StorageFullError."""
        file, allocator = self._files[index], self._allocators[index]
        shortfall_nbytes = allocator.shortfall_nbytes(nbytes)
        if shortfall_nbytes:
            quota_nbytes = self.config.max_spill_nbytes
            left_nbytes = None if quota_nbytes is None else quota_nbytes - sum(each.nbytes for each in self._files)
            file.grow(shortfall_nbytes, left_nbytes)
            allocator.grow(file.nbytes)
        offset = allocator.allocate(nbytes)
        if offset is None:
            raise AssertionError(f"{nbytes} bytes do not fit although the file grew by {shortfall_nbytes}")
        return offset

    def _return_space(self, extent: Extent) -> None:
        self._allocators[extent.file_index].free(extent.offset, extent.nbytes)

    def _space(self) -> Space:
        live_nbytes = sum(allocator.live_nbytes for allocator in self._allocators)
        return Space(live_nbytes, self._high_water_nbytes, sum(file.nbytes for file in self._files))

    def _transfer(self, operation: Operation, extent: Extent, memory: Memory) -> TransferOutcome:
        file = self._files[extent.file_index]
        chunk_nbytes = self.config.chunk_nbytes
        return direct_io.transfer(
            operation, file, extent.offset, memory, chunk_nbytes=chunk_nbytes, bounces=self._bounces
        )

    def _map(self, extent: Extent) -> mmap.mmap:
        return self._files[extent.file_index].map(extent.offset, extent.nbytes)

    def _location(self, extent: Extent) -> str:
        return self._files[extent.file_index].name

    def _release(self) -> None:
        for file in self._files:
            file.close()
        for directory in self._directories:
            directory.close()
        self._bounces.clear()


def open_store(
    spill: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    config: BackendConfig | None = None,
    backend: str = "auto",
) -> Store:
    """A store over one directory, or one per SSD. Close it when done.

    Args:
        spill: Directories to spill into; made if missing. A session directory is leased inside each.
        config: Settings; ``None`` takes the defaults.
        backend: ``"auto"`` (the best transport this machine has), ``"posix"`` or ``"kvikio"``.

    Raises:
        SpillDirectoryError: A directory cannot be used. Nothing stays behind.
        StorageFullError: A file system has no room even for a proof of its transport.
        ValueError: No directory, or an unknown backend.
        BackendUnavailableError: The transport asked for does not exist here.

    Example:
        >>> with contextlib.closing(open_store("/mnt/nvme0")) as store:
        ...     extent = store.allocate(tensor.nbytes)
        ...     store.write(tensor, extent).wait()
    """
    if backend == "kvikio":
        raise BackendUnavailableError(
            "backend 'kvikio' is not part of this build, which has the posix store only; use backend='auto' or 'posix'"
        )
    if backend not in ("auto", "posix"):
        raise ValueError(f"unknown backend {backend!r}, expected 'auto', 'posix' or 'kvikio'")
    config = config if config is not None else BackendConfig()
    roots = [spill] if isinstance(spill, (str, os.PathLike)) else list(spill)
    directories: list[SpillDirectory] = []
    try:
        for root in roots:
            directories.append(SpillDirectory.create(Path(root), allow_unsafe=config.allow_unsafe_spill))
    except BaseException:
        for directory in directories:
            directory.close()
        raise
    return PosixStore(directories, config)
