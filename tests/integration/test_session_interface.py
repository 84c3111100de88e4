"""What a session tells: steps, trace, plan, report; and manual boundaries.

Covers the public interface of a running and of a finished session. Arguments are ``tests/teraio``'s matter.
"""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import lifetime
import teraio


def test_manual_boundaries(kit: Any) -> None:
    def make() -> Any:
        model, optimizer, _ = kit.training(kit.chain())

        def step(i: int) -> object:
            for _ in range(2):  # two optimizer steps make one iteration
                loss = model(torch.randn(128, 32)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        return model, optimizer, step

    plain = kit.run_plain(make, 7)
    torch.manual_seed(0)
    model, optimizer, step = make()
    config = teraio.Config(min_nbytes=kit.MIN_NBYTES)
    log, planned = [], []
    with teraio.offload(model, optimizer, budget="1GiB", policy="evict_all", config=config) as session:
        session.step()  # once used, nothing else ends an iteration
        for i in range(7):
            log.append([kit.fingerprint(step(i)), kit.state_fingerprint([model], [optimizer])])
            session.step()
            planned.append(session.last_step.planned)
        session.step()  # nothing has happened: no iteration
    assert log == plain.log
    assert session.report().iterations == 7
    assert planned == [False, False] + [True] * 5


def test_steps_are_told_and_kept(kit: Any) -> None:
    told: list[tuple[str, Any]] = []

    def look(session: Any, i: int) -> None:
        if i == 0:
            assert session.last_step is None
            assert session.trace is None
            assert session.plan is None
            session.on_step(lambda step: told.append((threading.current_thread().name, step)))
        else:
            assert session.last_step is told[-1][1]
            assert len(told) == i
        if i >= 2:
            assert isinstance(session.trace, lifetime.Trace)
            assert isinstance(session.plan, teraio.Plan)

    outcome = kit.run(lambda: kit.training(kit.chain()), policy="evict_all", use_session=look)
    assert [step for _, step in told] == outcome.steps
    assert {name for name, _ in told} == {"MainThread"}
    assert sum(step.written_nbytes for step in outcome.steps) <= outcome.report.written_nbytes
    assert sum(step.read_nbytes for step in outcome.steps) == outcome.report.read_nbytes
    for step in outcome.steps:
        assert step.step_s > 0
        assert step.stall_s >= 0
    # After the block they are all still there.
    session = outcome.session
    assert session.last_step is outcome.steps[-1]
    assert session.trace is not None
    assert session.plan is not None


def test_report(kit: Any) -> None:
    model, optimizer, step = kit.training(kit.chain())
    config = teraio.Config(min_nbytes=kit.MIN_NBYTES)
    session = teraio.offload(model, optimizer, budget="1GiB", policy="evict_all", config=config)
    with pytest.raises(teraio.ConfigError, match="not been entered"):
        session.report()
    with session:
        assert session.report().iterations == 0
        assert str(session.report())
        for i in range(5):
            step(i)
            assert session.report().iterations == i + 1
        kit.settle(session)
        inside = session.report()
    after = session.report()
    assert after == inside
    assert after is session.report()
    assert after.budget_nbytes == 1 << 30
    assert 0 < after.peak_nbytes <= after.unlimited_peak_nbytes * 1.5
    assert len(after.step_times_s) == 5
    assert 0 < after.fraction_of_ideal <= 1
    assert after.predicted_peak_nbytes > 0
    assert after.predicted_step_s > 0
    assert sum(after.paths.values()) == after.written_nbytes + after.read_nbytes
    values = json.loads(json.dumps(after.to_dict()))
    assert values["peak_nbytes"] == after.peak_nbytes
    assert set(values) >= {
        "iterations", "budget_nbytes", "peak_nbytes", "unlimited_peak_nbytes", "unseen_nbytes", "written_nbytes",
        "read_nbytes", "stall_s", "written_nbytes_per_step", "read_nbytes_per_step", "stall_s_per_step", "step_s",
        "step_times_s", "fraction_of_ideal", "predicted_step_s", "predicted_peak_nbytes", "paths", "skipped", "events",
    }  # fmt: skip
    text = str(after)
    for word in ("iterations", "budget", "1.00 GiB", "peak", "written", "read", "stall", "fraction of ideal"):
        assert word in text
    for event in after.events:
        assert event in text


def test_the_unlimited_peak_is_that_of_a_recording(kit: Any) -> None:
    def make() -> Any:
        return kit.training(kit.chain())

    torch.manual_seed(0)
    model, optimizer, step = make()
    peaks = []
    for i in range(3):
        with lifetime.Recorder(model=model, optimizer=optimizer) as recorder:
            step(i)
        peaks.append(recorder.trace.peak_nbytes)
    roomy = kit.run(make, policy="evict_all").report.unlimited_peak_nbytes
    budget = kit.tight_budget(kit.run(make, policy="evict_all"), share=0.3)
    tight = kit.run(make, budget=budget).report.unlimited_peak_nbytes
    assert roomy == tight
    # The recorder that runs alone sees the batch being made, too.
    assert abs(roomy - max(peaks)) <= 128 * 32 * 4


def test_a_plan_serves_the_next_run(kit: Any, tmp_path: Path) -> None:
    def make() -> Any:
        return kit.training(kit.chain())

    plain = kit.run_plain(make, 5)
    budget = kit.tight_budget(kit.run(make, policy="evict_all"), share=0.3)
    first = kit.run(make, budget=budget)
    path = tmp_path / "plan.json"
    first.session.plan.save(path)
    for policy in (path, str(path), teraio.Plan.load(path)):
        again = kit.run(make, budget=budget, policy=policy, config={"strict_plan": True})
        again.assert_same_bits(plain)
        assert again.session.plan == first.session.plan
        assert not any("new one was made" in event for event in again.report.events)
        assert sum(step.written_nbytes for step in again.planned) > 0
        assert again.report.peak_nbytes <= budget


def test_a_plan_for_something_else(kit: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    kit.run(lambda: kit.training(kit.chain(4)), policy="evict_all").session.plan.save(path)

    def make() -> Any:
        return kit.training(kit.chain(6))

    plain = kit.run_plain(make, 5)
    outcome = kit.run(make, policy=path)
    outcome.assert_same_bits(plain)
    assert any("new one was made" in event for event in outcome.report.events)
    with pytest.raises(teraio.PlanMismatchError):
        kit.run(make, policy=path, config={"strict_plan": True})


def test_a_trace_that_cannot_be_written_ends_no_training(kit: Any, tmp_path: Path) -> None:
    directory = tmp_path / "gone"
    directory.mkdir()
    model, optimizer, step = kit.training(kit.chain())
    config = teraio.Config(allow_unsafe_spill=True)
    with teraio.offload(model, optimizer, trace_to=directory / "run.trace", config=config) as session:
        directory.rmdir()
        for index in range(4):
            step(index)
    assert session.report().iterations == 4
    assert any("trace could not be written" in event for event in session.report().events)


def test_trace_to(kit: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.zip"
    seen = []

    def look(session: Any, i: int) -> None:
        seen.append(path.exists())

    outcome = kit.run(lambda: kit.training(kit.chain()), trace_to=path, use_session=look)
    assert seen == [False, False, True, True, True]
    trace = lifetime.Trace.load(path)
    assert trace.signature == outcome.session.trace.signature
    assert trace.num_ops > 0
    plan = teraio.plan(
        trace,
        budget=kit.tight_budget(kit.run(lambda: kit.training(kit.chain()), policy="evict_all"), share=0.3),
        min_nbytes=kit.MIN_NBYTES,
    )
    assert plan.signature == trace.signature


def test_work_in_another_thread_is_not_seen_and_said(kit: Any) -> None:
    model, optimizer, step = kit.training(kit.chain())
    config = teraio.Config(min_nbytes=kit.MIN_NBYTES)
    with teraio.offload(model, optimizer, budget="1GiB", config=config) as session:
        for i in range(2):
            worker = threading.Thread(target=step, args=(i,))
            worker.start()
            worker.join()
    assert any("thread that entered" in event for event in session.report().events)


def test_events_are_logged_once(kit: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "teraio")
    model = kit.chain(3)
    kit.run(lambda: kit.training(model, optimizer=torch.optim.SGD(model.parameters(), 0.1)))

    class Mine(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    caplog.clear()
    kit.run(lambda: kit.training(model, optimizer=Mine(model.parameters(), 0.1)))
    assert sum("Mine" in record.getMessage() for record in caplog.records) == 1


def test_a_callback_that_raises_leaves_the_session_usable(kit: Any) -> None:
    model, optimizer, step = kit.training(kit.chain())
    config = teraio.Config(min_nbytes=kit.MIN_NBYTES)
    with teraio.offload(model, optimizer, budget="1GiB", config=config) as session:
        fail = [True]

        def callback(_: object) -> None:
            if fail:
                fail.pop()
                raise ValueError("mine")

        session.on_step(callback)
        with pytest.raises(ValueError, match="mine"):
            step(0)
        optimizer.zero_grad()
        for i in range(4):
            step(i)
    assert session.report().iterations == 5


def test_wear_is_watched(kit: Any) -> None:
    make = lambda: kit.training(kit.chain())  # noqa: E731
    budget = kit.tight_budget(kit.run(make, policy="evict_all"), share=0.3)
    quiet = kit.run(make, budget=budget, config={"max_write_tb_per_day": 1000.0})
    assert not any("max_write_tb_per_day" in event for event in quiet.report.events)
    loud = kit.run(make, budget=budget, config={"max_write_tb_per_day": 1e-9})
    assert any("max_write_tb_per_day" in event for event in loud.report.events)
