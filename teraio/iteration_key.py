"""What makes two iterations the same before they have run: the inputs of the root module and the modes in force."""

import zlib
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

IterationKey = tuple[Any, ...]

WITHOUT_ROOT: IterationKey = ("no root module",)
"""Key of iterations that begin at the boundary of the last, when there is no root module to read inputs from."""


def iteration_key(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> IterationKey:
    """Shapes and types of the inputs, training mode, autocast."""
    leaves = tree_leaves((args, kwargs))
    inputs = tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else _plain(leaf)
        for leaf in leaves
    )
    autocast = tuple(
        (device, torch.get_autocast_dtype(device)) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
    )
    return (type(module).__name__, inputs, module.training, autocast)


def fingerprint(key: IterationKey) -> int:
    """A number that stands for `key` in an event; the same in every process."""
    return zlib.crc32(repr(key).encode())


def _plain(leaf: object) -> object:
    """Values that select what runs; anything else only by its type."""
    return leaf if isinstance(leaf, (int, float, bool, str, type(None))) else type(leaf).__name__
