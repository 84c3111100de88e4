"""The directory that sessions share: what our things in it are called, and the lock that serialises their making.

Covers names and the lock. What is made and removed under it is the business of ``spill_directory``, ``orphans`` and
``ledger``.

Rule: the lock is held for some file system calls, never for a transfer; the kernel drops it with the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from pathlib import Path

from io_backend.errors import SpillDirectoryError

PREFIX = "teraio"
SESSION_NAME = re.compile(rf"{PREFIX}-(?P<pid>\d+)-[0-9a-f]{{12}}")
OWN_FILE_NAME = re.compile(r"lease|spill-[0-9a-f]{12}\.bin")
LEASE = "lease"
LOCK_TIMEOUT_S = 10.0
_LOCK_POLL_S = 0.01


def open_root(root: Path) -> int:
    """A descriptor of the root directory, to lock it and to name what is in it."""
    return os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def close_quietly(fd: int) -> None:
    """Close a descriptor that nothing was written to: Linux has closed it whatever the call says."""
    with contextlib.suppress(OSError):
        os.close(fd)


def try_lock_root(root_fd: int) -> bool:
    """Take the lock if nobody holds it. Closing the descriptor gives it back.

    Raises:
        OSError: The file system has no locks.
    """
    try:
        fcntl.flock(root_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_root(root_fd: int, root: Path) -> None:
    """Take the lock, waiting for it if need be.

    Raises:
        SpillDirectoryError: Somebody kept it for too long, or the file system has no locks.
    """
    deadline_s = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            if try_lock_root(root_fd):
                return
        except OSError as error:
            raise SpillDirectoryError(
                error.errno, f"{root} does not support file locks ({error.strerror}); name a directory on a local disk"
            ) from error
        if time.monotonic() >= deadline_s:
            raise SpillDirectoryError(
                f"another process has held the lock of {root} for {LOCK_TIMEOUT_S:g} s; it creates a session "
                "there, or is stopped. Resume or end it (`fuser` shows it), or name another directory"
            )
        time.sleep(_LOCK_POLL_S)
