"""Where a caller's buffer lies in memory, and the aligned memory of our own.

Covers tensors, untyped storages and the buffer protocol (address, length, what keeps it alive), and bounce buffers.
It does no file I/O. It calls no torch operator: only accessors, so no dispatch mode of the caller sees it.

Rule: a ``Memory`` is valid as long as its ``owner`` lives and is not resized; whoever uses the address holds it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import mmap
import sys
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

    from io_backend.store import BufferLike


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """A byte range of this process."""

    address: int
    nbytes: int
    readonly: bool
    owner: object
    """What keeps the range alive; also pins it where the buffer protocol allows (numpy, bytearray)."""
    device: str | None = None
    """The CUDA device whose memory it is; ``None`` for host memory."""

    def part(self, start: int, nbytes: int) -> Memory:
        """A range of it, which keeps the whole alive."""
        return Memory(self.address + start, nbytes, self.readonly, self.owner, self.device)

    def view(self) -> memoryview:
        """The bytes, one item each. Does not keep the owner alive by itself."""
        return memoryview((ctypes.c_ubyte * self.nbytes).from_address(self.address))


def resolve(buffer: BufferLike | Memory) -> Memory:
    """Find the bytes of a contiguous buffer in host memory, whatever their type.

    Raises:
        TypeError: Not a tensor, not a storage, and no buffer protocol.
        ValueError: Not contiguous, not dense, or not in host memory.
    """
    if isinstance(buffer, Memory):
        return buffer
    torch = sys.modules.get("torch")  # whoever hands a tensor in has imported it
    if torch is not None:
        if isinstance(buffer, torch.Tensor):
            return _resolve_tensor(buffer)
        if isinstance(buffer, (torch.UntypedStorage, torch.TypedStorage)):
            storage = buffer if isinstance(buffer, torch.UntypedStorage) else buffer._untyped_storage
            return _resolve_storage(storage)
    view = memoryview(buffer)  # type: ignore[arg-type]
    if not view.c_contiguous:
        raise ValueError(f"expected a C-contiguous buffer, got strides {view.strides} for shape {view.shape}")
    if view.nbytes == 0:
        return Memory(0, 0, view.readonly, view)
    flat = np.frombuffer(view, dtype=np.uint8)
    return Memory(int(flat.__array_interface__["data"][0]), view.nbytes, view.readonly, flat)


def resolve_device(buffer: BufferLike | Memory) -> Memory:
    """As `resolve`, for CUDA memory too: tensors, storages, and whatever has the CUDA array interface."""
    torch = sys.modules.get("torch")
    if torch is not None:
        if isinstance(buffer, torch.Tensor) and buffer.device.type == "cuda":
            if not buffer.is_contiguous():
                raise ValueError("expected a contiguous tensor; pass its untyped_storage()")
            return Memory(buffer.data_ptr(), buffer.numel() * buffer.element_size(), False, buffer, str(buffer.device))
        if isinstance(buffer, torch.UntypedStorage) and buffer.device.type == "cuda":
            return Memory(buffer.data_ptr(), buffer.nbytes(), False, buffer, str(buffer.device))
        if isinstance(buffer, (torch.Tensor, torch.UntypedStorage, torch.TypedStorage)):
            return resolve(buffer)
    interface = getattr(buffer, "__cuda_array_interface__", None)
    if interface is None:
        return resolve(buffer)
    address, readonly = interface["data"]
    if interface.get("strides") is not None:
        raise ValueError(f"expected a contiguous buffer, got strides {interface['strides']}")
    nbytes = math.prod(interface["shape"]) * np.dtype(interface["typestr"]).itemsize
    return Memory(int(address), nbytes, bool(readonly), buffer, "cuda")


def _resolve_tensor(tensor: torch.Tensor) -> Memory:
    if tensor.device.type != "cpu":
        raise ValueError(f"expected a CPU tensor, got one on {tensor.device}; this store moves host memory only")
    if str(tensor.layout) != "torch.strided":
        raise ValueError(f"expected a dense tensor, got layout {tensor.layout}; pass its parts one by one")
    if not tensor.is_contiguous():
        shape, strides = tuple(tensor.shape), tensor.stride()
        raise ValueError(
            f"expected a contiguous tensor, got strides {strides} for shape {shape}; pass its untyped_storage()"
        )
    return Memory(tensor.data_ptr(), tensor.numel() * tensor.element_size(), False, tensor)


def _resolve_storage(storage: torch.UntypedStorage) -> Memory:
    if storage.device.type != "cpu":
        raise ValueError(f"expected a CPU storage, got one on {storage.device}; this store moves host memory only")
    return Memory(storage.data_ptr(), storage.nbytes(), False, storage)


def copy_bytes(destination: int, source: int, nbytes: int) -> None:
    """Copy between two addresses; the interpreter lock is released meanwhile (``ctypes`` foreign calls do)."""
    ctypes.memmove(destination, source, nbytes)


def aligned_memory(nbytes: int, alignment: int = mmap.PAGESIZE) -> Memory:
    """Fresh private memory, on huge pages where the system grants them; freed with its owner.

    Args:
        nbytes: More than 0.
        alignment: Of its address; a power of two.
    """
    slack_nbytes = max(0, alignment - mmap.PAGESIZE)
    region = mmap.mmap(-1, nbytes + slack_nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= 2 << 20 and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: slower, not wrong
            region.madvise(mmap.MADV_HUGEPAGE)
    whole = resolve(region)
    return Memory(whole.address + -whole.address % alignment, nbytes, False, whole.owner)


class BouncePool:
    """Aligned staging buffers, at most one per worker that ever needed one at the same time.

    Thread safety: ``lend`` from any thread; a deque hands the buffers out.
    """

    def __init__(self, nbytes: int, alignment: int = mmap.PAGESIZE) -> None:
        self.nbytes = nbytes
        self._alignment = alignment
        self._free: deque[Memory] = deque()

    @contextlib.contextmanager
    def lend(self) -> Iterator[Memory]:
        """One buffer for the duration of the block; allocated if none is free."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = aligned_memory(self.nbytes, self._alignment)
        try:
            yield memory
        finally:
            self._free.append(memory)

    def clear(self) -> None:
        """Drop the buffers that nobody uses."""
        self._free.clear()
