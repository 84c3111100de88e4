"""Every system call of the storage backend, counted, and any one of them made to fail.

Covers the calls that ``io_backend`` makes by way of Python's modules, in the order in which they happen. What is asked
of the kernel by ``ctypes`` (``statx``, which may fail anywhere) is left alone. The rule: a call that is not due goes to
the system unchanged.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

CALLS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (
        os,
        (
            "open",
            "close",
            "pwritev",
            "preadv",
            "posix_fallocate",
            "ftruncate",
            "fdatasync",
            "posix_fadvise",
            "statvfs",
            "mkdir",
            "unlink",
            "rmdir",
            "listdir",
            "fstat",
        ),
    ),
    (fcntl, ("flock",)),
    (mmap, ("mmap",)),
)
TRANSFERS = ("pwritev", "preadv")
ERRNOS = tuple(
    getattr(errno, name)
    for name in ("EIO", "ENOSPC", "EDQUOT", "ESTALE", "EROFS", "EINTR", "EAGAIN", "EINVAL", "EMFILE")
)

Real = Callable[..., Any]
Action = Callable[[str, Real, tuple[Any, ...], dict[str, Any]], Any]


class SystemCalls:
    """Stands before the system's calls; ``plan(index, name)`` says what happens instead, or ``None``.

    Thread safety: the calls come from any thread.
    """

    def __init__(self, patch: pytest.MonkeyPatch, plan: Callable[[int, str], Action | None]) -> None:
        self.names: list[str] = []
        """The calls so far, in their order."""
        self.struck: list[str] = []
        """Those of them that the plan had something for."""
        self._plan = plan
        self._lock = threading.Lock()
        for module, names in CALLS:
            for name in names:
                patch.setattr(module, name, self._wrapped(name, getattr(module, name)))

    def _wrapped(self, name: str, real: Real) -> Real:
        def call(*args: Any, **options: Any) -> Any:
            with self._lock:
                index = len(self.names)
                self.names.append(name)
                action = self._plan(index, name)
                if action is not None:
                    self.struck.append(name)
            return real(*args, **options) if action is None else action(name, real, args, options)

        return call


def never(index: int, name: str) -> Action | None:
    """The plan of a healthy system."""
    return None


def only(at: int, action: Action) -> Callable[[int, str], Action | None]:
    """The plan that one call goes wrong."""
    return lambda index, name: action if index == at else None


def from_then_on(at: int, kind: str, action: Action) -> Callable[[int, str], Action | None]:
    """The plan that one kind of call goes wrong from some moment on."""
    return lambda index, name: action if index >= at and name == kind else None


def fails(code: int) -> Action:
    """The call reports an error. A failed close has closed the descriptor all the same, as on Linux."""

    def action(name: str, real: Real, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if name == "close":
            real(*args)
        raise OSError(code, os.strerror(code))

    return action


def moves(part: float) -> Action:
    """The transfer moves only this part of its first buffer."""

    def action(name: str, real: Real, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        fd, buffers, *rest = args
        view = memoryview(buffers[0])
        nbytes = int(len(view) * part)
        if nbytes >= 4096:
            nbytes = nbytes // 4096 * 4096
        try:
            return real(fd, [view[:nbytes]], *rest) if nbytes else 0
        except OSError as error:
            if error.errno == errno.EINVAL:  # O_DIRECT takes no part of a block
                return 0
            raise

    return action


def waits_for(opened: threading.Event, reached: threading.Event, timeout_s: float) -> Action:
    """The call is held until the event."""

    def action(name: str, real: Real, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        reached.set()
        if not opened.wait(timeout_s):
            raise AssertionError(f"{name} was held and not let go within {timeout_s:g} s")
        return real(*args, **options)

    return action
