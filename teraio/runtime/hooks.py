"""What autograd's saved tensors become: a resident alias, or a handle on a record.

Covers pack and unpack, which storages are eligible, exact restoring of a tensor's geometry, and the check against
in-place modification that autograd leaves out under hooks. When bytes move is decided by the mode. The rules:

- A saved tensor is never returned itself: autograd would then hold it in a cycle that nothing frees.
- Size, stride and offset come back exactly; one storage comes back once, and every view is made on it.
- Weights are known by their storage, whatever view of them is saved; they never travel.
- Whatever cannot be handled exactly stays resident and is counted by reason.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch._compile

from lifetime import EventKind
from lifetime.saved_tensors import check_not_modified
from teraio.errors import OffloadError
from teraio.runtime.engine import Engine
from teraio.runtime.modes import Mode, PassiveMode
from teraio.runtime.residency import Record, State

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _outside_compiled_code(function: _Function) -> _Function:
    """Keep torch.compile from following a hook into this package; it loads the compiler only when first called."""
    disable = getattr(torch._compile, "_disable_dynamo", None)
    return function if disable is None else cast(_Function, disable(function))


_NO_TASK = -1
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_empty: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
_dtype_names: dict[torch.dtype, str] = {}


class _Resident:
    """A saved tensor that stays: an alias, and the version that it had."""

    __slots__ = ("alias", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.alias = tensor.detach()
        self.version: int = -1 if tensor.is_inference() else tensor._version


class _Offloadable:
    """A saved tensor whose storage may leave: a record, the tensor's geometry, and a probe of its version."""

    __slots__ = ("dtype", "offset", "probe", "record", "size", "stride", "version")

    def __init__(self, tensor: torch.Tensor, record: Record) -> None:
        self.record = record
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        # The probe shares the tensor's version counter and none of its memory, so that later changes in place show
        # without keeping the storage alive.
        probe = tensor.detach()
        probe.data = _empty_tensor(tensor.dtype, tensor.device)
        self.probe = probe
        self.version: int = tensor._version


