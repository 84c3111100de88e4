"""Recording changes no result and leaves nothing behind."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.modules.module as module_hooks
import torch.optim.optimizer as optimizer_hooks
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lifetime import EventKind, Recorder, Trace

Finish = Callable[[Recorder], Trace]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.inner, x, use_reentrant=False)
        output: torch.Tensor = self.inner(hidden)
        return output


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(8, 8, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(x)[0]
        return output


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv1d(5, 6, 3, padding=1), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3))


def train(make: Callable[[], nn.Module], how: dict[str, bool], *, record: bool) -> list[torch.Tensor]:
    """Two steps; everything they leave, the generator's state included."""
    torch.manual_seed(7)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **how)
    left: list[torch.Tensor] = []
    for _ in range(2):
        with Recorder(model=model, optimizer=optimizer) if record else nullcontext():
            loss = model(torch.randn(3, 5, 8)).square().mean()
            loss.backward()
            left += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            optimizer.step()
            optimizer.zero_grad()
    return [*left, *model.state_dict().values(), torch.get_rng_state()]


@pytest.mark.parametrize(
    ("make", "how"), [(Attention, {}), (Recurrent, {"fused": True}), (convolution, {"foreach": True})]
)
def test_results_and_generator_are_the_same_bit_for_bit(make: Callable[[], nn.Module], how: dict[str, bool]) -> None:
    plain = train(make, how, record=False)
    recorded = train(make, how, record=True)
    assert len(plain) == len(recorded)
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))


def pair() -> list[torch.Tensor]:
    return [torch.ones(3), torch.ones(3)]


WRITERS: dict[str, Callable[[list[torch.Tensor]], object]] = {
    "in place": lambda t: t[0].add_(1),
    "view": lambda t: t[0][:2].add_(1),
    "out": lambda t: torch.add(t[1], 1, out=t[0]),
    "set": lambda t: t[0].set_(t[1]),
    "foreach": lambda t: torch._foreach_add_(t, 1.0),
    "foreach with lists": lambda t: torch._foreach_lerp_(t, pair(), 0.5),
    "foreach copy": lambda t: torch._foreach_copy_(t, pair()),
    "batch norm": lambda t: nn.functional.batch_norm(torch.ones(4, 3), t[0], t[1], training=True),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("grad", [True, False])
def test_versions_move_as_ever(write: Callable[[list[torch.Tensor]], object], grad: bool) -> None:
    versions = []
    for context in (nullcontext(), Recorder()):
        tensors = pair()
        with context, torch.set_grad_enabled(grad):
            write(tensors)
        versions.append([tensor._version for tensor in tensors])
    assert versions[0] == versions[1]


@pytest.mark.parametrize("record", [True, False])
def test_optimizer_step_before_backward_raises_as_ever(record: bool) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1, foreach=True)
    with Recorder() if record else nullcontext():
        loss = weight.square().sum()
        weight.grad = torch.ones(3)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# --- what is left ----------------------------------------------------------------------------------------------------


