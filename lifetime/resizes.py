"""Seeing ``UntypedStorage.resize_``, which changes live bytes and which no dispatch mode shows.

Covers telling watchers of it. What a new size means is ``tracker``'s. The rule: the method is replaced only while
somebody watches, does what it did, and is put back afterwards.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch

Watcher = Callable[[torch.UntypedStorage, int], None]
"""Called with the storage, after it was resized, and the size that it had before, in bytes."""

_watchers: list[Watcher] = []
_lock = threading.Lock()
_original: Callable[..., Any] = torch.UntypedStorage.resize_
_was_own_attribute = False


def watch_resizes(watcher: Watcher) -> None:
    """Tell `watcher` of every resized storage of the process, on the thread that resizes, until `unwatch_resizes`."""
    global _original, _was_own_attribute
    with _lock:
        if not _watchers and torch.UntypedStorage.resize_ is not _resize:
            _was_own_attribute = "resize_" in vars(torch.UntypedStorage)
            _original = torch.UntypedStorage.resize_
            torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign, assignment]
        _watchers.append(watcher)


def unwatch_resizes(watcher: Watcher) -> None:
    """Stop telling `watcher`; does nothing when it does not watch."""
    with _lock:
        if watcher in _watchers:
            _watchers.remove(watcher)
        # Somebody who replaced the method after us will put ours back, which then only calls the original.
        if not _watchers and torch.UntypedStorage.resize_ is _resize:
            if _was_own_attribute:
                torch.UntypedStorage.resize_ = _original  # type: ignore[method-assign]
            else:
                del torch.UntypedStorage.resize_


def _resize(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
    old_nbytes = storage.nbytes()
    result = _original(storage, *args, **kwargs)
    for watcher in tuple(_watchers):
        watcher(storage, old_nbytes)
    return result
