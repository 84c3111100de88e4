"""The process's own memory: what the kernel counts, and how the C library gives memory back.

Covers anonymous resident bytes, the allocator's threshold and huge pages. Tensor bytes are counted elsewhere. The rule:
on a CPU machine freed tensors must leave the process, or a budget is only a number; glibc keeps freed blocks of up to
32 MiB for itself unless its threshold is fixed.
"""

import ctypes
import os
from pathlib import Path

import torch

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_EXACT_THRESHOLD_NBYTES = 64 << 10
_DEFAULT_THRESHOLD_NBYTES = 32 << 20
_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")
_PROBE_NBYTES = 4 << 20
_num_users = 0  # of exact malloc, so that one session's end does not take it from another


def anon_rss_nbytes() -> int:
    """Anonymous resident bytes of this process, file mappings left out.

    Raises:
        OSError: There is no ``/proc``.
    """
    resident, shared = Path("/proc/self/statm").read_bytes().split()[1:3]
    return (int(resident) - int(shared)) * _PAGE_NBYTES


def use_exact_malloc() -> bool:
    """Make freed blocks of 64 KiB and over leave the process at once; gives False where the C library has no such knob.

    Costs page faults on each allocation; huge pages (`huge_pages_work`) take most of that away. It holds until each
    caller has called `use_default_malloc`.
    """
    global _num_users
    _num_users += 1
    return _mallopt(_M_MMAP_THRESHOLD, _EXACT_THRESHOLD_NBYTES)


def use_default_malloc() -> bool:
    """Let the C library recycle blocks of up to 32 MiB again, where its own adaptation ends up, unless others mind."""
    global _num_users
    _num_users = max(0, _num_users - 1)
    if _num_users:
        return True
    trim = _mallopt(_M_TRIM_THRESHOLD, 2 * _DEFAULT_THRESHOLD_NBYTES)
    return _mallopt(_M_MMAP_THRESHOLD, _DEFAULT_THRESHOLD_NBYTES) and trim


def huge_pages_work() -> bool:
    """Whether torch's large CPU tensors lie on page boundaries, and so on huge pages.

    torch reads ``THP_MEM_ALLOC_ENABLE`` once, at its first allocation; importing teraio sets it.
    """
    probe = torch.empty(_PROBE_NBYTES, dtype=torch.uint8)
    return probe.data_ptr() % _PAGE_NBYTES == 0


def _mallopt(parameter: int, value: int) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(parameter, value) == 1
