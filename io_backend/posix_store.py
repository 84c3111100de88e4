"""The store that works everywhere: a local file, O_DIRECT, worker threads.

Covers joining the file to the transfer loop. It does not implement space (``file_store``), queueing and ordering
(``queued_store``) nor the transfer itself (``direct_io``).
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from io_backend import direct_io
from io_backend.buffers import BouncePool, Memory
from io_backend.file_store import FileStore

if TYPE_CHECKING:
    from io_backend.config import BackendConfig
    from io_backend.meter import TransferOutcome
    from io_backend.quota import Quota
    from io_backend.spill_directory import SpillDirectory
    from io_backend.store import Extent, Operation
    from io_backend.transfer import Transfer

_MOST_TOGETHER = 256  # pieces in one call; the system takes 1024


class PosixStore(FileStore):
    """Extents in one anonymous file, moved by ``preadv`` and ``pwritev``.

    Thread safety and invariants: as the ``Store`` protocol says.
    """

    def __init__(self, directory: SpillDirectory, config: BackendConfig, quota: Quota | None = None) -> None:
        """As `FileStore`."""
        self._bounces = BouncePool(config.bounce_nbytes)
        super().__init__(directory, config, quota)
        block_nbytes = self.file.block_nbytes
        if config.bounce_nbytes % block_nbytes or block_nbytes > mmap.PAGESIZE:
            self._bounces = BouncePool(-(-config.bounce_nbytes // block_nbytes) * block_nbytes, block_nbytes)

    @property
    def staging_nbytes(self) -> int:
        """Bytes of staging memory at most: one bounce buffer per worker."""
        return self._pool.num_workers * self._bounces.nbytes

    def move(self, operation: Operation, extent: Extent, memory: Memory) -> TransferOutcome:
        return direct_io.transfer(
            operation,
            self.file,
            extent.offset,
            memory,
            chunk_nbytes=self.config.chunk_nbytes,
            bounces=self._bounces,
        )

    def goes_with(self, transfers: Sequence[Transfer], following: Transfer) -> bool:
        first, last = transfers[0], transfers[-1]
        limit_nbytes = self.config.coalesce_nbytes
        return (
            first.operation == following.operation
            and 0 < last.extent.nbytes <= limit_nbytes
            and 0 < following.extent.nbytes <= limit_nbytes
            and last.extent.offset + last.extent.capacity_nbytes == following.extent.offset
            and last.after is None
            and following.after is None
            and len(transfers) < _MOST_TOGETHER
            and following.extent.offset + following.extent.capacity_nbytes - first.extent.offset <= self._bounces.nbytes
        )

    def move_together(self, operation: Operation, pieces: Sequence[tuple[Extent, Memory]]) -> list[TransferOutcome]:
        return direct_io.transfer_together(
            operation,
            self.file,
            [(extent.offset, extent.capacity_nbytes, memory) for extent, memory in pieces],
            self._bounces,
        )

    def _release(self) -> None:
        super()._release()
        self._bounces.clear()
