"""What the numbers depend on: processor, kernel, file system, device and versions.

Covers reading them from the system, as text for people and for JSON.
Does not measure anything.
Must stay true: what the system does not tell is "unknown", never an error.
"""

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path

from ..demo.process_facts import cpu_model, num_cores
from ..sizes import format_nbytes

UNKNOWN = "unknown"
_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def machine_facts(directory: Path) -> dict[str, str]:
    """Facts about this machine and the device under ``directory``, by name."""
    from io_backend.mounts import find_mount

    mount = find_mount(directory)
    return {
        "processor": cpu_model(),
        "cores": str(num_cores()),
        "memory": format_nbytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "kernel": platform.release(),
        "file system": f"{mount.file_system} at {mount.mount_point}",
        "device": _device(directory),
        "transparent huge pages": _chosen(_read(_THP)),
        "C library": " ".join(platform.libc_ver()) or UNKNOWN,
        "fio": _fio_version(),
        "Python": platform.python_version(),
        "torch": _version("torch"),
        "teraio": _version("teraio"),
    }


def _device(directory: Path) -> str:
    """The block device that holds the directory: name, size, scheduler, largest request."""
    number = directory.stat().st_dev
    node = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    try:
        block = node.resolve(strict=True)
    except OSError:
        return UNKNOWN
    if (block / "partition").exists():
        block = block.parent
    name = block.name
    model = _read(block / "device" / "model")
    parts = [name if model == UNKNOWN else f"{name} ({model})"]
    sectors = _read(block / "size")
    if sectors.isdecimal():
        parts.append(format_nbytes(int(sectors) * 512))
    queue = block / "queue"
    parts.append(f"scheduler {_chosen(_read(queue / 'scheduler'))}")
    parts.append(f"requests up to {_read(queue / 'max_sectors_kb')} KiB")
    return ", ".join(parts)


def _fio_version() -> str:
    """What ``fio --version`` says, or that there is none."""
    fio = shutil.which("fio")
    if fio is None:
        return "not installed"
    try:
        ended = subprocess.run([fio, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return UNKNOWN
    return ended.stdout.strip().removeprefix("fio-") or UNKNOWN


def _version(distribution: str) -> str:
    """The version of an installed distribution."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return UNKNOWN


def _read(path: Path) -> str:
    """The text of a file of the kernel's."""
    try:
        return path.read_text(encoding="utf-8").strip() or UNKNOWN
    except OSError:
        return UNKNOWN


def _chosen(text: str) -> str:
    """The choice in force, which the kernel puts in brackets: ``a [b] c``."""
    _, opened, rest = text.partition("[")
    return rest.partition("]")[0] if opened else text
