"""Entering, leaving and what is left: the session takes everything along that it brought.

Covers the life of a session and of its store, backward passes across the end of the block, copies of the model, forked
children. Errors inside the block are ``test_interruptions``'s matter.
"""

from __future__ import annotations

import copy
import gc
import io
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import io_backend
import teraio


def _open(kit: Any, model: Any, optimizer: Any, **arguments: Any) -> teraio.Session:
    arguments = {"budget": "1GiB", "config": teraio.Config(min_nbytes=kit.MIN_NBYTES), **arguments}
    return teraio.offload(model, optimizer, **arguments)


def _io_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("teraio-io")}


def _loss(model: torch.nn.Module) -> torch.Tensor:
    return model(torch.randn(128, 32)).square().mean()


# --- entering ---------------------------------------------------------------------------------------------------------


def test_offload_activates_nothing(kit: Any) -> None:
    model, optimizer, _ = kit.training(kit.chain())
    before, threads = kit.traces_left([model], [optimizer]), _io_threads()
    session = _open(kit, model, optimizer)
    assert kit.traces_left([model], [optimizer]) == before
    assert _io_threads() <= threads
    assert session.last_step is None
    assert session.trace is None
    assert session.plan is None


def test_a_session_is_entered_once(kit: Any) -> None:
    model, optimizer, step = kit.training(kit.chain())
    session = _open(kit, model, optimizer)
    with session:
        step(0)
        with pytest.raises(teraio.ConfigError, match="entered before"):
            session.__enter__()
        step(1)
    with pytest.raises(teraio.ConfigError, match="entered before"):
        session.__enter__()


