"""Sharing the one recycler of a process among sessions.

Covers the limit. The rule: idle memory never takes more than the budgets leave free, so that the process holds what
lived outside any session, plus the budgets, and not more.
"""

import itertools
import threading
import weakref

from teraio.runtime.recycler.library import Library, RecyclerStatistics, load_library

_lock = threading.RLock()  # a lease may be collected inside a guarded region of the same thread
_rooms_nbytes: dict[int, int] = {}
"""Of the leases that exist; it holds none of them, so that an abandoned session gives its own back."""
_serial = itertools.count()
_base_nbytes = 0
"""Live in the recycler when the first of the present sessions began."""


class RecyclerLease:
    """The use of the recycler by one session, until `release`, or until nobody holds it any more.

    Thread safety: any thread.
    """

    def __init__(self, library: Library, room_nbytes: int) -> None:
        self._library = library
        self._key = next(_serial)
        _rooms_nbytes[self._key] = room_nbytes
        self._finalizer = weakref.finalize(self, _release, library, self._key)
        self._finalizer.atexit = False  # tensors still live then

    def set_room(self, nbytes: int) -> None:
        """Bytes by which this session's tensors may grow beyond what it held when it began."""
        with _lock:
            if self._key in _rooms_nbytes:
                _rooms_nbytes[self._key] = nbytes
                _apply(self._library)

    @property
    def library(self) -> Library:
        """The recycler itself."""
        return self._library

    def statistics(self) -> RecyclerStatistics:
        """Counters of the whole process."""
        return self._library.statistics()

    def release(self) -> None:
        """The last session to leave gives the idle memory away and torch its former allocator. Idempotent."""
        self._finalizer()


def _release(library: Library, key: int) -> None:
    with _lock:
        del _rooms_nbytes[key]
        if _rooms_nbytes:
            _apply(library)
        else:
            library.uninstall()


def _apply(library: Library) -> None:
    library.set_limit(_base_nbytes + sum(max(0, room_nbytes) for room_nbytes in _rooms_nbytes.values()))


def lease_recycler(room_nbytes: int) -> RecyclerLease:
    """Recycle tensors' memory from now on, for a session whose tensors may grow by `room_nbytes`.

    Raises:
        RecyclerUnavailableError: It cannot be had on this machine.
    """
    global _base_nbytes
    library = load_library()
    with _lock:
        if not _rooms_nbytes:
            _base_nbytes = library.statistics().live_nbytes
        lease = RecyclerLease(library, room_nbytes)
        library.install()  # also when it was: a collection just now may have ended the last other lease
        _apply(library)
    return lease
