"""How many new bytes an operation will take, known before it runs.

Covers a prediction on the meta device, cached per operation and shapes. It sees outputs only: scratch memory inside a
kernel is not predictable and counts as unseen. An operation whose result depends on data (``nonzero``, ``unique``) has
no prediction; it is counted when it has run.
"""

from collections.abc import Iterable
from typing import Any

import torch

_MAX_ENTRIES = 1 << 16


class OpSizes:
    """Predictions of one session. Not thread-safe: used under the engine's lock."""

    def __init__(self) -> None:
        self._cache: dict[Any, int] = {}
        self._allocates: dict[Any, bool] = {}

    def predict(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Bytes of the storages that `func` will create; 0 where that cannot be known."""
        if not self._may_allocate(func):
            return 0
        try:
            key = (func, _key(args), _key(tuple(sorted(kwargs.items()))))
            cached = self._cache.get(key)
        except TypeError:  # an argument that cannot be hashed or ordered
            return _run_on_meta(func, args, kwargs)
        if cached is None:
            if len(self._cache) >= _MAX_ENTRIES:
                self._cache.clear()
            cached = self._cache[key] = _run_on_meta(func, args, kwargs)
        return cached

    def learn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], nbytes: int) -> None:
        """`func` has run and made `nbytes`: where that is more than predicted, predict it from now on."""
        if nbytes <= 0 or not self._may_allocate(func):
            return
        try:
            key = (func, _key(args), _key(tuple(sorted(kwargs.items()))))
            if nbytes > self._cache.get(key, 0):
                self._cache[key] = nbytes
        except TypeError:
            return

    def _may_allocate(self, func: Any) -> bool:
        """Whether the schema lets any result have memory of its own."""
        known = self._allocates.get(func)
        if known is None:
            schema = getattr(
                func, "_schema", None
            )  # higher-order operators have none: what they call is seen by itself
            returns = schema.returns if schema is not None else ()
            known = any(r.alias_info is None and "Tensor" in str(r.type) for r in returns)
            self._allocates[func] = known
        return known


def _key(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(_key_of(value) for value in values)


def _key_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        plain = value.layout is torch.strided and not value.is_nested
        return (tuple(value.shape), value.stride(), value.dtype) if plain else object()
    if isinstance(value, (list, tuple)):
        return _key(value)
    return (type(value), value)  # True, 1 and 1.0 are equal, yet choose different result types


def _run_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Run the operation on tensors without memory and add up what it creates."""
    inputs: set[int] = set()
    try:
        meta_args = _to_meta(args, inputs)
        meta_kwargs = {name: _to_meta(value, inputs) for name, value in kwargs.items()}
        if "device" in meta_kwargs:
            meta_kwargs["device"] = torch.device("meta")
        result = func(*meta_args, **meta_kwargs)
    except Exception:  # whatever a meta kernel lacks or refuses: there is no prediction then
        return 0
    created: dict[int, int] = {}
    try:
        _collect(result, created)
    except NotImplementedError:  # a sparse result has no storage of its own
        return 0
    return sum(nbytes for key, nbytes in created.items() if key not in inputs)


def _to_meta(value: Any, inputs: set[int]) -> Any:
    if isinstance(value, torch.Tensor):
        twin = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        inputs.add(twin.untyped_storage()._cdata)
        return twin
    if isinstance(value, (list, tuple)):
        return type(value)(_to_meta(item, inputs) for item in value)
    return value


def _collect(result: Any, created: dict[int, int]) -> None:
    if isinstance(result, torch.Tensor):
        storage = result.untyped_storage()
        created[storage._cdata] = storage.nbytes()
    elif isinstance(result, (list, tuple)):
        for item in result:
            _collect(item, created)
