"""Hooks on a module that a copy of the module does not take along.

Covers a callable for ``register_forward_hook`` and its like. The rule: copying or pickling a module that is being
watched works as if it were not, and nobody watches the copy.
"""

from collections.abc import Callable
from typing import Any


class OwnHook:
    """Calls `function`; a copy of it, deep, shallow through pickle or not, does nothing."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return None if self._function is None else self._function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> "OwnHook":
        return OwnHook()

    def __reduce__(self) -> tuple[type["OwnHook"], tuple[()]]:
        return OwnHook, ()