def installed(model: nn.Module) -> dict[str, Any]:
    """Everything that a recorder might leave behind."""
    return {
        "modes": torch._C._len_torch_dispatch_stack(),
        "saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "global forward": dict(module_hooks._global_forward_hooks),
        "global pre-forward": dict(module_hooks._global_forward_pre_hooks),
        "always called": dict(module_hooks._global_forward_hooks_always_called),
        "step": dict(optimizer_hooks._global_optimizer_pre_hooks),
        "stepped": dict(optimizer_hooks._global_optimizer_post_hooks),
        "modules": [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()],
        "parameters": [(p._backward_hooks, p._post_accumulate_grad_hooks) for p in model.parameters()],
        "resize": torch.UntypedStorage.resize_,
        "own resize": "resize_" in vars(torch.UntypedStorage),
    }


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("raises", [True, False])
def test_nothing_stays_behind(given: bool, raises: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = installed(model)
    with ExitStack() as stack:
        if raises:
            stack.enter_context(pytest.raises(ZeroDivisionError))
        with Recorder(model=model if given else None, optimizer=optimizer if given else None) as recorder:
            assert installed(model) != before
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            if raises:
                1 / 0  # noqa: B018
    assert installed(model) == before
    assert recorder.trace.num_ops > 0


def test_recorders_nest_and_overlap_resizes() -> None:
    model = nn.Linear(3, 3)
    before = installed(model)
    x = torch.ones(4)
    with Recorder() as outer:
        with Recorder() as inner:
            y = x + 1
            y.untyped_storage().resize_(0)
            assert (outer.live_nbytes, inner.live_nbytes) == (16, 16)
        x + 2
    assert installed(model) == before
    assert (inner.num_ops, outer.num_ops) == (1, 2)


def test_resize_replaced_by_somebody_else_meanwhile() -> None:
    original = torch.UntypedStorage.resize_
    x = torch.ones(4)
    with Recorder():
        ours = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = lambda storage, size: ours(storage, size)  # type: ignore[method-assign]
    torch.UntypedStorage.resize_ = ours  # type: ignore[method-assign]
    try:
        x.untyped_storage().resize_(0)
        assert x.untyped_storage().nbytes() == 0
        with Recorder():
            x.untyped_storage().resize_(8)
        assert x.untyped_storage().nbytes() == 8
    finally:
        if "resize_" in vars(torch.UntypedStorage):
            del torch.UntypedStorage.resize_
    assert torch.UntypedStorage.resize_ == original


def test_finished_recorder_keeps_no_model_alive() -> None:
    import weakref

    model = nn.Linear(3, 3)
    ref = weakref.ref(model)
    with Recorder(model=model) as recorder:
        model(torch.ones(1, 3))
    del model
    assert ref() is None
    assert recorder.trace.num_ops > 0


def test_recorder_holds_no_tensor() -> None:
    import weakref

    with Recorder():
        a = torch.ones(4)
        ref = weakref.ref(a.untyped_storage())
        del a
        assert ref() is None


def test_caller_may_place_the_mode_itself() -> None:
    recorder = Recorder()
    recorder.start(push_mode=False)
    torch.ones(1)
    with recorder.mode:
        torch.ones(2)
    torch.ones(3)
    assert recorder.stop(pop_mode=False).num_ops == 1


# --- saved tensors ---------------------------------------------------------------------------------------------------


def test_hooks_that_were_active_before_keep_working(finish: Finish) -> None:
    calls: list[str] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        calls.append("pack")
        return tensor.detach() * 4

    def unpack(packed: torch.Tensor) -> torch.Tensor:
        calls.append("unpack")
        return packed / 4

    x = torch.ones(3, requires_grad=True)
    with saved_tensors_hooks(pack, unpack), Recorder() as recorder:
        x.exp().sum().backward()
    trace = finish(recorder)
    assert calls == ["pack", "unpack"]
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(3).exp())
    assert [event.kind for event in trace.events] == [EventKind.PACK, EventKind.UNPACK]
    names = [op.name for op in trace.ops]
    assert "aten.mul.Tensor" in names[: names.index("aten.sum.default")], "what those hooks do is recorded"
    assert all(s.birth_op >= 0 for s in trace.storages[1:]), "and what they make is born there"


def test_save_on_cpu_outside_and_inside(finish: Finish) -> None:
    x = torch.ones(3, requires_grad=True)
    with save_on_cpu(), Recorder() as recorder:
        x.exp().sum().backward()
    assert finish(recorder).num_events == 2
    with Recorder() as recorder, save_on_cpu():
        x.exp().sum().backward()
    assert finish(recorder).num_events == 0, "hooks inside ours take over"
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * torch.ones(3).exp())


def in_place_modification(*, kind: str) -> None:
    x = torch.ones(3, requires_grad=True)
    y = x.exp() if kind == "output" else x * 1
    z = y.sum() if kind == "output" else y.sin().sum()
    with torch.no_grad():
        y.add_(1)
    z.backward()


