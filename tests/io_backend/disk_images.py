"""Small file systems of our own, and ways to break them.

Covers ext4 on loop devices, shut down, turned read-only, or with less room behind it than it promises. All of it needs
root. The rule: a mount ends with its ``with`` block.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

MIB = 1 << 20
EXT4_IOC_SHUTDOWN = 0x8004587D  # Source: linux/fs/ext4/ext4.h
SHUTDOWN_AT_ONCE = 2


def sh(*command: str) -> None:
    """Run a command that must succeed."""
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def reason_against_mounts(path: Path) -> str | None:
    """Why no file system can be mounted from an image here; ``None`` if one can."""
    if os.geteuid() != 0:
        return "mounting needs root"
    if shutil.which("mkfs.ext4") is None:
        return "there is no mkfs.ext4"
    try:
        with mounted(path, 16 * MIB):
            return None
    except subprocess.CalledProcessError as error:
        return f"loop devices cannot be mounted here: {error.stderr!r}"


@contextlib.contextmanager
def mounted(path: Path, nbytes: int, *options: str) -> Iterator[Path]:
    """An ext4 of that size from an image in ``path``; ``options`` for mkfs."""
    image, point = path / "image", path / "ext4"
    point.mkdir()
    with image.open("wb") as file:
        file.truncate(nbytes)
    sh("mkfs.ext4", "-q", "-F", "-m", "0", *options, str(image))
    sh("mount", "-o", "loop,errors=remount-ro", str(image), str(point))
    try:
        yield point
    finally:
        sh("umount", str(point))
        image.unlink()


@contextlib.contextmanager
def thin(path: Path, nbytes: int, behind_nbytes: int) -> Iterator[tuple[Path, Callable[[], None]]]:
    """An ext4 that promises more than there is behind it, and what uses up the rest: new blocks then fail to write.

    The file system itself does not notice: it gives space out, and the page cache takes the bytes.
    """
    behind = path / "behind"
    behind.mkdir()
    sh("mount", "-t", "tmpfs", "-o", f"size={behind_nbytes}", "tmpfs", str(behind))

    def exhaust() -> None:
        with (behind / "filler").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    try:
        with mounted(behind, nbytes, "-O", "^has_journal") as point:
            yield point, exhaust
    finally:
        sh("umount", str(behind))


def shut_down(point: Path) -> None:
    """Let a mounted ext4 fail every call from now on, as if its disk had been pulled out."""
    fd = os.open(point, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, EXT4_IOC_SHUTDOWN, SHUTDOWN_AT_ONCE.to_bytes(4, sys.byteorder))
    finally:
        os.close(fd)


def remount_read_only(point: Path) -> None:
    """Let a mounted ext4 find an error, as when its device fails; it then turns read-only by itself."""
    device = point.stat().st_dev
    name = Path(os.path.realpath(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")).name
    Path(f"/sys/fs/ext4/{name}/trigger_fs_error").write_text("a test")


def free_nbytes(path: Path) -> int:
    """What ``df`` says."""
    state = os.statvfs(path)
    return state.f_bavail * state.f_frsize


def drop_caches() -> None:
    """Let the next reads come from the devices."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1")
