"""A store in host memory: the tier between a device and its SSDs.

Covers slabs of exactly the size asked for, recycled by size, and never more than the machine, the container and the
limit of locked memory allow. On a machine with CUDA the slabs are pinned, where that works.

Rule: memory counts from the moment it is taken until the system has it back; idle slabs count too.
"""

from __future__ import annotations

import errno
import functools
import logging
import mmap
from collections.abc import Callable
from typing import TYPE_CHECKING

from io_backend.buffers import Memory, aligned_memory, copy_bytes
from io_backend.errors import BackendUnavailableError, StorageFullError
from io_backend.host_memory import HostLimit, host_limit
from io_backend.meter import TransferOutcome
from io_backend.queued_store import QueuedStore, Space
from io_backend.store import Extent

if TYPE_CHECKING:
    from io_backend.config import BackendConfig
    from io_backend.store import Operation

_logger = logging.getLogger(__name__)


class HostStore(QueuedStore):
    """See the ``Store`` protocol. ``extent.offset`` is the number of a slab.

    Thread safety and invariants: as the protocol says.
    """

    def __init__(
        self,
        config: BackendConfig,
        *,
        capacity_nbytes: int,
        pinned: bool = False,
        local_ranks: int = 1,
        on_event: Callable[[str], object] = _logger.warning,
        limit: Callable[[], HostLimit] | None = None,
    ) -> None:
        """Reserve nothing yet; slabs are taken as they are needed.

        Args:
            config: Settings; of them the number of workers, the timeout and ``verify``.
            capacity_nbytes: The most bytes to take. What the machine allows at each time may be less.
            pinned: Lock the slabs for fast copies from and to CUDA devices; where that fails they stay pageable.
            local_ranks: Processes that share the machine, this one included.
            on_event: Told, once, when slabs cannot be pinned.
            limit: What the machine allows now; ``None`` asks it.
        """
        if capacity_nbytes < 0:
            raise ValueError(f"capacity_nbytes is {capacity_nbytes} bytes, expected 0 or more")
        self.capacity_nbytes = capacity_nbytes
        self._pinned = pinned
        self._limit = limit if limit is not None else functools.partial(self._ask_limit, local_ranks)
        self._on_event = on_event
        self._slabs: dict[int, Memory] = {}
        self._idle: dict[int, list[Memory]] = {}
        self._pinned_addresses: set[int] = set()
        self._next_slab = 0
        self._live_nbytes = 0
        self._idle_nbytes = 0
        self._high_water_nbytes = 0
        super().__init__(config.num_workers, config)

    @property
    def staging_nbytes(self) -> int:
        """None: buffers are copied straight into the slabs."""
        return 0

    def describe(self) -> str:
        """One line: how much, pinned or not."""
        kind = "pinned" if self._pinned else "pageable"
        limit = self._limit()
        return f"host memory, {kind}, at most {self.capacity_nbytes} bytes; {limit.reason} allows {limit.nbytes} more"

    # --- space -------------------------------------------------------------------------------------------------------

    def _claim_space(self, nbytes: int) -> Extent:
        size_nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        number = self._next_slab
        if size_nbytes:
            idle = self._idle.get(size_nbytes)
            if idle:
                slab = idle.pop()
                self._idle_nbytes -= size_nbytes
            else:
                slab = self._take(size_nbytes)
            self._slabs[number] = slab
        self._next_slab += 1
        self._live_nbytes += size_nbytes
        self._high_water_nbytes = max(self._high_water_nbytes, self._live_nbytes)
        return Extent(0, number, nbytes, size_nbytes)

    def _take(self, nbytes: int) -> Memory:
        """A new slab, after giving idle ones back where there is no room for both."""
        room_nbytes = self.capacity_nbytes - self._live_nbytes - self._idle_nbytes
        if nbytes > room_nbytes:
            self._give_back_idle(nbytes - room_nbytes)
            room_nbytes = self.capacity_nbytes - self._live_nbytes - self._idle_nbytes
        if nbytes > room_nbytes:
            raise StorageFullError(
                errno.ENOSPC,
                f"the host tier of {self.capacity_nbytes} bytes has {room_nbytes} left, {nbytes} are needed: raise "
                "host_budget, or let it go to the SSD",
            )
        limit = self._limit()
        if nbytes > limit.nbytes:
            self._give_back_idle(nbytes - limit.nbytes)
            limit = self._limit()
        if nbytes > limit.nbytes:
            raise StorageFullError(
                errno.ENOMEM,
                f"the host tier needs {nbytes} bytes more, but {limit.reason} allows {limit.nbytes}: lower "
                "host_budget, or let it go to the SSD",
            )
        try:
            slab = aligned_memory(nbytes)
        except OSError as error:
            raise StorageFullError(
                error.errno, f"the host tier needs {nbytes} bytes more, and the system refuses them: {error.strerror}"
            ) from error
        self._pin(slab)
        return slab

    def _ask_limit(self, local_ranks: int) -> HostLimit:
        return host_limit(pinned=self._pinned, local_ranks=local_ranks)

    def _give_back_idle(self, nbytes: int) -> None:
        """Return at least `nbytes` of idle slabs to the system, or all there are; the largest first."""
        for size_nbytes in sorted(self._idle, reverse=True):
            slabs = self._idle[size_nbytes]
            while slabs and nbytes > 0:
                self._unpin(slabs.pop())
                self._idle_nbytes -= size_nbytes
                nbytes -= size_nbytes

    def _return_space(self, extent: Extent) -> None:
        slab = self._slabs.pop(extent.offset, None)
        if slab is not None:
            self._live_nbytes -= extent.capacity_nbytes
            self._idle_nbytes += extent.capacity_nbytes
            self._idle.setdefault(extent.capacity_nbytes, []).append(slab)

    def _space(self) -> Space:
        largest_nbytes = max((size for size, slabs in self._idle.items() if slabs), default=0)
        return Space(self._live_nbytes, self._high_water_nbytes, 0, largest_nbytes)

    # --- pinning -----------------------------------------------------------------------------------------------------

    def _pin(self, slab: Memory) -> None:
        if not self._pinned:
            return
        import torch

        try:
            status = int(torch.cuda.cudart().cudaHostRegister(slab.address, slab.nbytes, 0))
        except (RuntimeError, AssertionError) as error:  # a torch without CUDA, or CUDA without a device
            reason = str(error).partition("\n")[0]
        else:
            if status == 0:
                self._pinned_addresses.add(slab.address)
                return
            reason = f"cudaHostRegister gave {status}"
        self._pinned = False
        self._on_event(
            f"{slab.nbytes} bytes of host memory could not be pinned ({reason}): the host tier goes on with pageable "
            "memory, which is slower. `ulimit -l` may be too low"
        )

    def _unpin(self, slab: Memory) -> None:
        if slab.address in self._pinned_addresses:
            import torch

            self._pinned_addresses.remove(slab.address)
            torch.cuda.cudart().cudaHostUnregister(slab.address)

    # --- transport ---------------------------------------------------------------------------------------------------

    def move(self, operation: Operation, extent: Extent, memory: Memory) -> TransferOutcome:
        """See `Transport.move`."""
        slab = self._slabs[extent.offset]
        if operation == "write":
            copy_bytes(slab.address, memory.address, extent.nbytes)
        else:
            copy_bytes(memory.address, slab.address, extent.nbytes)
        return TransferOutcome("host")

    def location(self, extent: Extent) -> str:
        """See `Transport.location`."""
        return "host memory"

    def _map(self, extent: Extent) -> mmap.mmap:
        raise BackendUnavailableError("the host tier has no file to map: allocate the extent in a file store")

    def _release(self) -> None:
        for slab in [*self._slabs.values(), *(slab for slabs in self._idle.values() for slab in slabs)]:
            self._unpin(slab)
        self._slabs.clear()
        self._idle.clear()
