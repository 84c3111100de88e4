"""What the schema of an operation says about it, looked up once.

Covers its name, the arguments that it writes, and whether the storages of its inputs are new. It records nothing
(``recorder`` does).
"""

from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

_FRESH = frozenset({"aten.lift_fresh.default"})
_RESIZING = frozenset({"resize_", "resize_as_", "set_", "_resize_output_"})


class OpFacts(NamedTuple):
    """What is known about one operation."""

    name: str
    ignored: bool
    """Looks at tensors without touching memory, and is called so often that it would drown the rest."""
    writes: frozenset[int | str]
    """Positions and names of the arguments that it writes."""
    outs: frozenset[str]
    """Names of the arguments that are results by another way (``out=``)."""
    may_resize: bool
    """Whether what it writes may get more memory (``out=``, ``resize_``)."""
    hides_writes: bool
    """Whether, under a dispatch mode, what it writes keeps its version, although without one it would move: foreach
    operations are made of single ones, whose version bumps lie above the mode."""
    is_fresh: bool
    """Whether it is the first to see memory that was just made (``torch.tensor``, ``torch.from_numpy``)."""


_facts: dict[Any, OpFacts] = {}


def facts_of(func: Any) -> OpFacts:
    """The facts of `func`."""
    return _facts.get(func) or _facts.setdefault(func, _learn(func))


def _learn(func: Any) -> OpFacts:
    name = str(func)
    schema = getattr(func, "_schema", None)  # higher-order operators have none
    writes: set[int | str] = set()
    outs: set[str] = set()
    for position, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes.add(argument.name)
            if argument.kwarg_only:
                outs.add(argument.name)
            else:
                writes.add(position)
    return OpFacts(
        name=name,
        ignored=getattr(func, "namespace", "") == "prim",
        writes=frozenset(writes),
        outs=frozenset(outs),
        may_resize=bool(writes) and not _keeps_sizes(name),
        hides_writes=bool(writes) and name.startswith("aten._foreach_"),
        is_fresh=name in _FRESH,
    )


def _keeps_sizes(name: str) -> bool:
    """Whether `name` is one of torch's in-place operations, which refuse results of another size; ``out=`` does not."""
    namespace, _, rest = name.partition(".")
    packet = rest.partition(".")[0]
    return namespace == "aten" and packet.endswith("_") and packet not in _RESIZING


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold the memory of `tensor`: itself, or what a wrapper (DTensor, jagged) is made of."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    names, _ = flatten()
    inner = (getattr(tensor, name) for name in names)
    return [plain for part in inner if isinstance(part, torch.Tensor) for plain in plain_tensors(part)]


_dispatch_themselves: dict[type, bool] = {}


def dispatches_itself(cls: type) -> bool:
    """Whether operations on tensors of type `cls` are made of operations on other tensors."""
    known = _dispatch_themselves.get(cls)
    if known is None:
        disabled = torch._C._disabled_torch_dispatch_impl
        own = getattr(cls, "__torch_dispatch__", disabled) is not disabled
        known = _dispatch_themselves[cls] = own and not issubclass(cls, FakeTensor)
    return known


def is_wrapper(cls: type) -> bool:
    """Whether tensors of type `cls` are made of other tensors and have no memory of their own."""
    return hasattr(cls, "__tensor_flatten__")