@pytest.mark.parametrize("kind", ["output", "input"])
@pytest.mark.parametrize("record", [True, False])
def test_in_place_modification_of_a_saved_tensor_raises_as_ever(kind: str, record: bool) -> None:
    message = r"modified by an inplace operation.*is at version 1; expected version 0"
    with Recorder() if record else nullcontext(), pytest.raises(RuntimeError, match=message):
        in_place_modification(kind=kind)


def test_saved_tensors_outlive_the_recorder(finish: Finish) -> None:
    x = torch.ones(3, requires_grad=True)
    with Recorder() as recorder:
        y = x.exp()
        loss = y.sum()
    num_events = recorder.num_events
    loss.backward(retain_graph=True)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(3).exp())
    assert recorder.num_events == num_events == finish(recorder).num_events == 1
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_double_backward_and_retained_graph(finish: Finish) -> None:
    def gradients() -> list[torch.Tensor]:
        x = torch.linspace(0, 1, 5, requires_grad=True)
        y = (x.exp() * x.sin()).sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (again,) = torch.autograd.grad(y, x, retain_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return [first.detach(), again, second]

    plain = gradients()
    with Recorder() as recorder:
        recorded = gradients()
    finish(recorder)
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))


def test_inference_tensors(finish: Finish) -> None:
    weight = nn.Parameter(torch.ones(3))
    with torch.inference_mode():
        frozen = torch.ones(3)
    with Recorder() as recorder:
        with torch.inference_mode():
            frozen + 1
        with torch.no_grad():
            weight * 2
    assert finish(recorder).num_ops == 2


# --- other modes, processes and compilers ----------------------------------------------------------------------------


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_other_modes_still_see_everything() -> None:
    x = torch.ones(3)
    with Counting() as outer, Recorder() as recorder, Counting() as inner:
        x + 1
    assert (outer.count, recorder.num_ops, inner.count) == (1, 1, 1)


@pytest.fixture
def quiet_fork() -> Iterator[None]:
    with warnings.catch_warnings():
        # The child only adds numbers: it needs no thread that the fork did not copy.
        warnings.filterwarnings("ignore", message=".*multi-threaded.*", category=DeprecationWarning)
        yield


@pytest.mark.usefixtures("quiet_fork")
def test_forked_child_records_nothing() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    weight = nn.Parameter(torch.ones(3))
    with Recorder(model=model) as recorder:
        weight.exp()
        before = (recorder.num_ops, recorder.num_events, recorder.tracker.live_nbytes)
        child = os.fork()
        if child == 0:
            try:
                y = weight.exp()  # the mode and the hooks came along
                model(weight)
                after = (recorder.num_ops, recorder.num_events, recorder.tracker.live_nbytes)
                good = torch.equal(y, torch.ones(3).exp()) and after == before and not recorder.is_recording
            except BaseException:
                good = False
            os._exit(0 if good else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        weight.exp()
        assert recorder.num_ops == before[0] + 1


def test_compiled_model_is_compiled_and_seen(finish: Finish) -> None:
    import torch._dynamo

    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    batch = torch.ones(2, 4)
    plain = model(batch)
    with Recorder(model=model) as recorder:
        first = compiled(batch)
        second = compiled(batch)
        second.sum().backward()
    trace = finish(recorder)
    assert torch.equal(first, plain)
    assert torch.equal(second, plain)
    assert len(graphs) == 1, "one graph, not broken by anything of ours"
    assert trace.num_events > 0
    torch._dynamo.reset()


def test_functional_transforms_without_saved_tensors(finish: Finish) -> None:
    with Recorder(saved_tensors=False) as recorder:
        gradient = torch.func.grad(lambda a: (a * a).sum())(torch.ones(3))
    assert torch.equal(gradient, torch.full((3,), 2.0))
    assert finish(recorder).num_ops > 0
