"""The budget: what is said when it cannot hold, and that it holds where it can.

Covers infeasible budgets, changes of the budget, and the peak as an observer outside the session sees it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import teraio
from lifetime.buffers import lies_on_buffer
from teraio.planner.problem import build_problem


def _state(model: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def test_state_alone_exceeds_the_budget(kit: Any) -> None:
    model, optimizer, step = kit.training(kit.chain())
    before = kit.traces_left([model], [optimizer])
    with pytest.raises(teraio.InfeasibleBudgetError, match="state of model and optimizer") as caught:
        teraio.offload(model, optimizer, budget=_state(model) - 1, kinds="activation")
    assert caught.value.floor_nbytes == _state(model)
    assert isinstance(caught.value, MemoryError)
    assert kit.traces_left([model], [optimizer]) == before
    step(0)  # the state is now the momentum, too
    with pytest.raises(teraio.InfeasibleBudgetError) as caught:
        teraio.offload(model, optimizer, budget=2 * _state(model) - 1, kinds="activation")
    assert caught.value.floor_nbytes == 2 * _state(model)


def _wide(kit: Any) -> Any:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(m.first(x))
        return torch.tanh(m.second(h.repeat(1, 8)[:, :32] + h)) + torch.exp(h.repeat(1, 8)).sum(1, keepdim=True)

    return kit.training(kit.Built(forward, first=nn.Linear(32, 32), second=nn.Linear(32, 32)))


def test_an_operation_that_cannot_fit_is_not_run(kit: Any) -> None:
    plain = kit.run_plain(lambda: _wide(kit), 4)
    torch.manual_seed(0)
    model, optimizer, step = _wide(kit)
    generator = torch.get_rng_state()
    before = kit.traces_left([model], [optimizer])
    budget = 160 * kit.KIB
    config = teraio.Config(min_nbytes=4096)
    session = teraio.offload(model, optimizer, budget=budget, kinds="activation", config=config)
    with session, pytest.raises(teraio.InfeasibleBudgetError) as caught:
        step(0)
    error = caught.value
    assert error.op.startswith("aten.")
    assert error.floor_nbytes > budget
    assert error.storages
    for text in (error.op, "160", "nothing is lost", *error.storages):
        assert text in str(error)
    assert session.report().peak_nbytes <= budget
    assert session.report().iterations == 0
    assert kit.traces_left([model], [optimizer]) == before
    # The model trains on without teraio, as if nothing had been.
    torch.set_rng_state(generator)
    optimizer.zero_grad()
    log = [[kit.fingerprint(step(i)), kit.state_fingerprint([model], [optimizer])] for i in range(4)]
    assert log == plain.log


def test_the_named_floor_gets_past_that_operation(kit: Any) -> None:
    budget, floors = 96 * kit.KIB, [96 * kit.KIB]
    for _ in range(100):
        model, optimizer, step = _wide(kit)
        try:
            with teraio.offload(
                model, optimizer, budget=budget, kinds="activation", config=teraio.Config(min_nbytes=4096)
            ):
                step(0)
            break
        except teraio.InfeasibleBudgetError as error:
            floors.append(error.floor_nbytes)
            budget = error.floor_nbytes
    else:
        pytest.fail(f"never fits: {floors}")
    assert len(floors) > 1
    assert floors == sorted(set(floors))


@pytest.mark.parametrize("where", ["backward", "step"])
def test_refused_in_backward_or_in_the_step(kit: Any, where: str) -> None:
    # In backward an exp of many rows needs a gradient of its size; in the step Adam's state comes into being.
    def make() -> Any:
        if where == "backward":
            model = kit.Built(lambda m, x: torch.exp(m.first(x)).repeat(1, 1), first=nn.Linear(8, 512))
            return kit.training(model, (64, 8), torch.optim.SGD(model.parameters(), 0.1))
        model = kit.Built(lambda m, x: m.first(x), first=nn.Linear(256, 256))
        return kit.training(model, (2, 256), torch.optim.Adam(model.parameters()))

    torch.manual_seed(0)
    model, optimizer, step = make()
    state = _state(model)
    budget = state + 350 * kit.KIB if where == "backward" else int(2.5 * state)
    plain = kit.run_plain(make, 2)
    torch.manual_seed(0)
    model, optimizer, step = make()
    generator = torch.get_rng_state()
    config = teraio.Config(min_nbytes=4096)
    session = teraio.offload(model, optimizer, budget=budget, kinds="activation", config=config)
    with session, pytest.raises(teraio.InfeasibleBudgetError):
        step(0)
    assert session.report().peak_nbytes <= budget
    assert len(optimizer.param_groups[0]["params"]) == 2
    if where == "backward":  # no weight has changed: the same steps, plain, are those of a plain run
        torch.set_rng_state(generator)
        optimizer.zero_grad()
        log = [[kit.fingerprint(step(i)), kit.state_fingerprint([model], [optimizer])] for i in range(2)]
        assert log == plain.log
    else:
        optimizer.step()


# --- the peak that others see -----------------------------------------------------------------------------------------


class _Observer(TorchDispatchMode):
    """Adds up, after each operation, the storages that it has seen and that are alive, and the session's slabs."""

    def __init__(self, session: teraio.Session, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._session = session
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self.peak_nbytes = 0
        self._see(list(tensors))

    def _see(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            key = storage._cdata
            if key not in self._alive and not lies_on_buffer(storage):
                ref = weakref.ref(storage, lambda _: self._alive.pop(key, None))
                self._alive[key] = ref, storage.nbytes()
        elif isinstance(value, (list, tuple)):
            for item in value:
                self._see(item)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._see([args, result])
        level = sum(nbytes for _, nbytes in list(self._alive.values())) + self._session._engine.pool.total_nbytes
        self.peak_nbytes = max(self.peak_nbytes, level)
        return result


@pytest.mark.parametrize("policy", ["evict_all", "planned"])
def test_the_budget_holds_in_the_eyes_of_an_observer(kit: Any, policy: str) -> None:
    def make() -> Any:
        return kit.training(kit.chain(8))

    roomy = kit.run(make, policy="evict_all")
    budget = kit.tight_budget(roomy, share=0.2)
    unlimited = roomy.report.unlimited_peak_nbytes
    assert budget < unlimited * 0.8
    torch.manual_seed(0)
    model, optimizer, step = make()
    peaks = []
    config = teraio.Config(min_nbytes=kit.MIN_NBYTES)
    with teraio.offload(model, optimizer, budget=budget, policy=policy, kinds="activation", config=config) as session:
        for i in range(6):
            state = [value for s in optimizer.state.values() for value in s.values() if value is not None]
            with _Observer(session, [*model.parameters(), *state]) as observer:
                step(i)
            peaks.append(observer.peak_nbytes)
            assert session.last_step.planned == (i >= 2)
            kit.settle(session)
    assert session.report().written_nbytes > 0
    assert max(peaks) <= budget
    assert max(peaks) <= session.report().peak_nbytes
    assert max(peaks) > unlimited * 0.5  # it did observe


def test_odd_sizes_come_back_on_whole_pages_within_the_budget(kit: Any) -> None:
    # 16400 bytes take five pages when they come back: a quarter more than they gave back.
    def make() -> Any:
        return kit.training(kit.chain(8, width=41), (100, 41))

    kit.compare(make, share=0.2, policies=("evict_all", "planned"))


def test_what_the_meta_kernel_does_not_know_is_learnt_at_first_sight(kit: Any) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(m.lstm(torch.tanh(m.first(x)))[0])

    def make() -> Any:
        lstm = nn.LSTM(32, 32, num_layers=2, batch_first=True)
        return kit.training(kit.Built(forward, first=nn.Linear(32, 32), lstm=lstm), (8, 16, 32))

    budget = kit.tight_budget(kit.run(make, policy="evict_all"), share=0.6)

    def forget_the_first(session: Any, i: int) -> None:
        if i == 1:
            session._engine.peak_nbytes = 0

    outcome = kit.run(make, budget=budget, use_session=forget_the_first)
    assert outcome.report.peak_nbytes <= budget


def test_what_the_program_holds_is_not_planned_away(kit: Any) -> None:
    # The batch, the logits and an activation are held by the program until the step is over.
    def forward(m: Any, x: torch.Tensor) -> Any:
        hidden = []
        for layer in m.layers:
            x = torch.tanh(layer(x))
            hidden.append(x)
        return x, hidden[2]

    def make() -> Any:
        model = kit.Built(forward, layers=nn.ModuleList(nn.Linear(32, 32) for _ in range(8)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

        def step(i: int) -> object:
            batch = torch.randn(128, 32)
            logits, hidden = model(batch)
            loss = F.mse_loss(logits, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach(), logits.detach(), hidden.detach(), batch

        return model, optimizer, step

    outcomes = kit.compare(make, steps=7, share=0.1)
    for name in ("planned", "roomy"):
        assert not any("more than the budget" in event for event in outcomes[name].report.events), name
        assert [step.planned for step in outcomes[name].steps] == [False, False, True, True, True, True, True]


# --- other budgets ----------------------------------------------------------------------------------------------------


def test_set_budget_takes_effect_at_the_next_iteration(kit: Any) -> None:
    def make() -> Any:
        return kit.training(kit.chain())

    roomy = kit.run(make, policy="evict_all")
    tight = kit.tight_budget(roomy, share=0.2)
    plain = kit.run_plain(make, 9)
    predictions = {}

    def change(session: Any, i: int) -> None:
        if i == 3:
            session.set_budget(tight)
        elif i == 6:
            session.set_budget("1GiB")
        if i in (3, 4, 7):
            predictions[i] = session.plan.predicted
        if i == 4:
            with pytest.raises(teraio.InfeasibleBudgetError, match="stays"):
                session.set_budget(1)
            with pytest.raises(teraio.ConfigError):
                session.set_budget("much")
            session._engine.peak_nbytes = 0
        if i == 6:
            assert 0 < session._engine.peak_nbytes <= tight

    outcome = kit.run(make, steps=9, use_session=change)
    outcome.assert_same_bits(plain)
    assert [step.planned for step in outcome.steps] == [False, False] + [True] * 7
    assert outcome.steps[2].written_nbytes == 0  # nothing has to leave
    assert all(step.written_nbytes > 0 for step in outcome.steps[3:6])
    assert all(step.written_nbytes == 0 for step in outcome.steps[6:])
    assert predictions[4].peak_nbytes <= tight < predictions[7].peak_nbytes


@pytest.mark.parametrize(
    "budget", [None, "1GiB", "1.5 GiB", "2000MB", 1 << 30, {"cpu": "1GiB"}, {torch.device("cpu"): 1 << 30}]
)
def test_forms_of_a_budget(kit: Any, budget: Any) -> None:
    outcome = kit.run(lambda: kit.training(kit.chain(2)), budget=budget, steps=1)
    expected = {"1.5 GiB": 3 << 29, "2000MB": 2 * 10**9}.get(budget if isinstance(budget, str) else "", 1 << 30)
    if budget is not None:
        assert outcome.report.budget_nbytes == expected
    else:
        assert outcome.report.budget_nbytes > 1 << 20


def test_the_default_is_shared_by_local_ranks(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teraio.budget.free_nbytes", lambda: 1 << 30)
    model, optimizer, _ = kit.training(kit.chain(2))
    alone = teraio.offload(model, optimizer)._budget_nbytes
    assert alone == int(0.9 * ((1 << 30) + _state(model)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert teraio.offload(model, optimizer)._budget_nbytes == alone // 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "none")
    with pytest.raises(teraio.ConfigError, match="LOCAL_WORLD_SIZE"):
        teraio.offload(model, optimizer)


def test_a_plan_that_only_just_fits(kit: Any) -> None:
    # At the floor itself: either there is a plan, or steps run operation by operation; never above the budget.
    def make() -> Any:
        return kit.training(kit.chain(8))

    roomy = kit.run(make, policy="evict_all")
    floor = build_problem(roomy.session.trace, min_nbytes=kit.MIN_NBYTES).floor_nbytes()
    plain = kit.run_plain(make, 5)
    fitted = 0
    for slack in (0, 4, 8, 16, 32):
        try:
            outcome = kit.run(make, budget=floor + slack * kit.KIB)
        except teraio.InfeasibleBudgetError:
            continue
        fitted += 1
        outcome.assert_same_bits(plain)
        assert outcome.report.peak_nbytes <= outcome.report.budget_nbytes
    assert fitted