def test_a_spill_directory_that_cannot_be_used_starts_nothing(kit: Any, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    model, optimizer, step = kit.training(kit.chain())
    before, threads = kit.traces_left([model], [optimizer]), _io_threads()
    session = _open(kit, model, optimizer, spill=tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    (tmp_path / "gone").write_text("in the way")
    with pytest.raises(io_backend.SpillDirectoryError):
        session.__enter__()
    assert kit.traces_left([model], [optimizer]) == before
    assert _io_threads() <= threads
    step(0)


def test_a_model_or_optimizer_is_in_one_session_at_a_time(kit: Any) -> None:
    model, optimizer, step = kit.training(kit.chain())
    with _open(kit, model, optimizer):
        for second in (_open(kit, model, None), _open(kit, kit.chain(), optimizer)):
            with pytest.raises(teraio.ConfigError, match="another teraio session"):
                second.__enter__()
        step(0)
    with _open(kit, model, optimizer):
        step(1)


def test_hooks_that_cannot_be_installed_start_nothing(kit: Any) -> None:
    model, optimizer, step = kit.training(kit.chain())
    before, threads = kit.traces_left([model], [optimizer]), _io_threads()
    session = _open(kit, model, optimizer)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"), pytest.raises(RuntimeError, match="not here"):
        session.__enter__()
    assert kit.traces_left([model], [optimizer]) == before
    del session
    gc.collect()
    assert _io_threads() <= threads
    step(0)


@pytest.mark.parametrize("backend", ["auto", "posix"])
def test_backends(kit: Any, backend: str) -> None:
    outcome = kit.run(lambda: kit.training(kit.chain()), backend=backend, policy="evict_all")
    assert set(outcome.report.paths) <= {"posix-direct", "posix-buffered"}
    assert sum(outcome.report.paths.values()) == outcome.report.written_nbytes + outcome.report.read_nbytes > 0


def test_gpu_transport_where_there_is_none(kit: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    model, optimizer, _ = kit.training(kit.chain())
    before = kit.traces_left([model], [optimizer])
    with pytest.raises(io_backend.BackendUnavailableError), _open(kit, model, optimizer, backend="kvikio"):
        pass
    assert kit.traces_left([model], [optimizer]) == before
    refused = (io_backend.BackendUnavailableError, teraio.ConfigError)
    with pytest.raises(refused), _open(kit, model, optimizer, config=teraio.Config(require_gds=True)):
        pass
    assert kit.traces_left([model], [optimizer]) == before


# --- leaving ----------------------------------------------------------------------------------------------------------


def test_everything_is_gone_after_the_block(kit: Any) -> None:
    model, optimizer, step = kit.training(kit.chain())
    before, threads = kit.traces_left([model], [optimizer]), _io_threads()
    for steps in (0, 1, 2, 4):
        with _open(kit, model, optimizer) as session:
            if steps:
                assert kit.traces_left([model], [optimizer]) != before
            for i in range(steps):
                step(i)
            if steps == 4:
                model(torch.randn(128, 32))  # an iteration that has begun
        assert kit.traces_left([model], [optimizer]) == before
        assert _io_threads() <= threads
        assert session.report().iterations == steps
        step(9)


def test_two_sessions_one_after_the_other(kit: Any) -> None:
    def make() -> Any:
        return kit.training(kit.chain())

    plain = kit.run_plain(make, 8)
    torch.manual_seed(0)
    model, optimizer, step = make()
    log = []
    for half in (range(4), range(4, 8)):
        with _open(kit, model, optimizer, policy="evict_all") as session:
            log += [[kit.fingerprint(step(i)), kit.state_fingerprint([model], [optimizer])] for i in half]
        assert session.report().iterations == 4
        assert session.report().written_nbytes > 0
    assert log == plain.log


def test_two_sessions_at_once_with_a_model_each(kit: Any) -> None:
    # The one entered last has the hooks; both must leave cleanly.
    a, oa, step_a = kit.training(kit.chain(3))
    b, ob, step_b = kit.training(kit.chain(3))
    before = kit.traces_left([a, b], [oa, ob])
    with _open(kit, a, oa), _open(kit, b, ob):
        for i in range(4):
            step_a(i)
            step_b(i)
    assert kit.traces_left([a, b], [oa, ob]) == before


@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("drop", ["session kept", "session dropped"])
def test_backward_after_the_block(kit: Any, steps: int, drop: str) -> None:
    def make() -> Any:
        return kit.training(kit.chain())

    torch.manual_seed(0)
    model, _, step = make()
    for i in range(steps):
        step(i)
    _loss(model).backward()
    expected = [kit.digest(p.grad) for p in model.parameters()]

    torch.manual_seed(0)
    threads = _io_threads()
    model, optimizer, step = make()
    session = _open(kit, model, optimizer, policy="evict_all")
    with session:
        for i in range(steps):
            step(i)
        loss = _loss(model)
        engine = session._engine
        with engine.lock:
            for record in engine.all_records():
                engine.start_offload(record, release=True)
            kit.settle(session)
            record = None
            assert any(record.storage is None for record in engine.all_records())
    engine = weakref.ref(engine)
    report = session.report()
    if drop == "session dropped":
        del session
    gc.collect()
    assert engine() is not None  # the saved tensors need it
    loss.backward(retain_graph=True)
    assert [kit.digest(p.grad) for p in model.parameters()] == expected
    optimizer.zero_grad()
    loss.backward()
    assert [kit.digest(p.grad) for p in model.parameters()] == expected
    del loss
    gc.collect()
    for thread in _io_threads() - threads:
        thread.join(5)
    assert _io_threads() <= threads  # the store went with the last saved tensor, whoever holds the session
    assert engine() is None
    assert report.iterations == steps


def test_close_inside_the_block_and_twice(kit: Any) -> None:
    model, optimizer, step = kit.training(kit.chain())
    before = kit.traces_left([model], [optimizer])
    with _open(kit, model, optimizer) as session:
        for i in range(3):
            step(i)
        loss = _loss(model)
        session.close()
        assert kit.traces_left([model], [optimizer]) == before
        session.close()
        loss.backward()
        step(3)  # plain from here on
    assert session.report().iterations == 3
    for call in (session.step, lambda: session.set_budget("1GiB")):
        with pytest.raises(teraio.ConfigError, match="inside the with block"):
            call()


# --- copies of the model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 3])
def test_a_copy_of_the_model_made_inside(kit: Any, steps: int) -> None:
    # As averaging of weights makes it. The copy is nobody's business.
    model, optimizer, step = kit.training(kit.chain())
    with _open(kit, model, optimizer) as session:
        for i in range(steps):
            step(i)
        twin = copy.deepcopy(model)
        averaged = torch.optim.swa_utils.AveragedModel(model)
        averaged.update_parameters(model)
        with torch.no_grad():
            assert torch.equal(twin(torch.ones(1, 32)), model(torch.ones(1, 32)))
        for i in range(2):
            step(i)
    assert session.report().iterations == steps + 2
    twin(torch.randn(128, 32)).sum().backward()


def test_a_copy_of_the_model_made_while_recording(kit: Any) -> None:
    model, optimizer, _ = kit.training(kit.chain())
    with _open(kit, model, optimizer):
        loss = _loss(model)
        twin = copy.deepcopy(model)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        twin(torch.ones(1, 32))


def test_the_model_can_be_saved_whole_inside(kit: Any) -> None:
    model, optimizer = nn.Sequential(nn.Linear(32, 32), nn.Tanh()), None
    optimizer = torch.optim.Adam(model.parameters())
    with _open(kit, model, optimizer):
        _loss(model).backward()
        optimizer.step()
        content = io.BytesIO()
        torch.save([model, optimizer.state_dict()], content)
    content.seek(0)
    loaded, _ = torch.load(content, weights_only=False)
    assert torch.equal(loaded[0].weight, model[0].weight)


def test_save_writes_the_state(kit: Any, tmp_path: Path) -> None:
    model, optimizer, step = kit.training(kit.chain())
    with _open(kit, model, optimizer) as session:
        for i in range(3):
            step(i)
        with session.materialize():
            session.save(tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt")
        expected = [kit.fingerprint(model.state_dict()), kit.fingerprint(optimizer.state_dict())]
    assert [kit.fingerprint(state["model"][0]), kit.fingerprint(state["optimizer"][0])] == expected


# --- children ---------------------------------------------------------------------------------------------------------


def _in_a_child(work: Any) -> None:
    """Run `work` in a forked child and see that it ended well; it must not hang either."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    watchdog = threading.Timer(30, os.kill, (pid, 9))
    watchdog.start()
    try:
        _, status = os.waitpid(pid, 0)
    finally:
        watchdog.cancel()
        watchdog.join()
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("steps", [0, 1, 4], ids=["new", "learning", "planned"])
@pytest.mark.parametrize("mid_forward", [False, True])
def test_a_forked_child_does_not_touch_the_store(kit: Any, steps: int, mid_forward: bool) -> None:
    # A DataLoader worker inherits hooks and modes; it works on tensors as if there were no session.
    children = []

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(m.layers):
            x = torch.tanh(layer(x))
            if i == 3 and children:
                children.pop()()
        return x

    def make() -> Any:
        return kit.training(kit.Built(forward, layers=nn.ModuleList(nn.Linear(32, 32) for _ in range(6))))

    plain = kit.run_plain(make, steps + 2)
    torch.manual_seed(0)
    model, optimizer, step = make()
    with _open(kit, model, optimizer, policy="evict_all") as session:
        log = [[kit.fingerprint(step(i)), kit.state_fingerprint([model], [optimizer])] for i in range(steps)]
        kit.settle(session)
        idle = session._engine.store.statistics()

        def child() -> None:
            torch.manual_seed(1)
            other = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
            for worker in (other, model):
                loss = worker(torch.randn(128, 32)).square().mean()
                loss.backward()
            gradient = model.layers[0].weight.grad
            assert gradient is not None
            optimizer.step()
            optimizer.zero_grad()

        if mid_forward:
            children.append(lambda: _in_a_child(child))
        else:
            _in_a_child(child)
            assert session._engine.store.statistics() == idle
        log += [
            [kit.fingerprint(step(i)), kit.state_fingerprint([model], [optimizer])] for i in range(steps, steps + 2)
        ]
        assert log == plain.log
        assert kit.settle(session) == (0, 0)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_data_loader_workers(kit: Any) -> None:
    class Batches(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int) -> torch.Tensor:
            return torch.tanh(torch.full((128, 32), i / 8).requires_grad_()).exp().detach()

    def make() -> Any:
        model, optimizer, _ = kit.training(kit.chain())
        loader = torch.utils.data.DataLoader(Batches(), batch_size=None, num_workers=1, multiprocessing_context="fork")

        def step(i: int) -> object:
            losses = []
            for batch in loader:
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            return losses

        return model, optimizer, step

    plain = kit.run_plain(make, 2)
    outcome = kit.run(make, steps=2, policy="evict_all")
    outcome.assert_same_bits(plain)
    assert outcome.report.iterations == 8
