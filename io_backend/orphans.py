"""Taking away what dead sessions left in a spill root.

Covers telling dead sessions from live ones and removing them, for every new session and for people who ask.

Rules:
- Never touch what is not ours: only directories of our naming, owned by this user, not links, whose lease nobody holds.
- All of it happens under the root's lock, so a session that is just being made never looks dead.
"""

from __future__ import annotations

import dataclasses
import fcntl
import logging
import os
import stat
from pathlib import Path

from io_backend.errors import SpillDirectoryError
from io_backend.spill_root import LEASE, OWN_FILE_NAME, PREFIX, SESSION_NAME, close_quietly, lock_root, open_root

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Session:
    """A session directory that was found."""

    path: str
    pid: int
    """Process that made it. It may have ended while a forked child of it keeps the session alive."""
    nbytes: int = 0
    """What its named files take on disk; the spill file of a live session has no name and does not count."""


@dataclasses.dataclass(frozen=True, slots=True)
class LeftAlone:
    """Something that was found and not touched."""

    path: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Reclaimed:
    """What was found in one root."""

    root: str
    removed: tuple[Session, ...] = ()
    """Dead sessions; in a dry run those that would be removed."""
    alive: tuple[Session, ...] = ()
    left: tuple[LeftAlone, ...] = ()
    """What looks like ours and is not, or could not be removed."""
    dry_run: bool = False


def reclaim(root: str | os.PathLike[str], *, dry_run: bool = False) -> Reclaimed:
    """Remove the session directories of dead owners. Opening a store does the same; this is for those who ask.

    Args:
        root: The directory given as ``spill``.
        dry_run: Only say what would be removed.

    Raises:
        SpillDirectoryError: It cannot be opened, or its lock is stuck. Nothing was removed.
    """
    path = Path(root).expanduser().absolute()
    try:
        root_fd = open_root(path)
    except OSError as error:
        raise SpillDirectoryError(error.errno, f"cannot look into {path}: {error.strerror}") from error
    try:
        lock_root(root_fd, path)
        return reclaim_locked(root_fd, path, dry_run=dry_run)
    finally:
        close_quietly(root_fd)


def reclaim_locked(root_fd: int, root: Path, *, dry_run: bool = False) -> Reclaimed:
    """As `reclaim`, for a root that is open and locked. Failures are in the result and the log, never raised."""
    removed: list[Session] = []
    alive: list[Session] = []
    left: list[LeftAlone] = []
    try:
        names = sorted(os.listdir(root_fd))
    except OSError as error:
        _logger.info("left dead sessions in %s alone: %s", root, error)
        names = []
    for name in names:
        matched = SESSION_NAME.fullmatch(name)
        path = str(root / name)
        if matched is None:
            if name.startswith(f"{PREFIX}-") and os.path.isdir(path):
                left.append(LeftAlone(path, "its name is not one that teraio gives"))
            continue
        pid = int(matched["pid"])
        try:
            nbytes = _reclaim_one(root_fd, name, dry_run=dry_run)
        except _Alive:
            alive.append(Session(path, pid))
        except _NotOurs as error:
            left.append(LeftAlone(path, str(error)))
        except OSError as error:
            _logger.info("left %s alone: %s", path, error)
            left.append(LeftAlone(path, f"it could not be removed: {error.strerror or error}"))
        else:
            removed.append(Session(path, pid, nbytes))
    return Reclaimed(str(root), tuple(removed), tuple(alive), tuple(left), dry_run)


class _Alive(Exception):
    """Somebody holds the lease."""


class _NotOurs(Exception):
    """The message says why."""


def _reclaim_one(root_fd: int, name: str, *, dry_run: bool) -> int:
    """Remove one session directory if it is ours and nobody holds its lease; bytes its files took on disk."""
    mode = os.stat(name, dir_fd=root_fd, follow_symlinks=False).st_mode
    if not stat.S_ISDIR(mode):
        raise _NotOurs("it is a link" if stat.S_ISLNK(mode) else "it is not a directory")
    # O_NOFOLLOW: it may have become a link, which could point at anything.
    try:
        session_fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root_fd)
    except PermissionError:
        uid = os.stat(name, dir_fd=root_fd, follow_symlinks=False).st_uid
        if uid != os.geteuid():
            raise _NotOurs(f"it belongs to user {uid}") from None
        raise
    try:
        uid = os.fstat(session_fd).st_uid
        if uid != os.geteuid():
            raise _NotOurs(f"it belongs to user {uid}")
        if not _lease_is_free(session_fd):
            raise _Alive
        return _empty_and_remove(root_fd, name, session_fd, dry_run=dry_run)
    finally:
        close_quietly(session_fd)


def _lease_is_free(session_fd: int) -> bool:
    """Whether the owner is dead. No lease at all means it died between creating the directory and the lease."""
    try:
        lease_fd = os.open(LEASE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=session_fd)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(lease_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        close_quietly(lease_fd)
    return True


def _empty_and_remove(root_fd: int, name: str, session_fd: int, *, dry_run: bool) -> int:
    """Remove our files, then the directory, if nothing else is in it; bytes its files took on disk."""
    states = {entry: os.stat(entry, dir_fd=session_fd, follow_symlinks=False) for entry in os.listdir(session_fd)}
    own = {
        entry: state
        for entry, state in states.items()
        if stat.S_ISREG(state.st_mode) and OWN_FILE_NAME.fullmatch(entry)
    }
    foreign = sorted(states.keys() - own.keys())
    if not dry_run:
        for entry in own:
            os.unlink(entry, dir_fd=session_fd)
    if foreign:
        raise _NotOurs(f"it holds what teraio did not put there: {', '.join(map(repr, foreign[:3]))}")
    if not dry_run:
        os.rmdir(name, dir_fd=root_fd)
    return sum(state.st_blocks * 512 for state in own.values())
