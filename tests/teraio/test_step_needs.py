"""What an optimizer's update will take, told before it happens, and the refusal of a step that cannot fit.

The rules: the prediction equals what a recorder then sees; a step that is refused has changed nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import teraio
from lifetime import Recorder
from teraio.runtime.step_needs import step_needs

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p),
    "sgd-momentum": lambda p: torch.optim.SGD(p, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adagrad": lambda p: torch.optim.Adagrad(p),
}
SLACK_NBYTES = 64  # step counters and other numbers, which have bytes


def _parameters() -> list[torch.nn.Parameter]:
    parameters = [torch.nn.Parameter(torch.randn(64, 64)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


def _measured(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> tuple[int, int]:
    with Recorder() as recorder:
        for parameter in parameters:
            tensors = [parameter, parameter.grad, *optimizer.state.get(parameter, {}).values()]
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor):
                    tensor.view(-1)
        base_nbytes = recorder.live_nbytes
        type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]
        return recorder.tracker.peak_nbytes - base_nbytes, recorder.live_nbytes - base_nbytes


@pytest.mark.parametrize("name", MAKERS)
def test_the_prediction_is_what_happens(name: str) -> None:
    parameters = _parameters()
    optimizer = MAKERS[name](parameters)
    for _ in range(2):  # the first step makes the state
        before = [parameter.detach().clone() for parameter in parameters]
        state = copy.deepcopy(optimizer.state_dict()["state"])
        needs = step_needs(optimizer, optimizer.param_groups[0], parameters)  # type: ignore[arg-type]
        assert needs is not None
        assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
        assert optimizer.state_dict()["state"].keys() == state.keys()
        peak_nbytes, made_nbytes = _measured(optimizer, parameters)
        assert abs(needs.peak_nbytes - peak_nbytes) <= SLACK_NBYTES
        assert abs(needs.new_state_nbytes - made_nbytes) <= SLACK_NBYTES


def test_what_cannot_be_told_is_not_guessed() -> None:
    parameters = _parameters()
    optimizer = torch.optim.Adafactor(parameters)  # its code reads values
    assert step_needs(optimizer, optimizer.param_groups[0], parameters) is None  # type: ignore[arg-type]
    sparse = torch.nn.Parameter(torch.randn(8, 8))
    sparse.grad = torch.eye(8).to_sparse()
    sgd = torch.optim.SGD([sparse])
    assert step_needs(sgd, sgd.param_groups[0], [sparse]) is None


def _training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 1024), torch.nn.GELU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(1024, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 10))
    return model, torch.optim.AdamW(model.parameters())


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **arguments: Any) -> None:
    with teraio.offload(model, optimizer, **arguments):
        model(torch.ones(64, 64)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("kinds", ["auto", "activation"])
def test_a_step_that_cannot_fit_is_refused_before_it_begins(kinds: str) -> None:
    expected, plain_optimizer = _training()
    expected(torch.ones(64, 64)).sum().backward()
    plain_optimizer.step()

    model, optimizer = _training()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    config = teraio.Config(allow_unsafe_spill=True, min_nbytes=1)
    with pytest.raises(teraio.InfeasibleBudgetError, match=r"the step of AdamW needs .* nothing is lost") as caught:
        _train(model, optimizer, budget="16MiB", kinds=kinds, config=config)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not optimizer.state
    # The message says what suffices, and the step that was refused can be taken then.
    assert caught.value.floor_nbytes is not None
    with teraio.offload(
        model, optimizer, budget=caught.value.floor_nbytes + 4096, kinds=kinds, config=config
    ) as session:
        optimizer.step()
    assert session.report().peak_nbytes <= caught.value.floor_nbytes + 4096
    assert all(torch.equal(a, b) for a, b in zip(expected.parameters(), model.parameters(), strict=True))


def test_a_step_that_is_interrupted_after_all_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teraio.runtime.optimizer_state.step_needs", lambda *_: None)  # as for code that cannot be told
    model, optimizer = _training()
    config = teraio.Config(allow_unsafe_spill=True, min_nbytes=1, optimizer_chunk_nbytes=1)
    with pytest.raises(teraio.InfeasibleBudgetError, match=r"\d+ to \d+ of 8 parameters updated; go back to your last"):
        _train(model, optimizer, budget="16MiB", config=config)