class SavedTensorHooks:
    """The pack and unpack functions of one session.

    Thread safety: may be called from autograd's threads; decisions are made under the engine's lock.
    """

    def __init__(self, engine: Engine, *, min_nbytes: int, device: torch.device) -> None:
        self._engine = engine
        self._min_nbytes = min_nbytes
        self._device = device
        self._pid = os.getpid()
        self._weights: set[int] = set()
        self._context: torch.autograd.graph.saved_tensors_hooks | None = None
        self.mode: Mode = PassiveMode()
        self.pin_depth = 0
        """Above 0 inside modules whose saved tensors stay."""
        self.skipped_nbytes: Counter[str] = Counter()
        self.num_packed = 0
        self.num_unpacked = 0
        self._unended_backwards: set[int] = set()

    # --- life cycle --------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Put the hooks on the calling thread."""
        context = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        context.__enter__()
        self._context = context

    def uninstall(self) -> None:
        """Take them away; what was packed can still be unpacked."""
        if self._context is not None:
            self._context.__exit__()
            self._context = None

    def know_weights(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replace the set of storages that never travel."""
        self._weights = {t.untyped_storage()._cdata for t in tensors if _has_plain_storage(t)}

    # --- the hooks ---------------------------------------------------------------------------------------------------

    @_outside_compiled_code
    def pack(self, tensor: torch.Tensor) -> _Resident | _Offloadable:
        """Autograd saves `tensor`."""
        if os.getpid() != self._pid:  # a forked DataLoader worker inherits hooks, not the threads behind them
            return _Resident(tensor)
        with self._engine.lock, self.quiet():
            self.on_pack()
            self.num_packed += 1
            why_not = self._why_resident(tensor)
            dtype = _dtype_name(tensor.dtype)
            if why_not is not None:
                nbytes = _storage_nbytes(tensor)
                self.skipped_nbytes[why_not] += nbytes
                packed: _Resident | _Offloadable = _Resident(tensor)
                self.mode.packed(None, nbytes, dtype)
                return packed
            storage = tensor.untyped_storage()
            record = self._engine.find(storage)
            if record is None:
                record = self._engine.adopt(storage, storage.nbytes(), tensor.dtype)
            del storage  # one reference more would look like another holder
            packed = _Offloadable(tensor, record)
            self.mode.packed(record, record.nbytes, dtype)
            return packed

    @_outside_compiled_code
    def unpack(self, packed: _Resident | _Offloadable) -> torch.Tensor:
        """Autograd needs a saved tensor back.

        Raises:
            RuntimeError: It was modified in place since, as autograd says without hooks.
            OffloadError: Its bytes could not be read back; they are still on the SSD.
        """
        if os.getpid() != self._pid:
            return self._unpack_in_a_child(packed)
        self.num_unpacked += 1
        task = torch._C._current_graph_task_id()
        if task != _NO_TASK and task not in self._unended_backwards:
            self._unended_backwards.add(task)
            # Called when the whole pass has gone well, and never after an exception in it.
            engine_of_autograd: Any = torch.autograd.Variable._execution_engine
            engine_of_autograd.queue_callback(partial(self._unended_backwards.discard, task))
        if isinstance(packed, _Resident):
            alias = packed.alias
            if packed.version >= 0:
                check_not_modified(
                    alias._version, packed.version, alias.dtype, () if alias.is_nested else tuple(alias.shape)
                )
            with self._engine.lock, self.quiet():
                self.mode.unpacking(None, _storage_nbytes(alias), _dtype_name(alias.dtype))
            return alias
        check_not_modified(packed.probe._version, packed.version, packed.dtype, tuple(packed.size))
        engine, record = self._engine, packed.record
        with engine.lock, self.quiet():
            self.mode.unpacking(record, record.nbytes, _dtype_name(packed.dtype))
            storage = engine.fetch(record, self.mode.make_room)
            record.release_wanted = False
            tensor = torch.empty(0, dtype=packed.dtype, device=storage.device)
            tensor.set_(storage, packed.offset, packed.size, packed.stride)
            del storage
            self.mode.unpacked(record)
            # The program's hands get the version counter of what was saved: a change of it in backward must show to the
            # other nodes that saved the same tensor.
            alias = packed.probe.detach()
            alias.data = tensor
            return alias

    def _unpack_in_a_child(self, packed: _Resident | _Offloadable) -> torch.Tensor:
        """A forked child decides nothing, and has no threads that could read anything back."""
        if isinstance(packed, _Resident):
            return packed.alias
        storage = packed.record.storage
        if storage is None or packed.record.state is State.RELOADING:
            raise OffloadError(f"{packed.record} cannot be read back in a forked child: run backward in the parent")
        tensor = torch.empty(0, dtype=packed.dtype, device=storage.device)
        return tensor.set_(storage, packed.offset, packed.size, packed.stride)

    def forget_backwards(self) -> None:
        """What has run up to now does not matter to `backward_failed` any more."""
        self._unended_backwards &= {torch._C._current_graph_task_id()}

    def backward_failed(self) -> bool:
        """Whether a backward pass that used saved tensors began and ended in an exception; not one that still runs."""
        return bool(self._unended_backwards - {torch._C._current_graph_task_id()})

    def on_pack(self) -> None:
        """Called before each pack is decided; the session starts an iteration here when none is running."""

    def quiet(self) -> "_Quiet":
        """Operations of our own are not the program's: keep them out of a recording."""
        return _Quiet(getattr(self.mode, "recorder", None))

    def tick(self, kind: EventKind, nbytes: int = 0) -> None:
        """Any other event of the clock."""
        if os.getpid() != self._pid:
            return
        with self._engine.lock, self.quiet():
            self.mode.tick(kind, nbytes)

    # --- eligibility -------------------------------------------------------------------------------------------------

    def _why_resident(self, tensor: torch.Tensor) -> str | None:
        """Why `tensor` stays, None when it may leave."""
        if type(tensor) not in _PLAIN_TYPES:
            return "tensor subclass"
        if self.pin_depth:
            return "pinned"
        if tensor.layout is not torch.strided or tensor.is_nested:
            return "not strided"
        if tensor.device != self._device:
            return "other device"
        storage = tensor.untyped_storage()
        if storage.nbytes() < self._min_nbytes or storage.nbytes() == 0:
            return "small"
        if isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter):
            return "weight"
        if storage._cdata in self._weights:
            return "weight"
        if not storage.resizable() and self._engine.find(storage) is None:
            return "memory of another library"  # which may write to it, or keep it, without a trace
        if tensor.is_conj() or tensor.is_neg():
            return "conjugate or negative view"
        if tensor.is_inference() or storage.is_shared():
            return "shared or inference memory"
        return None


class _Quiet:
    """Pauses a recorder, if there is one."""

    __slots__ = ("_pause",)

    def __init__(self, recorder: object) -> None:
        pause = getattr(recorder, "pause", None)
        self._pause = pause() if pause is not None else None

    def __enter__(self) -> None:
        if self._pause is not None:
            self._pause.__enter__()

    def __exit__(self, *_: object) -> None:
        if self._pause is not None:
            self._pause.__exit__(None, None, None)


def _has_plain_storage(tensor: torch.Tensor) -> bool:
    return type(tensor) in _PLAIN_TYPES and tensor.layout is torch.strided


def _storage_nbytes(tensor: torch.Tensor) -> int:
    """Bytes of the storage; of a tensor that has none, the bytes of what it is made of, 0 where that cannot be told."""
    try:
        return tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        pass
    try:
        if tensor.layout is torch.sparse_coo:
            parts = [tensor._indices(), tensor._values()]
        elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
        else:
            return 0
        return sum(part.untyped_storage().nbytes() for part in parts)
    except (RuntimeError, NotImplementedError):
        return 0


def _dtype_name(dtype: torch.dtype) -> str:
    name = _dtype_names.get(dtype)
    if name is None:
        name = _dtype_names[dtype] = str(dtype).removeprefix("torch.")
    return name


def _empty_tensor(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    tensor = _empty.get((dtype, device))
    if tensor is None:
        tensor = _empty[dtype, device] = torch.empty(0, dtype=dtype, device=device)
    return tensor
