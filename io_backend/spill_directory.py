"""The directory a session spills into, leased for as long as the process lives.

Covers creating a private session directory, proving that its owner lives (a lock the kernel releases at any death),
taking away what dead sessions left, and refusing places that make no sense.
It does not know what is inside the files; ``spill_file`` opens them without a name, so a crash leaves no bytes behind.

Rules:
- Never touch what is not ours: only directories of our naming, owned by this user, not links, whose lease nobody holds.
- Creating and reclaiming happen under a lock on the root directory, so a session directory whose lease is not locked
  is dead, never one that is just being made.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import stat
import time
import weakref
from pathlib import Path

from io_backend.errors import SpillDirectoryError
from io_backend.mounts import find_mount, unsafe_reason

_logger = logging.getLogger(__name__)
_PREFIX = "teraio"
_SESSION_NAME = re.compile(rf"{_PREFIX}-\d+-[0-9a-f]{{12}}")
_OWN_FILE_NAME = re.compile(r"lease|spill-[0-9a-f]{12}\.bin")
_LEASE = "lease"
_ROOT_LOCK_TIMEOUT_S = 10.0
_ROOT_LOCK_POLL_S = 0.01


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
                "Name a directory on a local SSD, or set allow_unsafe_spill=True if this is meant"
            )
        try:
            root_path.mkdir(mode=0o700, parents=True, exist_ok=True)
            root_fd = os.open(root_path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise SpillDirectoryError(
                error.errno, f"cannot use {root_path} for spilling: {error.strerror}. Name a directory you may write to"
            ) from error
        try:
            _lock_root(root_fd, root_path)
            _reclaim(root_fd, root_path)
            name, lease_fd = _make_session(root_fd, root_path)
        finally:
            _close(root_fd)  # releases the lock on the root as well
        return cls(root_path, root_path / name, file_system, lease_fd)

    @property
    def closed(self) -> bool:
        """Whether the directory has been given up."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Remove the session directory and give the lease up. Idempotent; in a forked child it removes nothing."""
        self._finalizer()


def _lock_root(root_fd: int, root: Path) -> None:
    """Take the lock that serialises create and reclaim; the kernel drops it if this process dies meanwhile."""
    deadline_s = time.monotonic() + _ROOT_LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(root_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() >= deadline_s:
                raise SpillDirectoryError(
                    f"another process has held the lock of {root} for {_ROOT_LOCK_TIMEOUT_S:g} s; it creates a session "
                    "there, or is stopped. Resume or end it (`fuser` shows it), or name another directory"
                ) from error
        except OSError as error:
            raise SpillDirectoryError(
                error.errno, f"{root} does not support file locks ({error.strerror}); name a directory on a local disk"
            ) from error
        time.sleep(_ROOT_LOCK_POLL_S)


def _make_session(root_fd: int, root: Path) -> tuple[str, int]:
    """Create the directory and its locked lease; the name and the lease's descriptor. Call under the root lock."""
    name = f"{_PREFIX}-{os.getpid()}-{secrets.token_hex(6)}"
    lease_fd = None
    try:
        os.mkdir(name, mode=0o700, dir_fd=root_fd)
        lease_fd = os.open(f"{name}/{_LEASE}", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=root_fd)
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
            os.unlink(f"{name}/{_LEASE}", dir_fd=root_fd)
        os.rmdir(name, dir_fd=root_fd)
    if lease_fd is not None:
        _close(lease_fd)


def _close(fd: int) -> None:
    """Close a descriptor that nothing was written to: Linux has closed it whatever the call says."""
    with contextlib.suppress(OSError):
        os.close(fd)


def _reclaim(root_fd: int, root: Path) -> None:
    """Remove the session directories of dead owners; failures are logged, never raised. Call under the root lock."""
    try:
        names = os.listdir(root_fd)
    except OSError as error:
        _logger.info("left dead sessions in %s alone: %s", root, error)
        return
    for name in names:
        if not _SESSION_NAME.fullmatch(name):
            continue
        try:
            _reclaim_one(root_fd, name)
        except OSError as error:
            _logger.info("left %s alone: %s", root / name, error)


def _reclaim_one(root_fd: int, name: str) -> None:
    """Remove one session directory if it is ours and nobody holds its lease."""
    # O_NOFOLLOW: a link in our naming could point at anything.
    session_fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root_fd)
    try:
        if os.fstat(session_fd).st_uid != os.geteuid() or not _lease_is_free(session_fd):
            return
        _empty_and_remove(root_fd, name, session_fd)
    finally:
        _close(session_fd)


def _lease_is_free(session_fd: int) -> bool:
    """Whether the owner is dead. No lease at all means it died between creating the directory and the lease."""
    try:
        lease_fd = os.open(_LEASE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=session_fd)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(lease_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        _close(lease_fd)
    return True


def _empty_and_remove(root_fd: int, name: str, session_fd: int) -> None:
    """Remove our files, then the directory, which fails (and should) if something foreign is in it."""
    for entry in os.listdir(session_fd):
        is_file = stat.S_ISREG(os.stat(entry, dir_fd=session_fd, follow_symlinks=False).st_mode)
        if is_file and _OWN_FILE_NAME.fullmatch(entry):
            os.unlink(entry, dir_fd=session_fd)
    os.rmdir(name, dir_fd=root_fd)


def _remove_own(path: str, lease_fd: int, owner_pid: int) -> None:
    """Give up a session directory; module-level so that the finalizer does not hold the object."""
    try:
        if os.getpid() == owner_pid:
            os.unlink(f"{path}/{_LEASE}")
            os.rmdir(path)
    except OSError as error:
        _logger.info("could not remove the session directory %s: %s", path, error)
    finally:
        _close(lease_fd)
