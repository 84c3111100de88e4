"""Transfers that are late, fail, never end or lie: training goes on with the right bits, or says what is wrong.

Covers faults of the store under a whole session. The store's own behaviour is tested in ``tests/io_backend``. Time is
made by events: a transfer is held until the test lets it go.
"""

from __future__ import annotations

import ctypes
import errno
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import teraio
from io_backend.testing import Fault, FaultStore, fail, hold


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Holds transfers until it is set; set at the end in any case."""
    event = threading.Event()
    yield event
    event.set()


def _make(kit: Any) -> Callable[[], Any]:
    return lambda: kit.training(kit.chain())


def _tight(kit: Any, make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """A budget of the usual kind; measured with a store of its own."""
    with monkeypatch.context() as patch:
        patch.undo()
        return kit.tight_budget(kit.run(make, policy="evict_all"), share=0.3)


# --- late writes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_held", [0, 3])
def test_backward_races_a_slow_write(kit: Any, faults: FaultStore, gate: threading.Event, step_held: int) -> None:
    make = _make(kit)
    plain = kit.run_plain(make, 5)
    reached = threading.Event()
    written = []

    def race(session: Any, i: int) -> None:
        if i == step_held:
            kit.settle(session)
            written.append(faults.statistics().num_writes)
            faults.add(Fault("write", hold(gate, reached)))
        elif i == step_held + 1:
            # The whole step ran beside one write that does not move, and never waited for it. The others, behind it in
            # the queue, were taken back when backward came for their tensors.
            assert reached.is_set()
            assert not gate.is_set()
            assert faults.statistics().num_writes == written[0]
            assert faults.statistics().read_nbytes == reads[-1]
            faults.clear()
            gate.set()
            kit.settle(session)
            assert faults.statistics().num_writes == written[0] + 1
        reads.append(faults.statistics().read_nbytes)

    reads: list[int] = []
    outcome = kit.run(make, policy="evict_all", use_session=race)
    outcome.assert_same_bits(plain)
    assert outcome.report.read_nbytes > 0 or step_held == 0


def test_a_queued_write_of_a_dead_tensor_is_cancelled(kit: Any, faults: FaultStore, gate: threading.Event) -> None:
    model, optimizer, step = kit.training(kit.chain())
    reached = threading.Event()
    faults.add(Fault("write", hold(gate, reached)))

    def drop(session: Any, i: int) -> None:
        if i:
            return
        loss = model(torch.randn(128, 32)).square().mean()
        assert reached.wait(10)
        queued = faults.statistics().queued
        assert queued > 0
        del loss
        with session._engine.lock:
            session._engine.tidy()
        assert session._engine.num_records == 0
        assert faults.statistics().queued == 0
        gate.set()
        assert kit.settle(session) == (0, 0)
        assert faults.statistics().num_writes == 1

    kit.run(lambda: (model, optimizer, step), policy="evict_all", use_session=drop)


def test_memory_of_a_running_write_counts_until_it_ends(kit: Any, faults: FaultStore, gate: threading.Event) -> None:
    model, optimizer, step = kit.training(kit.chain())
    reached = threading.Event()
    faults.add(Fault("write", hold(gate, reached), index=0))

    def drop(session: Any, i: int) -> None:
        if i:
            return
        loss = model(torch.randn(128, 32)).square().mean()
        assert reached.wait(10)
        engine = session._engine
        del loss
        with engine.lock:
            engine.tidy()
            assert engine.resident_nbytes(0) == 128 * 32 * 4
        gate.set()
        kit.settle(session)
        with engine.lock:
            assert engine.resident_nbytes(0) == engine.pool.total_nbytes

    kit.run(lambda: (model, optimizer, step), policy="evict_all", use_session=drop)


# --- failing writes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["write", "allocate"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_writes_that_fail_leave_the_tensor_in_memory(kit: Any, faults: FaultStore, operation: Any, code: int) -> None:
    make = _make(kit)
    plain = kit.run_plain(make, 5)
    faults.add(Fault(operation, fail(code)))
    outcome = kit.run(make, policy="evict_all")
    outcome.assert_same_bits(plain)
    assert outcome.report.written_nbytes == 0
    assert any("write" in event and "failed" in event for event in outcome.report.events)


def test_one_write_that_fails_under_a_tight_budget(
    kit: Any, faults: FaultStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = _make(kit)
    plain = kit.run_plain(make, 6)
    budget = _tight(kit, make, monkeypatch) + 48 * kit.KIB
    monkeypatch.setattr("teraio.session.open_store", lambda *_, **__: faults)
    for index in (1, 8, 15):  # while learning, and while planned
        faults.add(Fault("write", fail(errno.EIO), index=index))
    outcome = kit.run(make, budget=budget, steps=6)
    outcome.assert_same_bits(plain)
    assert outcome.report.written_nbytes > 0
    assert any("failed" in event for event in outcome.report.events)


def test_no_room_and_no_write_says_both(kit: Any, faults: FaultStore, monkeypatch: pytest.MonkeyPatch) -> None:
    make = _make(kit)
    plain = kit.run_plain(make, 3)
    budget = _tight(kit, make, monkeypatch)
    monkeypatch.setattr("teraio.session.open_store", lambda *_, **__: faults)
    faults.add(Fault("write", fail(errno.ENOSPC)))
    torch.manual_seed(0)
    model, optimizer, step = make()
    generator = torch.get_rng_state()
    session = teraio.offload(model, optimizer, budget=budget, config=teraio.Config(min_nbytes=kit.MIN_NBYTES))
    with session, pytest.raises(teraio.OffloadError, match=r"budget of .* too small.*failed before"):
        step(0)
    # Nothing was lost: the model trains on without a limit, from where it was.
    torch.set_rng_state(generator)
    optimizer.zero_grad()
    log = [[kit.fingerprint(step(i)), kit.state_fingerprint([model], [optimizer])] for i in range(3)]
    assert log == plain.log


# --- failing reads ----------------------------------------------------------------------------------------------------


class _Evicted:
    """A loss whose saved tensors are on the SSD, in a session that is learning (no steps before) or follows a plan."""

    def __init__(self, kit: Any, faults: FaultStore, steps: int, **config: Any) -> None:
        self.kit, self.faults = kit, faults
        torch.manual_seed(0)
        self.model, self.optimizer, self.step = kit.training(kit.chain())
        settings = teraio.Config(min_nbytes=kit.MIN_NBYTES, **config.pop("config", {}))
        self.session = teraio.offload(
            self.model, self.optimizer, budget="1GiB", policy="evict_all", config=settings, **config
        )
        self.steps = steps

    def __enter__(self) -> _Evicted:
        self.session.__enter__()
        for i in range(self.steps):
            self.step(i)
        self.loss = self.model(torch.randn(128, 32)).square().mean()
        engine = self.session._engine
        with engine.lock:
            for record in engine.all_records():
                engine.start_offload(record, release=True)
        self.kit.settle(self.session)
        assert any(record.storage is None for record in engine.all_records())
        return self

    def __exit__(self, *_: object) -> None:
        self.optimizer.zero_grad()
        del self.loss
        assert self.kit.settle(self.session) == (0, 0)
        self.session.close()

    def expected(self) -> list[object]:
        """Gradients of a plain run of the same."""
        torch.manual_seed(0)
        model, _, step = self.kit.training(self.kit.chain())
        for i in range(self.steps):
            step(i)
        model(torch.randn(128, 32)).square().mean().backward()
        return [self.kit.digest(p.grad) for p in model.parameters()]

    def gradients(self) -> list[object]:
        self.optimizer.zero_grad()
        self.loss.backward(retain_graph=True)
        return [self.kit.digest(p.grad) for p in self.model.parameters()]


@pytest.mark.parametrize("steps", [0, 3])
def test_a_read_that_fails_keeps_the_bytes(kit: Any, faults: FaultStore, steps: int) -> None:
    with _Evicted(kit, faults, steps) as evicted:
        faults.add(Fault("read", fail(errno.EIO)))
        for _ in range(2):
            with pytest.raises(teraio.OffloadError, match=r"#\d+ \(16384 bytes of float32.*stays on the SSD"):
                evicted.loss.backward(retain_graph=True)
        faults.clear()
        assert evicted.gradients() == evicted.expected()
        assert evicted.gradients() == evicted.expected()


@pytest.mark.parametrize("steps", [0, 3])
def test_a_read_that_does_not_end_is_an_error_and_no_hang(
    kit: Any, faults: FaultStore, gate: threading.Event, steps: int
) -> None:
    with _Evicted(kit, faults, steps, config={"io_timeout_s": 0.2}) as evicted:
        faults.add(Fault("read", hold(gate)))
        with pytest.raises(teraio.OffloadTimeout, match=r"saved storage #\d+ .*0\.2 s"):
            evicted.loss.backward(retain_graph=True)
        faults.clear()
        gate.set()
        assert evicted.gradients() == evicted.expected()


@pytest.mark.parametrize("steps", [0, 3])
def test_verify_finds_a_changed_byte(kit: Any, faults: FaultStore, steps: int) -> None:
    flipped = []

    def flip(operation: str, extent: Any) -> None:
        address = faults.inner._contents[extent.serial].address + 5  # type: ignore[attr-defined]
        ctypes.memset(address, ctypes.string_at(address, 1)[0] ^ 16, 1)
        flipped.append(address)

    with _Evicted(kit, faults, steps, verify=True) as evicted:
        faults.add(Fault("read", flip))
        with pytest.raises(teraio.OffloadError, match=r"saved storage #\d+ .*not what was written"):
            evicted.loss.backward(retain_graph=True)
        faults.clear()
        kit.settle(evicted.session)
        for address in flipped:
            ctypes.memset(address, ctypes.string_at(address, 1)[0] ^ 16, 1)
        assert evicted.gradients() == evicted.expected()


def test_verify_has_nothing_to_say_otherwise(kit: Any) -> None:
    kit.compare(_make(kit), verify=True)


def test_a_read_cut_short_by_ctrl_c(kit: Any, faults: FaultStore, gate: threading.Event, monkeypatch: Any) -> None:
    with _Evicted(kit, faults, 0) as evicted:
        engine = evicted.session._engine
        with monkeypatch.context() as patch:

            def interrupted(*_: object) -> None:
                raise KeyboardInterrupt

            patch.setattr("io_backend.queued_ticket.QueuedTicket.wait", interrupted)
            faults.add(Fault("read", hold(gate)))
            with pytest.raises(KeyboardInterrupt):
                evicted.loss.backward(retain_graph=True)
        assert engine.num_records > 0
        faults.clear()
        gate.set()
        assert evicted.gradients() == evicted.expected()


# --- leaving ----------------------------------------------------------------------------------------------------------


def test_leaving_while_a_write_does_not_end(kit: Any, faults: FaultStore, gate: threading.Event) -> None:
    model, optimizer, _ = kit.training(kit.chain())
    before = kit.traces_left([model], [optimizer])
    faults.add(Fault("write", hold(gate)))
    config = teraio.Config(min_nbytes=kit.MIN_NBYTES, io_timeout_s=0.2)
    session = teraio.offload(model, optimizer, budget="1GiB", policy="evict_all", config=config)
    with pytest.raises((teraio.OffloadTimeout, TimeoutError)), session:
        loss = model(torch.randn(128, 32)).square().mean()
    assert kit.traces_left([model], [optimizer]) == before
    del loss
    gate.set()
    session.close()  # now it can
    with pytest.raises(OSError, match="closed"):
        faults.allocate(1)


def test_leaving_while_a_write_does_not_end_keeps_the_programs_own_exception(
    kit: Any, faults: FaultStore, gate: threading.Event
) -> None:
    model, optimizer, _ = kit.training(kit.chain())
    faults.add(Fault("write", hold(gate)))
    config = teraio.Config(min_nbytes=kit.MIN_NBYTES, io_timeout_s=0.2)
    session = teraio.offload(model, optimizer, budget="1GiB", policy="evict_all", config=config)
    losses = []
    with pytest.raises(KeyError, match="mine"), session:  # noqa: PT012
        losses.append(model(torch.randn(128, 32)).square().mean())
        raise KeyError("mine")
    losses.clear()
    gate.set()
