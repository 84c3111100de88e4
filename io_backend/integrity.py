"""Checksums of what is written, and their check when it is read back.

Covers xxh3 sums, one a chunk, so that an error says where. It does not keep them: the store does, beside the extent.

Source: xxHash's XXH3, 64 bit, from the ``xxhash`` package, which lets other threads run meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import xxhash

from io_backend.errors import CorruptExtentError

if TYPE_CHECKING:
    from io_backend.buffers import Memory
    from io_backend.store import Extent

CHUNK_NBYTES = 4 << 20
"""Bytes under one sum: small enough to say where a fault is, large enough to cost nothing per chunk."""


def chunks(memory: Memory) -> Iterator[memoryview]:
    """The bytes of host memory, piece by piece."""
    view = memory.view()
    for start in range(0, memory.nbytes, CHUNK_NBYTES):
        yield view[start : start + CHUNK_NBYTES]


def checksums(pieces: Iterable[memoryview]) -> tuple[int, ...]:
    """One 64-bit sum a piece."""
    return tuple(xxhash.xxh3_64_intdigest(piece) for piece in pieces)


def check(expected: tuple[int, ...], found: tuple[int, ...], extent: Extent, location: str) -> None:
    """Compare what was written with what was read.

    Raises:
        CorruptExtentError: They differ; the message names the first chunk that does, and both sums.
    """
    for number, (written, read) in enumerate(zip(expected, found, strict=True)):
        if written != read:
            start = number * CHUNK_NBYTES
            raise CorruptExtentError(
                f"read of {extent} in {location}: bytes {start} to {min(start + CHUNK_NBYTES, extent.nbytes)} are not "
                f"what was written (xxh3 {read:016x}, written {written:016x}), at file offset {extent.offset + start}. "
                "The device or its driver changes data: replace it, and spill to another one"
            )
