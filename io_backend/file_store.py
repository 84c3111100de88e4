"""What stores on one spill file share: the file, its free ranges, its growth, its mappings.

Covers joining the allocator and the file under the queue, and entering what was moved in the ledger. It does not move
a byte: ``posix_store`` and ``kvikio_store`` do.

Rules:
- The store owns its directory and file from construction on, also when the construction fails.
- The file grows before it must, on a thread of its own, so that a transfer's caller seldom waits for the file system.
"""

from __future__ import annotations

import logging
import mmap
import threading
import weakref
from typing import TYPE_CHECKING

from io_backend.config import BackendConfig
from io_backend.errors import BackendError
from io_backend.extents import ExtentAllocator
from io_backend.ledger import LedgerKeeper
from io_backend.queued_store import QueuedStore, Space
from io_backend.spill_file import SpillFile
from io_backend.store import DeviceStatistics, Extent

if TYPE_CHECKING:
    from collections.abc import Callable

    from io_backend.quota import Quota
    from io_backend.spill_directory import SpillDirectory

_logger = logging.getLogger(__name__)
_AHEAD_DIVISOR = 4  # grow when less than this part of a growth step is free


class FileStore(QueuedStore):
    """Extents in one anonymous file.

    Thread safety and invariants: as the ``Store`` protocol says.
    """

    def __init__(self, directory: SpillDirectory, config: BackendConfig, quota: Quota | None = None) -> None:
        """Open a spill file in the directory and start the workers.

        Args:
            directory: Owned by the store from here on, even if this raises.
            config: Settings.
            quota: The account that several files share; ``None`` takes one of its own from the settings.

        Raises:
            BackendError: The file could not be opened, or no thread started. Everything is closed again.
        """
        self._directory = directory
        self._file: SpillFile | None = None
        self._enter_ledger: Callable[[], object] | None = None
        self._growth_lock = threading.Lock()  # taken before nothing else; the store's lock may be held around it
        self._grows_ahead = True
        try:
            self._file = SpillFile(directory, config, quota)
            self._allocator = ExtentAllocator(self._file.granule_nbytes)
            super().__init__(config.num_workers, config)
            self._ledger = LedgerKeeper(directory.root, self.meter, starts=config.starts_ledger)
            # A store that nobody closes is entered when it is collected, or at the interpreter's exit.
            self._enter_ledger = weakref.finalize(self, self._ledger.close)
        except BaseException:
            self._release()
            raise

    @property
    def file(self) -> SpillFile:
        """The spill file."""
        if self._file is None:
            raise AssertionError("the file is opened by the constructor")
        return self._file

    def describe(self) -> str:
        """One line: the transport, file system, alignment and reason."""
        return self.file.describe()

    def _claim_space(self, nbytes: int) -> Extent:
        allocator = self._allocator
        if allocator.shortfall_nbytes(nbytes):
            with self._growth_lock:
                allocator.grow(self.file.nbytes)  # a worker may have grown it meanwhile
                shortfall_nbytes = allocator.shortfall_nbytes(nbytes)
                if shortfall_nbytes:
                    self.file.grow(shortfall_nbytes)
                    allocator.grow(self.file.nbytes)
        offset = allocator.allocate(nbytes)
        if offset is None:
            raise AssertionError(f"{nbytes} bytes do not fit although the file has grown to {self.file.nbytes}")
        return Extent(0, offset, nbytes, allocator.round_up(nbytes))

    def _return_space(self, extent: Extent) -> None:
        self._allocator.free(extent.offset, extent.nbytes)

    def _space(self) -> Space:
        allocator = self._allocator
        return Space(
            live_nbytes=allocator.live_nbytes,
            high_water_nbytes=allocator.high_water_nbytes,
            file_nbytes=self.file.nbytes,
            largest_free_nbytes=allocator.largest_free_nbytes,
        )

    def _devices(self, written_nbytes: int, read_nbytes: int) -> tuple[DeviceStatistics, ...]:
        return (DeviceStatistics(str(self._directory.root), written_nbytes, read_nbytes),)

    def maintain(self) -> None:
        """Keep the ledger and grow the file one step ahead of need, on the worker that has just ended a transfer."""
        self._ledger.tick()
        step_nbytes = self.config.growth_nbytes
        allocator = self._allocator
        almost_full = allocator.size_nbytes > 0 and allocator.free_nbytes < step_nbytes // _AHEAD_DIVISOR
        if not (self._grows_ahead and almost_full and self._growth_lock.acquire(blocking=False)):
            return
        try:
            if self.file.nbytes == allocator.size_nbytes:
                before_nbytes, granule_nbytes = self.file.nbytes, self.file.granule_nbytes
                self.file.grow(granule_nbytes)
                # Where a whole step does not fit, little by little would try and fail after every transfer.
                whole_nbytes = step_nbytes // granule_nbytes * granule_nbytes
                self._grows_ahead = self.file.nbytes - before_nbytes >= whole_nbytes
        except BackendError as error:
            self._grows_ahead = False  # `allocate` will say so if the space is really needed
            _logger.info("no growth ahead of need: %s", error)
        finally:
            self._growth_lock.release()
        with self._lock:
            allocator.grow(max(allocator.size_nbytes, self.file.nbytes))

    def _map(self, extent: Extent) -> mmap.mmap:
        return self.file.map(extent.offset, extent.nbytes)

    def location(self, extent: Extent) -> str:
        return self.file.name

    def _release(self) -> None:
        if self._enter_ledger is not None:
            self._enter_ledger()
        if self._file is not None:
            self._file.close()
        self._directory.close()
