"""How a training loop is run plain and with teraio, and how the two are compared: by their bits.

Covers the runs, the fingerprints, a budget under which bytes must move, and stores with scripted faults. Does not cover
what is trained: each test brings a function that makes model, optimizer and step. The rule: nothing is compared with a
tolerance; every run with teraio must also leave no record, no extent and no hook behind.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.optim import optimizer as optimizer_module
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode

import teraio
from io_backend import BackendConfig
from io_backend.testing import FaultStore, MemoryStore
from teraio.planner.problem import build_problem

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
ROOMY = 4 * GIB
"""A budget that nothing here reaches."""
MIN_NBYTES = 4 * KIB
SLACK_NBYTES = 24 * KIB
"""Storages that come back take whole pages, and a loss is a page too."""
POLICIES = ("keep", "evict_all", "planned")

Make = Callable[[], tuple[Any, Any, Callable[[int], object]]]
"""Gives model(s), optimizer(s) and a function that makes step number ``i`` and returns what to compare."""


@pytest.fixture(autouse=True)
def one_thread(numeric_state: None) -> Iterator[None]:
    """The tensors here are small: a second thread only makes them wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def nothing_active(numeric_state: None) -> Iterator[None]:
    """Fail a test that leaves hooks or modes on the thread, and take them away for the sake of the next one."""
    yield
    left = []
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        left.append("saved tensor hooks")
    while _get_current_dispatch_mode_stack():
        left.append(f"dispatch mode {_pop_mode()}")
    assert not left


# --- fingerprints -----------------------------------------------------------------------------------------------------


def digest(tensor: torch.Tensor) -> str:
    """Type, shape and bits of a tensor."""
    with torch.no_grad():
        plain = tensor.detach()
        if plain.is_nested:
            plain = torch.cat([part.reshape(-1) for part in plain.unbind()])
        if plain.layout is not torch.strided:
            plain = plain.to_dense()
        plain = plain.resolve_conj().resolve_neg().contiguous()
        content = ctypes.string_at(plain.data_ptr(), plain.numel() * plain.element_size()) if plain.numel() else b""
    shape = "nested" if tensor.is_nested else list(tensor.shape)
    return f"{plain.dtype} {shape} {hashlib.sha256(content).hexdigest()[:16]}"


