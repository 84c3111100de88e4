"""Memory that a runtime holds outside any tensor, made visible to recorders.

Covers the announcement of raw buffers (recycled slabs, staging) and of the storages that lie on them. It counts
nothing itself (recorders do). The rule: a byte is counted once, on the buffer while it exists, never again on a
storage that was built on it.
"""

import threading
import weakref
from collections.abc import Callable, Iterator

import torch

_buffers: dict[int, tuple[weakref.ref[object], int]] = {}
_storages_on_buffers: dict[int, weakref.ref[torch.UntypedStorage]] = {}
_watchers: list[Callable[[torch.UntypedStorage], None]] = []
_total_nbytes = 0
_lock = threading.RLock()  # a weak reference may fire inside a guarded region of the same thread


def announce_buffer(owner: object, nbytes: int) -> None:
    """Say that `owner`, which must allow weak references, holds `nbytes` of device memory for as long as it lives.

    Announced again, it has its new size.
    """
    global _total_nbytes
    key = id(owner)
    with _lock:
        _forget(key)
        _buffers[key] = (weakref.ref(owner, lambda _: _forget(key)), nbytes)
        _total_nbytes += nbytes


def announce_storage_on_buffer(storage: torch.UntypedStorage) -> None:
    """Say that the bytes of `storage` belong to an announced buffer, or to no memory of the device, from now on."""
    key = storage._cdata
    if key not in _storages_on_buffers:
        _storages_on_buffers[key] = weakref.ref(storage, lambda _: _storages_on_buffers.pop(key, None))
        for watcher in list(_watchers):
            watcher(storage)


def watch_storages(watcher: Callable[[torch.UntypedStorage], None]) -> None:
    """Tell `watcher` of every storage announced from now on, until `unwatch_storages`."""
    _watchers.append(watcher)


def unwatch_storages(watcher: Callable[[torch.UntypedStorage], None]) -> None:
    """Stop telling `watcher`; does nothing when it does not watch."""
    if watcher in _watchers:
        _watchers.remove(watcher)


def lies_on_buffer(storage: torch.UntypedStorage) -> bool:
    """Whether the bytes of `storage` are already counted on an announced buffer."""
    return bool(_storages_on_buffers) and storage._cdata in _storages_on_buffers


def live_buffers() -> Iterator[tuple[object, int]]:
    """The announced buffers that are alive, each with its size in bytes."""
    for ref, nbytes in list(_buffers.values()):
        owner = ref()
        if owner is not None:
            yield owner, nbytes


def buffers_nbytes() -> int:
    """Bytes of all announced buffers that are alive."""
    return _total_nbytes


def _forget(key: int) -> None:
    global _total_nbytes
    with _lock:
        known = _buffers.pop(key, None)
        if known is not None:
            _total_nbytes -= known[1]
