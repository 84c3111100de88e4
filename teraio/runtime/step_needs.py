"""How much memory an optimizer's update of some parameters will take, before it changes any of them.

Covers running the optimizer's own code on tensors without bytes (device ``meta``) and watching what lives meanwhile.
The rule: what it finds is exact for code that makes the same tensors on every device, as torch's per-parameter updates
do; where the code does not run without bytes, it says so and guesses nothing.
"""

import weakref
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StepNeeds(NamedTuple):
    """Bytes that one update takes beside parameters, gradients and the state that there is."""

    peak_nbytes: int
    """At most, at any time."""
    new_state_nbytes: int
    """Of that, what stays: state made in the first step."""


def step_needs(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameters: list[torch.Tensor]
) -> StepNeeds | None:
    """What an update of `parameters`, some of those of `group`, will take; None where it cannot be told."""
    twins = [_twin(parameter) for parameter in parameters]
    for parameter, twin in zip(parameters, twins, strict=True):
        if parameter.grad is not None:
            if parameter.grad.layout is not torch.strided:
                return None
            twin.grad = _without_bytes(parameter.grad)
    # Not a copy, which would register hooks and share nothing: the same attributes under another object.
    stand_in = object.__new__(type(optimizer))
    stand_in.__dict__.update(optimizer.__dict__)
    stand_in.param_groups = [{**group, "params": twins}]
    stand_in.state = defaultdict(
        dict,
        {
            twin: {name: _state_twin(value) for name, value in optimizer.state[parameter].items()}
            for parameter, twin in zip(parameters, twins, strict=True)
            if optimizer.state.get(parameter)
        },
    )
    live = _Live()
    try:
        with live:
            type(optimizer).step.__wrapped__(stand_in)  # type: ignore[attr-defined]
    except Exception:  # fused code, for one, has no version for these tensors
        return None
    return StepNeeds(live.peak_nbytes, live.nbytes)


class _Live(TorchDispatchMode):
    """Counts the bytes of storages that operations make, while they live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0
        self.peak_nbytes = 0
        self._counted: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
                storage = tensor.untyped_storage()
                if storage._cdata not in self._counted and storage._cdata not in inputs:
                    self._counted[storage._cdata] = storage.nbytes()
                    self.nbytes += storage.nbytes()
                    weakref.finalize(storage, self._died, storage._cdata)
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        return result

    def _died(self, cdata: int) -> None:
        self.nbytes -= self._counted.pop(cdata, 0)


def _without_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _twin(parameter: torch.Tensor) -> torch.Tensor:
    return _without_bytes(parameter).requires_grad_(parameter.requires_grad)


def _state_twin(value: Any) -> Any:
    """Counters keep their value, which the code reads; what is large has no bytes."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone() if value.dim() == 0 else _without_bytes(value)