def fingerprint(value: object) -> object:
    """Anything, with its tensors replaced by their digests."""
    if isinstance(value, torch.Tensor):
        return digest(value)
    if isinstance(value, Mapping):
        return {str(key): fingerprint(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [fingerprint(item) for item in value]
    return repr(value)


def as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def state_fingerprint(models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """Weights, buffers, gradients, optimizer state, and the random number generator."""
    return {
        "models": [fingerprint(model.state_dict()) for model in models],
        "gradients": [[None if p.grad is None else digest(p.grad) for p in model.parameters()] for model in models],
        "optimizers": [fingerprint(optimizer.state_dict()) for optimizer in optimizers],
        "generator": digest(torch.get_rng_state()),
    }


# --- what a session leaves --------------------------------------------------------------------------------------------


def traces_left(models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, object]:
    """Everything that a session could forget to undo, as values to compare before and after."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    modules = [module for model in models for module in model.modules()]
    return {
        "saved tensor hooks": top,
        "dispatch modes": list(_get_current_dispatch_mode_stack()),
        "step": [optimizer.__dict__.get("step") for optimizer in optimizers],
        "step hooks": [
            (len(o._optimizer_step_pre_hooks), len(o._optimizer_step_post_hooks)) for o in optimizers
        ],
        "global step hooks": (
            len(optimizer_module._global_optimizer_pre_hooks),
            len(optimizer_module._global_optimizer_post_hooks),
        ),
        "module hooks": [
            (
                len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks), len(m._backward_pre_hooks),
                len(m._forward_hooks_always_called), len(m._forward_hooks_with_kwargs),
                len(m._forward_pre_hooks_with_kwargs),
            )
            for m in modules
        ],
        "global module hooks": (
            len(torch.nn.modules.module._global_forward_hooks),
            len(torch.nn.modules.module._global_forward_pre_hooks),
        ),
        "storage resize": "resize_" in vars(torch.UntypedStorage),
        "parameter hooks": [
            (len(p._backward_hooks or ()), len(p._post_accumulate_grad_hooks or ()))
            for model in models
            for p in model.parameters()
        ],
    }  # fmt: skip


def settle(session: teraio.Session) -> tuple[int, int]:
    """Let all transfers end; gives the records of saved tensors that live and the bytes that their extents take."""
    engine = session._engine
    records = [record for state in session._states for record in state._records.values()]
    with engine.lock:
        for collect in (False, True):
            if collect:
                gc.collect()
            while engine.wait_for_one_offload() or engine.wait_for_lingering():
                pass
            engine.tidy()
            own_nbytes = sum(record.extent.capacity_nbytes for record in records if record.extent is not None)
            left = engine.num_records, engine.store.statistics().live_nbytes - own_nbytes
            if left == (0, 0):
                break
    return left


# --- runs -------------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What one run came to."""

    log: list[object] = field(default_factory=list)
    """A fingerprint of each step."""
    final: object = None
    steps: list[Any] = field(default_factory=list)
    """`StepRecord` of each completed iteration."""
    report: Any = None
    session: Any = None

    @property
    def planned(self) -> list[Any]:
        """The iterations that ran by a plan."""
        return [step for step in self.steps if step.planned]

    def assert_same_bits(self, other: Outcome) -> None:
        """Fail at the first step that differs."""
        for i, (mine, others) in enumerate(zip(self.log, other.log, strict=True)):
            assert mine == others, f"step {i} differs"
        assert self.final == other.final


def run_plain(make: Make, steps: int = 5) -> Outcome:
    """Train without teraio."""
    torch.manual_seed(0)
    model, optimizer, step = make()
    outcome = Outcome()
    for i in range(steps):
        outcome.log.append([fingerprint(step(i)), state_fingerprint(as_list(model), as_list(optimizer))])
    outcome.final = state_fingerprint(as_list(model), as_list(optimizer))
    return outcome


def run(
    make: Make,
    *,
    policy: Any = "planned",
    budget: Any = ROOMY,
    steps: int = 5,
    min_nbytes: int = MIN_NBYTES,
    config: Mapping[str, Any] | None = None,
    use_session: Callable[[teraio.Session, int], object] | None = None,
    **arguments: Any,
) -> Outcome:
    """Train inside a session; what must hold after every run is asserted here.

    Args:
        make: As for `run_plain`.
        policy: As for `teraio.offload`.
        budget: As for `teraio.offload`.
        steps: How many.
        min_nbytes: Least size that may leave.
        config: Further fields of `teraio.Config`.
        use_session: Called with session and step number before each step.
        arguments: Further arguments of `teraio.offload`. Only saved tensors move unless ``kinds`` says otherwise.
    """
    arguments.setdefault("kinds", "activation")
    torch.manual_seed(0)
    model, optimizer, step = make()
    models, optimizers = as_list(model), as_list(optimizer)
    before = traces_left(models, optimizers)
    outcome = Outcome()
    settings = teraio.Config(min_nbytes=min_nbytes, **(config or {}))
    with teraio.offload(model, optimizer, budget=budget, policy=policy, config=settings, **arguments) as session:
        outcome.session = session
        session.on_step(outcome.steps.append)
        for i in range(steps):
            if use_session is not None:
                use_session(session, i)
            outcome.log.append([fingerprint(step(i)), state_fingerprint(models, optimizers)])
        assert settle(session) == (0, 0), "records or extents outlive their saved tensors"
        outcome.report = session.report()
    outcome.final = state_fingerprint(models, optimizers)
    assert traces_left(models, optimizers) == before
    return outcome


def tight_budget(roomy: Outcome, *, share: float, min_nbytes: int = MIN_NBYTES) -> int:
    """A budget between the floor (share 0) and the peak (share 1) of a run under ``evict_all`` in ample room."""
    floor = build_problem(roomy.session.trace, min_nbytes=min_nbytes).floor_nbytes()
    peak = roomy.report.unlimited_peak_nbytes
    return int(floor + share * (peak - floor)) + SLACK_NBYTES


def compare(
    make: Make,
    *,
    steps: int = 5,
    min_nbytes: int = MIN_NBYTES,
    share: float = 0.3,
    policies: Sequence[str] = ("keep", "planned"),
    moves: bool = True,
    budget_holds: bool = True,
    config: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> dict[str, Outcome]:
    """Train plain and with teraio, with and without room to spare, and assert that every bit is the same.

    With ``moves`` the budget lies below the plain peak, and planned steps must write and read. The budget must hold,
    but for tests that say why it cannot.
    """
    plain = run_plain(make, steps)
    common = {"steps": steps, "min_nbytes": min_nbytes, "config": config, **arguments}
    outcomes = {"roomy": run(make, policy="evict_all", **common)}
    if moves:
        budget = tight_budget(outcomes["roomy"], share=share, min_nbytes=min_nbytes)
        peak = outcomes["roomy"].report.unlimited_peak_nbytes
        assert budget < peak, f"this test cannot show anything: nothing to save below {peak} bytes"
    for policy in policies:
        tight = moves and policy != "keep"
        outcomes[policy] = outcome = run(make, policy=policy, budget=budget if tight else ROOMY, **common)
        if policy == "keep":
            assert outcome.report.written_nbytes == 0
    for name, outcome in outcomes.items():
        outcome.assert_same_bits(plain)
        if budget_holds:
            assert outcome.report.peak_nbytes <= outcome.report.budget_nbytes
        if moves and name != "keep":
            assert outcome.planned, f"{name}: no iteration was planned: {outcome.report.events}"
        if moves and name not in ("keep", "roomy"):  # with room to spare a write may be taken back before it starts
            assert sum(step.written_nbytes for step in outcome.planned) > 0, name
            assert sum(step.read_nbytes for step in outcome.planned) > 0, name
    return outcomes


# --- what is trained --------------------------------------------------------------------------------------------------


class Built(torch.nn.Module):
    """A module made of a function of (module, inputs) and named parts."""

    def __init__(self, function: Callable[..., object], **parts: torch.nn.Module | torch.nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.function(self, *inputs, **named)


def scalar(output: torch.Tensor) -> torch.Tensor:
    """A loss of any output."""
    if output.is_complex():
        output = torch.view_as_real(output)
    return output.float().square().mean()


def training(
    model: torch.nn.Module,
    shape: Sequence[int] = (128, 32),
    optimizer: torch.optim.Optimizer | None = None,
    *,
    inputs: Callable[[int], Any] | None = None,
    loss_of: Callable[[Any], torch.Tensor] = scalar,
) -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[int], object]]:
    """The plain loop: forward, backward, step, clear."""
    if optimizer is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(i: int) -> object:
        loss = loss_of(model(torch.randn(*shape) if inputs is None else inputs(i)))
        loss.backward()
        optimizer.step()
        gradients = [p.grad for p in model.parameters()]
        optimizer.zero_grad()
        return loss.detach(), gradients

    return model, optimizer, step


def chain(depth: int = 6, width: int = 32) -> torch.nn.Module:
    """Activations of 16 KiB (batch 128), weights of 4 KiB."""

    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in module.layers:
            x = torch.tanh(layer(x))
        return x

    return Built(forward, layers=torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(depth)))


class Kit:
    """Everything above, for tests, which cannot import a conftest."""

    KIB, MIB, ROOMY, MIN_NBYTES, POLICIES = KIB, MIB, ROOMY, MIN_NBYTES, POLICIES
    Built = Built
    chain = staticmethod(chain)
    compare = staticmethod(compare)
    digest = staticmethod(digest)
    fingerprint = staticmethod(fingerprint)
    run = staticmethod(run)
    run_plain = staticmethod(run_plain)
    scalar = staticmethod(scalar)
    settle = staticmethod(settle)
    state_fingerprint = staticmethod(state_fingerprint)
    tight_budget = staticmethod(tight_budget)
    traces_left = staticmethod(traces_left)
    training = staticmethod(training)


@pytest.fixture(scope="session")
def kit() -> type[Kit]:
    """Runs, comparisons and models."""
    return Kit


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultStore]:
    """The store that the next session opens: in memory, with a script that is empty so far."""
    store = FaultStore(MemoryStore(BackendConfig(num_workers=2, verify=True)))
    monkeypatch.setattr("teraio.session.open_store", lambda *_, **__: store)
    yield store
    store.close()
