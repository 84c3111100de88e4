"""How many bytes several spill files may take on disk together.

Covers one shared account. It does not know files: they take bytes here before they grow, and give back what they did
not get.

Rule: what is taken never exceeds the limit, whoever takes at the same time.
"""

from __future__ import annotations

import threading


class Quota:
    """An account of bytes, shared by the files of one session.

    Thread safety: all methods from any thread; the lock is never held while anything else is called.
    """

    def __init__(self, limit_nbytes: int | None) -> None:
        self.limit_nbytes = limit_nbytes
        self._taken_nbytes = 0
        self._lock = threading.Lock()

    def take(self, least_nbytes: int, most_nbytes: int) -> int | None:
        """Take as much as there is between the two; ``None``, and nothing taken, where even the least is too much."""
        with self._lock:
            left_nbytes = most_nbytes if self.limit_nbytes is None else self.limit_nbytes - self._taken_nbytes
            if left_nbytes < least_nbytes:
                return None
            granted_nbytes = min(most_nbytes, left_nbytes)
            self._taken_nbytes += granted_nbytes
            return granted_nbytes

    def give_back(self, nbytes: int) -> None:
        """Return what was taken and not used."""
        with self._lock:
            self._taken_nbytes -= nbytes

    def left_nbytes(self) -> int | None:
        """What may still be taken; ``None`` without a limit."""
        with self._lock:
            return None if self.limit_nbytes is None else max(0, self.limit_nbytes - self._taken_nbytes)
