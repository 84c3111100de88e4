"""teraio's posix store, with its default settings.

Covers both kinds of buffers: huge-page memory as the store recycles it, and torch's own tensors.
Does not set ``THP_MEM_ALLOC_ENABLE``, which decides how torch allocates: whoever starts the process does.
Must stay true: buffers and extents are made and touched once and used again by every measurement.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .case import Case, Operation
from .clock import Measurement, run_together, timed

if TYPE_CHECKING:
    from io_backend import Extent, Store, Ticket

Buffers = list[Any]
"""Tensors or memory views: what ``Store.write`` takes."""


def open_contender(directory: Path, buffers: str) -> "StoreContender":
    """Open a store in ``directory``; ``buffers`` is ``"huge"`` or ``"torch"``."""
    if buffers == "huge":
        return StoreContender(directory, "recycled huge pages", _huge_page_views)
    return StoreContender(directory, "torch.empty", _torch_tensors)


class StoreContender:
    """Reads and writes extents, keeping as many transfers in flight as the case says.

    Thread safety: one thread, which starts others for the streams of a mixed case.
    """

    def __init__(self, directory: Path, buffers: str, make_buffers: Callable[[int, int], Buffers]) -> None:
        """Open the store; it is closed by ``close``.

        Args:
            directory: To spill into.
            buffers: What the buffers are, in words.
            make_buffers: Makes a number (second argument) of buffers of a size (first).
        """
        from io_backend import BackendConfig, open_store

        self._config = BackendConfig()
        self._store: Store = open_store(directory, config=self._config, backend="posix")
        self._buffers = buffers
        self._make_buffers = make_buffers
        self._extents: list[Extent] = []
        self._streams: list[Callable[[], None]] = []

    def describe(self) -> str:
        """The store's own description and the settings that shape its speed."""
        config = self._config
        setting = os.environ.get("THP_MEM_ALLOC_ENABLE", "not set")
        return (
            f"{self._buffers}, THP_MEM_ALLOC_ENABLE {setting}; {config.num_workers} workers, "
            f"calls of {config.chunk_nbytes >> 20} MiB, {self._store.describe()}"
        )

    def prepare(self, case: Case) -> None:
        """Allocate the extents, write them once, and make a ring of buffers for each stream."""
        self._extents = [self._store.allocate(case.buffer_nbytes) for _ in range(case.num_buffers)]
        for stream in case.streams:
            buffers = self._make_buffers(case.buffer_nbytes, stream.depth)
            extents = self._extents[stream.first : stream.first + stream.num_buffers]
            self._transfer("write", extents, buffers)
            self._streams.append(functools.partial(self._transfer, stream.operation, extents, buffers))

    def measure(self) -> Measurement:
        """Move the case's bytes once."""
        with timed() as measurement:
            run_together(self._streams)
        return measurement

    def release(self) -> None:
        """Free the extents and the buffers."""
        self._streams.clear()
        for extent in self._extents:
            self._store.free(extent)
        self._extents.clear()

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def _transfer(self, operation: Operation, extents: "list[Extent]", buffers: Buffers) -> None:
        """Move all extents, each buffer again as soon as its last transfer has ended."""
        tickets: list[Ticket | None] = [None] * len(buffers)
        for number, extent in enumerate(extents):
            slot = number % len(buffers)
            previous = tickets[slot]
            if previous is not None:
                previous.wait()
            if operation == "write":
                tickets[slot] = self._store.write(buffers[slot], extent)
            else:
                tickets[slot] = self._store.read(extent, buffers[slot])
        for ticket in tickets:
            if ticket is not None:
                ticket.wait()


def _huge_page_views(nbytes: int, num_buffers: int) -> Buffers:
    """Page-aligned parts of one region on huge pages, filled; a region, because small ones would not get any."""
    import numpy as np

    from io_backend.buffers import aligned_memory

    region = np.asarray(aligned_memory(nbytes * num_buffers).owner)
    region[:] = np.frombuffer(np.random.default_rng(0).bytes(region.nbytes), dtype=np.uint8)
    return [region[number * nbytes : (number + 1) * nbytes] for number in range(num_buffers)]


def _torch_tensors(nbytes: int, num_buffers: int) -> Buffers:
    """What ``torch.empty`` gives, filled."""
    import torch

    return [torch.empty(nbytes, dtype=torch.uint8).random_() for _ in range(num_buffers)]
