"""How much was ever written to and read from a spill directory: what wears a disk out.

Covers one small file for each user beside the session directories, and adding a store's counts to it while it runs.
It counts the bytes of transfers that succeeded, without padding and without what the disk itself writes beyond that.

Rules:
- Counts are added, under the root's lock, to what the file says at that moment: sessions at the same time lose nothing.
- Keeping it never disturbs training: the lock is not waited for, failures are logged, a damaged file is put aside.
- A session that moved nothing leaves no file.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from io_backend import json_file
from io_backend.json_file import UnusableFileError
from io_backend.spill_root import PREFIX, close_quietly, open_root, try_lock_root

if TYPE_CHECKING:
    from io_backend.meter import Meter

_logger = logging.getLogger(__name__)
_KIND, _VERSION = "teraio-ledger", 1
_INTERVAL_S = 60.0
_INTERVAL_NBYTES = 16 << 30
_RETRY_S = 1.0
_LAST_CALL_S = 0.5  # how long the end of a session waits for the lock
_POLL_S = 0.01


@dataclasses.dataclass(frozen=True, slots=True)
class Ledger:
    """What this user's sessions have done in one directory."""

    written_nbytes: int = 0
    read_nbytes: int = 0
    since: str = ""
    """Date of the first entry, ISO 8601; empty when there is none."""
    sessions: int = 0
    """Stores that moved at least one byte; a session with several directories counts once in each."""
    note: str = ""
    """Why the file could not be read; empty when it could, or when there is none."""

    def __post_init__(self) -> None:
        for name in ("written_nbytes", "read_nbytes", "sessions"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise UnusableFileError(f"{name} is {value!r}, expected a number of 0 or more")
        datetime.date.fromisoformat(self.since or "2000-01-01")

    def bytes_per_day(self, today: datetime.date | None = None) -> float | None:
        """Bytes written a day on average since the first entry, that day included; ``None`` without an entry."""
        if not self.since:
            return None
        today = today if today is not None else datetime.date.today()
        return self.written_nbytes / max(1, (today - datetime.date.fromisoformat(self.since)).days + 1)


def ledger_name(uid: int | None = None) -> str:
    """The file's name in a spill root; users who share a root each have their own."""
    return f"{PREFIX}-ledger-{os.geteuid() if uid is None else uid}.json"


def read_ledger(root: str | os.PathLike[str]) -> Ledger:
    """What this user's ledger in a directory says; zeros where there is none. Never raises.

    Args:
        root: The directory given as ``spill``.
    """
    path = Path(root).expanduser() / ledger_name()
    try:
        return _read(path)
    except FileNotFoundError:
        return Ledger()
    except (OSError, ValueError, TypeError) as error:
        return Ledger(note=f"{path} cannot be used: {error}")


class LedgerKeeper:
    """Adds what one store has moved to the ledger of its root, now and then and at the end.

    Thread safety: ``tick`` and ``close`` from any thread; whoever comes second while one writes goes on at once.
    """

    def __init__(self, root: Path, meter: Meter, *, starts: bool = True) -> None:
        """Start counting; touches no file.

        Args:
            root: The spill root.
            meter: Of the store.
            starts: Make a ledger where there is none. Off, only one that is there is kept up.
        """
        self._root = root
        self._meter = meter
        self._starts = starts
        self._pid = os.getpid()
        self._lock = threading.Lock()  # never waited for: a garbage collection may call `close` anywhere
        self._entered_written_nbytes = 0
        self._entered_read_nbytes = 0
        self._counted = False
        self._given_up = False
        self._next_s = time.monotonic() + _INTERVAL_S
        self._not_before_s = 0.0

    def tick(self) -> None:
        """Enter what was moved, if it is time. Cheap when it is not; call it between transfers."""
        now_s = time.monotonic()
        if now_s < self._not_before_s:
            return
        new_nbytes = self._meter.moved_nbytes()[0] - self._entered_written_nbytes
        if now_s < self._next_s and new_nbytes < _INTERVAL_NBYTES:
            return
        if self._enter():
            self._next_s = now_s + _INTERVAL_S
        else:
            self._not_before_s = now_s + _RETRY_S

    def close(self) -> None:
        """Enter the rest. Waits a moment for the lock, then gives up with a line in the log. May be called again."""
        deadline_s = time.monotonic() + _LAST_CALL_S
        while not self._enter():
            if time.monotonic() >= deadline_s:
                _logger.info(
                    "the last counts of this session are missing in the ledger of %s: it is locked", self._root
                )
                return
            time.sleep(_POLL_S)

    def _enter(self) -> bool:
        """Add what is not in the file yet; False when the lock was not to be had, so that it is worth trying again."""
        if self._given_up or os.getpid() != self._pid or not self._lock.acquire(blocking=False):
            return True
        try:
            written_nbytes, read_nbytes = self._meter.moved_nbytes()
            new_written_nbytes = max(0, written_nbytes - self._entered_written_nbytes)
            new_read_nbytes = max(0, read_nbytes - self._entered_read_nbytes)
            if new_written_nbytes + new_read_nbytes == 0:
                return True
            root_fd = open_root(self._root)
            try:
                if not try_lock_root(root_fd):
                    return False
                if not _add(root_fd, self._root, new_written_nbytes, new_read_nbytes, not self._counted, self._starts):
                    self._given_up = True
            finally:
                close_quietly(root_fd)
            self._entered_written_nbytes, self._entered_read_nbytes = written_nbytes, read_nbytes
            self._counted = True
        except Exception as error:  # whatever it is, the transfer that gave the occasion went well
            # A full disk may have room again later; a directory that may not be written to stays that way.
            self._given_up = isinstance(error, PermissionError | FileNotFoundError)
            _logger.info("the ledger of %s could not be kept: %s", self._root, error)
        finally:
            self._lock.release()
        return True


def _add(root_fd: int, root: Path, written_nbytes: int, read_nbytes: int, first: bool, starts: bool) -> bool:
    """Add to the file, under the root's lock; False if there is none and none is to be started."""
    name = ledger_name()
    try:
        old = _read(name, dir_fd=root_fd)
    except FileNotFoundError:
        if not starts:
            return False
        old = Ledger()
    except (ValueError, TypeError) as error:
        aside = f"{name}.damaged"
        _logger.info("the ledger %s cannot be used (%s): kept as %s, a new one starts", root / name, error, aside)
        os.replace(name, aside, src_dir_fd=root_fd, dst_dir_fd=root_fd)
        old = Ledger()
    new = {
        "written_nbytes": old.written_nbytes + written_nbytes,
        "read_nbytes": old.read_nbytes + read_nbytes,
        "since": old.since or datetime.date.today().isoformat(),
        "sessions": old.sessions + first,
    }
    # Under the lock one name will do, and what a killed process left under it is overwritten.
    json_file.replace_object(name, new, kind=_KIND, version=_VERSION, dir_fd=root_fd, temporary=f"{name}.new")
    return True


def _read(path: str | os.PathLike[str], dir_fd: int | None = None) -> Ledger:
    content = json_file.read_object(path, kind=_KIND, version=_VERSION, dir_fd=dir_fd)
    names = ("written_nbytes", "read_nbytes", "since", "sessions")
    missing = [name for name in names if name not in content]
    if missing:
        raise UnusableFileError(f"it lacks {', '.join(missing)}")
    return Ledger(**{name: content[name] for name in names})
