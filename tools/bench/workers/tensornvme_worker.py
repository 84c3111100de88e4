"""tensornvme's ``Offloader``, which goes through the page cache.

Covers the class below ``DiskOffloader``: the latter frees and allocates each tensor anew, which would measure that.
Transfers go in batches of the case's depth, the size of its ring, and are waited for together.
Does not call ``sync_read_events``: in 0.1.0 it waits for writes alone. ``synchronize`` waits for both.
Must stay true: a write counts when it is on the device (``fdatasync``, inside the clock), and a read comes from there
(the cache is dropped before the clock starts). Reading a key frees its place, so what a measurement needs on disk or
free is put there before the clock starts.
"""

import os
from pathlib import Path
from typing import Any

from .case import Case, Stream
from .clock import Measurement, timed


def open_contender(directory: Path) -> "OffloaderContender":
    """Import the library; nothing is opened before a case is known."""
    return OffloaderContender(directory / "tensornvme.bin")


class OffloaderContender:
    """One file that the library manages, and per stream a ring of tensors.

    Thread safety: one thread.
    Invariants: ``_on_disk`` holds the keys that were written and not read since.
    """

    def __init__(self, path: Path) -> None:
        """Import the library."""
        import torch
        from tensornvme._C import Offloader, get_backends

        self._torch = torch
        self._make_offloader = Offloader
        self._backend = "uring" if "uring" in get_backends() else "aio"
        self._path = path
        self._offloader: Any = None
        self._fd = -1
        self._streams: list[tuple[Stream, list[Any]]] = []
        self._on_disk: set[int] = set()

    def describe(self) -> str:
        """Version and settings."""
        from importlib.metadata import version

        return f"tensornvme {version('tensornvme')}, Offloader on {self._backend}, page cache; torch.empty"

    def prepare(self, case: Case) -> None:
        """Open a ring of the case's depth, let the file grow to its size, and make the buffers."""
        self._offloader = self._make_offloader(str(self._path), case.depth, self._backend)
        self._fd = os.open(self._path, os.O_RDWR)
        self._streams = [(stream, self._make_buffers(case.buffer_nbytes, stream.depth)) for stream in case.streams]
        for stream, buffers in self._streams:
            keys = range(stream.first, stream.first + stream.num_buffers)
            for start in range(0, len(keys), len(buffers)):
                self._submit("write", keys[start : start + len(buffers)], buffers)
                self._offloader.synchronize()
        os.fsync(self._fd)  # else the kernel writes it during the others' measurements

    def measure(self) -> Measurement:
        """Put every key where the case wants it, then move the case's bytes once."""
        for stream, buffers in self._streams:
            self._put(stream, buffers)
        os.fsync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        writes = any(stream.operation == "write" for stream, _ in self._streams)
        with timed() as measurement:
            for number in range(max(-(-stream.num_buffers // len(buffers)) for stream, buffers in self._streams)):
                for stream, buffers in self._streams:
                    first = stream.first + number * len(buffers)
                    end = min(first + len(buffers), stream.first + stream.num_buffers)
                    self._submit(stream.operation, range(first, end), buffers)
                self._offloader.synchronize()
            if writes:
                os.fdatasync(self._fd)
        return measurement

    def release(self) -> None:
        """Close the file, which removes it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._offloader = None
        self._streams.clear()
        self._on_disk.clear()

    def close(self) -> None:
        """As ``release``."""
        self.release()

    def _make_buffers(self, nbytes: int, num_buffers: int) -> list[Any]:
        return [self._torch.empty(nbytes, dtype=self._torch.uint8).random_() for _ in range(num_buffers)]

    def _put(self, stream: Stream, buffers: list[Any]) -> None:
        """Make what the stream reads be on disk, and what it writes not."""
        wanted = stream.operation == "read"
        for key in range(stream.first, stream.first + stream.num_buffers):
            if (key in self._on_disk) != wanted:
                self._submit("write" if wanted else "read", range(key, key + 1), buffers)
                self._offloader.synchronize()

    def _submit(self, operation: str, keys: range, buffers: list[Any]) -> None:
        """Start the transfers of a batch."""
        for key, buffer in zip(keys, buffers, strict=False):
            if operation == "write":
                self._offloader.async_write(buffer, str(key))
                self._on_disk.add(key)
            else:
                self._offloader.async_read(buffer, str(key))
                self._on_disk.discard(key)
