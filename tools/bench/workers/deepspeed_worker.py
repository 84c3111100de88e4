"""DeepSpeed's ``aio_handle``, with ordinary tensors or with its page-locked ones.

Covers one handle per stream over one file, transfers submitted in batches of the case's depth and waited for together:
its ``wait`` knows no single transfer. A handle carries its transfers out one after the other, so each direction of a
mixed case has its own.
Does not build the extension on purpose; loading it does, for some minutes, if that was never done.
Must stay true: ordinary tensors are copied inside DeepSpeed, so the locked ones are its best case. Both are shown.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .case import Case, Operation
from .clock import Measurement, run_together, timed

BLOCK_NBYTES = 256 << 10
QUEUE_DEPTH = 64
"""Small blocks in a long queue on one thread were the fastest of the combinations tried, for reads and for writes."""


def open_contender(directory: Path, buffers: str) -> "AioContender":
    """Load the extension; ``buffers`` is ``"locked"`` or ``"torch"``."""
    return AioContender(directory / "deepspeed.bin", locked=buffers == "locked")


class AioContender:
    """One file, whose ranges are read and overwritten.

    Thread safety: one thread, which starts others for the streams of a mixed case.
    """

    def __init__(self, path: Path, *, locked: bool) -> None:
        """Load the extension and make two handles, the most that a case needs."""
        import deepspeed
        from deepspeed.ops.op_builder import AsyncIOBuilder

        self._version = deepspeed.__version__
        make_handle = AsyncIOBuilder().load(verbose=False).aio_handle
        self._handles = [make_handle(BLOCK_NBYTES, QUEUE_DEPTH, False, True, 1) for _ in range(2)]
        self._path = path
        self._locked = locked
        self._locked_tensors: list[tuple[Any, Any]] = []
        self._streams: list[Callable[[], None]] = []

    def describe(self) -> str:
        """Version and settings."""
        kind = "new_cpu_locked_tensor" if self._locked else "torch.empty"
        return (
            f"deepspeed {self._version}, aio_handle with blocks of {BLOCK_NBYTES >> 10} KiB, "
            f"queue depth {QUEUE_DEPTH}, overlapped events, 1 thread; {kind}"
        )

    def prepare(self, case: Case) -> None:
        """Write the file once, and make the buffers of each stream."""
        for handle, stream in zip(self._handles, case.streams, strict=False):
            buffers = [self._make_buffer(handle, case.buffer_nbytes) for _ in range(stream.depth)]
            offsets = [(stream.first + number) * case.buffer_nbytes for number in range(stream.num_buffers)]
            self._transfer(handle, "write", offsets, buffers)
            self._streams.append(functools.partial(self._transfer, handle, stream.operation, offsets, buffers))

    def measure(self) -> Measurement:
        """Move the case's bytes once."""
        with timed() as measurement:
            run_together(self._streams)
        return measurement

    def release(self) -> None:
        """Free the buffers; the file stays for the next case."""
        self._streams.clear()
        for handle, tensor in self._locked_tensors:
            handle.free_cpu_locked_tensor(tensor)
        self._locked_tensors.clear()

    def close(self) -> None:
        """End the handles' threads and remove the file."""
        self.release()
        self._handles.clear()
        self._path.unlink(missing_ok=True)

    def _make_buffer(self, handle: Any, nbytes: int) -> Any:
        import torch

        if not self._locked:
            return torch.empty(nbytes, dtype=torch.uint8).random_()
        tensor = handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
        self._locked_tensors.append((handle, tensor))
        return tensor.random_()

    def _transfer(self, handle: Any, operation: Operation, offsets: list[int], buffers: list[Any]) -> None:
        """Move all ranges, as many at a time as there are buffers."""
        submit = handle.async_pwrite if operation == "write" else handle.async_pread
        for start in range(0, len(offsets), len(buffers)):
            batch = offsets[start : start + len(buffers)]
            for buffer, offset in zip(buffers, batch, strict=False):
                if submit(buffer, str(self._path), offset) != 0:
                    raise OSError(f"DeepSpeed refused a {operation} at offset {offset} of {self._path}")
            if handle.wait() != len(batch):
                raise OSError(f"DeepSpeed lost a {operation} of {self._path}")
