"""The directory a session spills into, leased for as long as the process lives.

Covers creating a private session directory, proving that its owner lives (a lock the kernel releases at any death),
and refusing places that make no sense. What dead sessions left is taken away by ``orphans``.
It does not know what is inside the files; ``spill_file`` opens them without a name, so a crash leaves no bytes behind.

Rule: creating and reclaiming happen under a lock on the root directory (``spill_root``), so a session directory whose
lease is not locked is dead, never one that is just being made.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import weakref
from pathlib import Path

from io_backend.errors import SpillDirectoryError
from io_backend.mounts import find_mount, unsafe_reason
from io_backend.orphans import reclaim_locked
from io_backend.spill_root import LEASE, PREFIX, close_quietly, lock_root, open_root

_logger = logging.getLogger(__name__)


class SpillDirectory:
    """One session's private directory under a root the user chose; use :meth:`create`.

    Thread safety: ``close`` from any thread, more than once.

    Invariants: while open, ``path`` exists with mode 0700 and its lease file is locked. The lock belongs to the open
    file, which forked children share: a session counts as alive until they are gone too.
    """

    def __init__(self, root: Path, path: Path, file_system: str, lease_fd: int) -> None:
        self.root = root
        self.path = path
        self.file_system = file_system
        # At a normal interpreter exit this tidies up; after a crash the next create() does.
        self._finalizer = weakref.finalize(self, _remove_own, str(path), lease_fd, os.getpid())

    @classmethod
    def create(cls, root: str | os.PathLike[str], *, allow_unsafe: bool = False) -> SpillDirectory:
        """Make and lease a session directory under ``root``, after reclaiming those of dead sessions there.

        Args:
            root: Made (mode 0700) if missing. Several users and sessions may share it.
            allow_unsafe: Accept file systems in memory or on a network.

        Raises:
            SpillDirectoryError: Refused or unusable; the message says why and what to do. Nothing was created but,
                possibly, the root itself.
        """
        root_path = Path(root).expanduser().absolute()
        file_system = find_mount(root_path).file_system
        reason = unsafe_reason(file_system)
        if reason is not None and not allow_unsafe:
            raise SpillDirectoryError(
                f"spill directory {root_path} is on {file_system}: {reason}. "
                "Name a directory on a local SSD, or set allow_unsafe_spill=True in the configuration if this is meant"
            )
        try:
            root_path.mkdir(mode=0o700, parents=True, exist_ok=True)
            root_fd = open_root(root_path)
        except OSError as error:
            raise SpillDirectoryError(
                error.errno, f"cannot use {root_path} for spilling: {error.strerror}. Name a directory you may write to"
            ) from error
        try:
            lock_root(root_fd, root_path)
            reclaim_locked(root_fd, root_path)
            name, lease_fd = _make_session(root_fd, root_path)
        finally:
            close_quietly(root_fd)  # releases the lock on the root as well
        return cls(root_path, root_path / name, file_system, lease_fd)

    @property
    def closed(self) -> bool:
        """Whether the directory has been given up."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Remove the session directory and give the lease up. Idempotent; in a forked child it removes nothing."""
        self._finalizer()


def _make_session(root_fd: int, root: Path) -> tuple[str, int]:
    """Create the directory and its locked lease; the name and the lease's descriptor. Call under the root lock."""
    name = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(6)}"
    lease_fd = None
    try:
        os.mkdir(name, mode=0o700, dir_fd=root_fd)
        lease_fd = os.open(f"{name}/{LEASE}", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=root_fd)
        fcntl.flock(lease_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        _unmake_session(root_fd, name, lease_fd)
        raise SpillDirectoryError(
            error.errno,
            f"cannot create a session directory in {root}: {error.strerror}. Name a directory you may write to",
        ) from error
    return name, lease_fd


def _unmake_session(root_fd: int, name: str, lease_fd: int | None) -> None:
    """Take away what there is of a session directory that could not be completed."""
    with contextlib.suppress(OSError):  # the next session reclaims what is left
        if lease_fd is not None:
            os.unlink(f"{name}/{LEASE}", dir_fd=root_fd)
        os.rmdir(name, dir_fd=root_fd)
    if lease_fd is not None:
        close_quietly(lease_fd)


def _remove_own(path: str, lease_fd: int, owner_pid: int) -> None:
    """Give up a session directory; module-level so that the finalizer does not hold the object."""
    try:
        if os.getpid() == owner_pid:
            os.unlink(f"{path}/{LEASE}")
            os.rmdir(path)
    except OSError as error:
        _logger.info("could not remove the session directory %s: %s", path, error)
    finally:
        close_quietly(lease_fd)
