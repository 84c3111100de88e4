"""Bytes that model and optimizer hold: parameters, buffers, gradients, optimizer state, each storage once."""

from collections.abc import Iterator, Sequence

import torch


def state_nbytes(models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Bytes of all distinct storages of model and optimizer state, gradients included."""
    seen: dict[int, int] = {}
    for tensor in state_tensors(models, optimizers):
        try:
            storage = tensor.untyped_storage()
            seen[storage._cdata] = storage.nbytes()
        except (RuntimeError, NotImplementedError):  # sparse gradients, wrapper subclasses: no plain storage
            continue
    return sum(seen.values())


def state_tensors(
    models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[torch.Tensor]:
    """Parameters, buffers, gradients and optimizer state; tied ones more than once."""
    for model in models:
        for parameter in model.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        yield from model.buffers()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter
                if parameter.grad is not None:
                    yield parameter.grad
        for state in optimizer.state.values():
            if isinstance(state, dict):
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))
