"""What the kernel says O_DIRECT on an open file must be aligned to.

Covers ``statx`` with ``STATX_DIOALIGN`` (Linux 6.1), which Python does not offer. What is true is found by I/O
(``spill_file``); this only says where to start.

Source: statx(2) and linux/stat.h.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_NBYTES = 256
_MASK_OFFSET, _MEMORY_OFFSET, _FILE_OFFSET = 0, 152, 156


@dataclasses.dataclass(frozen=True, slots=True)
class DirectAlignment:
    """Alignment that O_DIRECT wants, in bytes."""

    memory_nbytes: int
    """Of the buffer's address."""
    offset_nbytes: int
    """Of offsets in the file and of lengths."""


def direct_alignment(fd: int) -> DirectAlignment | None:
    """What the kernel says about the open file ``fd``; ``None`` where it says nothing or O_DIRECT is not supported."""
    statx = _statx()
    if statx is None:
        return None
    result = ctypes.create_string_buffer(_STATX_NBYTES)
    if statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, result) != 0:
        return None
    mask, memory, offset = (
        ctypes.c_uint32.from_buffer(result, at).value for at in (_MASK_OFFSET, _MEMORY_OFFSET, _FILE_OFFSET)
    )
    if not mask & _STATX_DIOALIGN or memory == 0 or offset == 0:
        return None
    return DirectAlignment(memory, offset)


@functools.cache
def _statx() -> Callable[..., int] | None:
    try:
        function = ctypes.CDLL(None).statx
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p]
    function.restype = ctypes.c_int
    return function
