"""Watching saved tensors without changing what autograd does with them.

Covers pack and unpack events for a recorder used on its own. A runtime with hooks of its own reports to the recorder
directly. The rules: hooks that were active before keep doing their work; without any, a detached alias is kept, and the
check against in-place modification, which autograd leaves out under hooks, is made here.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._compile import _disable_dynamo

from lifetime.events import EventKind

if TYPE_CHECKING:
    from lifetime.recorder import Recorder


class InPlaceModificationError(RuntimeError):
    """A saved tensor was modified in place before its use; the message is worded as autograd's own."""


def check_not_modified(found_version: int, saved_version: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise what autograd raises without hooks when a saved tensor was modified in place.

    Raises:
        RuntimeError: The versions differ.
    """
    if found_version != saved_version:
        name = f"torch.{str(dtype).removeprefix('torch.')} {list(shape)}"
        raise InPlaceModificationError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{name}] is at version {found_version}; expected version {saved_version} instead. "
            "Hint: enable anomaly detection to find the operation that failed to compute its gradient, "
            "with torch.autograd.set_detect_anomaly(True)."
        )


class _Saved(NamedTuple):
    alias: Any
    """A detached alias, or what the hooks that were active before made of the tensor."""
    version: int
    """Version of the tensor when it was saved, -1 where there is none to compare."""
    storage: int
    nbytes: int
    dtype: str


class SavedTensorObserver:
    """Reports each pack and unpack to a recorder, round whatever hooks are active."""

    def __init__(self, recorder: "Recorder") -> None:
        self._recorder = recorder
        self._inner: tuple[Any, Any] | None = None
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None

    def start(self) -> None:
        """Install the hooks on the calling thread."""
        top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
        self._inner = top(True) if top is not None else None
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()

    def stop(self) -> None:
        """Take the hooks away; tensors saved meanwhile can still be unpacked."""
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None

    # Called from compiled regions, too: `torch.compile` must not try to compile the hooks themselves.

    @_disable_dynamo
    def _pack(self, tensor: torch.Tensor) -> _Saved:
        recorder = self._recorder
        storage, nbytes, dtype = -1, 0, ""
        if recorder.is_recording:
            with recorder.pause():
                storage = recorder.saved(tensor)
                nbytes = tensor.untyped_storage().nbytes() if storage >= 0 else 0
                dtype = str(tensor.dtype).removeprefix("torch.")
                recorder.event(EventKind.PACK, storage, nbytes, dtype)
        if self._inner is not None:
            # Whatever these hooks do (copy, compress) belongs to the program: it is recorded.
            return _Saved(self._inner[0](tensor), -1, storage, nbytes, dtype)
        with recorder.pause():
            version = -1 if tensor.is_inference() else tensor._version
            return _Saved(tensor.detach(), version, storage, nbytes, dtype)

    @_disable_dynamo
    def _unpack(self, saved: _Saved) -> torch.Tensor:
        recorder = self._recorder
        if recorder.is_recording:
            recorder.event(EventKind.UNPACK, saved.storage, saved.nbytes, saved.dtype)
        if self._inner is not None:
            result: torch.Tensor = self._inner[1](saved.alias)
            return result
        alias: torch.Tensor = saved.alias
        if saved.version >= 0:
            check_not_modified(alias._version, saved.version, alias.dtype, tuple(alias.shape))
        return alias
