"""Sharing the one recycler of a process among sessions.

Covers the limit. The rule: idle memory never takes more than the budgets leave free, so that the process holds what
lived outside any session, plus the budgets, and not more.
"""

import threading

from teraio.runtime.recycler.library import Library, RecyclerStatistics, load_library

_lock = threading.Lock()
_leases: "list[RecyclerLease]" = []
_base_nbytes = 0
"""Live in the recycler when the first of the present sessions began."""


class RecyclerLease:
    """The use of the recycler by one session, until `release`.

    Thread safety: any thread.
    """

    def __init__(self, library: Library, room_nbytes: int) -> None:
        self._library = library
        self._room_nbytes = room_nbytes

    def set_room(self, nbytes: int) -> None:
        """Bytes by which this session's tensors may grow beyond what it held when it began."""
        with _lock:
            self._room_nbytes = nbytes
            if self in _leases:
                self._apply()

    @property
    def library(self) -> Library:
        """The recycler itself."""
        return self._library

    def statistics(self) -> RecyclerStatistics:
        """Counters of the whole process."""
        return self._library.statistics()

    def release(self) -> None:
        """The last session to leave gives the idle memory away and torch its former allocator. Idempotent."""
        with _lock:
            if self not in _leases:
                return
            _leases.remove(self)
            if _leases:
                self._apply()
            else:
                self._library.uninstall()

    def _apply(self) -> None:
        self._library.set_limit(_base_nbytes + sum(max(0, lease._room_nbytes) for lease in _leases))


def lease_recycler(room_nbytes: int) -> RecyclerLease:
    """Recycle tensors' memory from now on, for a session whose tensors may grow by `room_nbytes`.

    Raises:
        RecyclerUnavailableError: It cannot be had on this machine.
    """
    global _base_nbytes
    library = load_library()
    lease = RecyclerLease(library, room_nbytes)
    with _lock:
        if not _leases:
            _base_nbytes = library.statistics().live_nbytes
            library.install()
        _leases.append(lease)
        lease._apply()
    return lease
