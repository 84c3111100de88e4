"""What there is to know about the machine, whatever the directory.

Covers host memory and its limits, huge pages, and GPUDirect Storage.
Does not judge: ``problems`` does.
Must stay true: nothing here imports torch or touches a GPU.
"""

import dataclasses
import os
import platform
import re
import resource
from pathlib import Path
from typing import Any

from io_backend.host_memory import container_free_nbytes, host_limit
from io_backend.kvikio_store import unavailable_reason

_HUGE_PAGES = Path("sys/kernel/mm/transparent_hugepage/enabled")
_NVIDIA_FS = (Path("proc/driver/nvidia-fs/version"), Path("sys/module/nvidia_fs/version"))
_THP_VARIABLE = "THP_MEM_ALLOC_ENABLE"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """One machine, as this process sees it."""

    kernel: str
    num_cores: int
    free_nbytes: int
    """Host memory that may still be taken."""
    free_reason: str
    """What sets that limit."""
    container_free_nbytes: int | None
    """Limit less use of the container; ``None`` without a limit."""
    locked_nbytes: int | None
    """Most memory that may be locked; ``None`` without a limit."""
    huge_pages: str
    """``always``, ``madvise``, ``never``, or empty where unknown."""
    torch_huge_pages: bool
    """Whether the environment asks torch for huge pages."""
    kvikio: str
    """Why KvikIO cannot be used; empty if it can."""
    nvidia_fs: str
    """Version of the kernel module for GPUDirect Storage; empty if it is not loaded."""

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return dataclasses.asdict(self)


def examine_machine(root: Path = Path("/")) -> MachineFacts:
    """Look at the machine.

    Args:
        root: Where ``proc`` and ``sys`` are.
    """
    limit = host_limit(pinned=False)
    soft_nbytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    chosen = re.search(r"\[(\w+)\]", _read(root / _HUGE_PAGES))
    return MachineFacts(
        kernel=platform.release(),
        num_cores=os.cpu_count() or 1,
        free_nbytes=limit.nbytes,
        free_reason=limit.reason,
        container_free_nbytes=container_free_nbytes(root / "sys/fs/cgroup"),
        locked_nbytes=None if soft_nbytes == resource.RLIM_INFINITY else soft_nbytes,
        huge_pages=chosen[1] if chosen else "",
        torch_huge_pages=os.environ.get(_THP_VARIABLE) == "1",
        kvikio=unavailable_reason() or "",
        nvidia_fs=next((found for path in _NVIDIA_FS if (found := _read(root / path))), ""),
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
