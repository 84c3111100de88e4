"""The parent's side of a worker: what it records, and what it says when the worker does not live to the end.

The workers here are small programs that speak the worker's protocol; ``test_demo_runs`` runs the real one.
"""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

import pytest

from tools.demo import worker_process
from tools.demo.spec import SegmentSpec
from tools.demo.worker_process import SegmentRecord, run_worker
from tools.errors import CommandError, UsageError

PROLOGUE = """
import json, os, signal, sys, time
def emit(event, **values):
    print(json.dumps({"event": event, **values}), flush=True)
def baseline():
    emit("baseline", rss_nbytes=1000, budget_nbytes=None, torch="2", threads=1)
def step(index, measuring=False):
    emit("step", step=index, loss=float(index).hex(), step_s=0.5, measuring=measuring)
"""

SPEC = SegmentSpec(mode="teraio", steps=3, measuring_steps=1)


def run_program(body: str, on_step: worker_process.OnStep = lambda spec, num_done, step_s: None) -> SegmentRecord:
    """Run ``body`` as the worker of ``SPEC``."""
    return run_worker(SPEC, on_step, argv=[sys.executable, "-c", PROLOGUE + textwrap.dedent(body)])


def test_a_record_holds_what_the_worker_reported() -> None:
    steps: list[tuple[int, float]] = []
    record = run_program(
        """
        baseline()
        ballast = bytearray(os.urandom(1)) * (64 << 20)
        for index in range(3):
            step(index)
        time.sleep(0.1)
        emit("trained", device_peak_nbytes=None)
        step(3, measuring=True)
        emit("done", weights_sha256="ab", peak_nbytes=7, session_peak_nbytes=8, report={"paths": {}})
        """,
        lambda spec, num_done, step_s: steps.append((num_done, step_s)),
    )
    assert record.losses == [float(index).hex() for index in range(3)]
    assert record.step_times_s == [0.5] * 3
    assert steps == [(1, 0.5), (2, 0.5), (3, 0.5), (4, 0.5)]
    assert (record.weights_sha256, record.peak_nbytes, record.session_peak_nbytes) == ("ab", 7, 8)
    assert record.rss_baseline_nbytes == 1000
    assert record.rss_peak_nbytes > 64 << 20


def test_memory_counts_only_while_training() -> None:
    record = run_program(
        """
        baseline()
        emit("trained", device_peak_nbytes=None)
        time.sleep(0.1)
        ballast = bytearray(os.urandom(1)) * (256 << 20)
        time.sleep(0.1)
        emit("done", weights_sha256="", peak_nbytes=None, session_peak_nbytes=None, report=None)
        """
    )
    assert record.rss_peak_nbytes < 256 << 20


def test_a_killed_worker_is_explained() -> None:
    with pytest.raises(CommandError) as caught:
        run_program("baseline(); step(0); os.kill(os.getpid(), signal.SIGKILL)")
    assert "teraio mode, step 2 of 4" in str(caught.value)
    assert "SIGKILL" in str(caught.value)
    assert "memory limit" in str(caught.value)
    assert caught.value.exit_code == 1


def test_a_worker_killed_at_its_start_is_explained() -> None:
    with pytest.raises(CommandError, match=r"before the first step: the worker was killed by SIGTERM$"):
        run_program("os.kill(os.getpid(), signal.SIGTERM)")


def test_a_worker_that_raises_shows_its_last_words() -> None:
    with pytest.raises(CommandError, match=r"step 1 of 4: the worker ended with exit code 1(.|\n)*ZeroDivisionError"):
        run_program("baseline(); 1 / 0")


@pytest.mark.parametrize(("usage", "kind"), [(True, UsageError), (False, CommandError)])
def test_a_reported_error_is_raised_with_its_kind(usage: bool, kind: type[CommandError]) -> None:
    with pytest.raises(CommandError, match="no such budget") as caught:
        run_program(f"emit('error', message='no such budget', usage={usage})")
    assert type(caught.value) is kind


def test_a_silent_worker_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(worker_process, "SILENCE_LIMIT_S", 0.2)
    monkeypatch.setattr(worker_process, "GRACE_S", 0.2)
    pid_file = tmp_path / "pid"
    with pytest.raises(CommandError, match=r"step 2 of 4: the worker reported nothing"):
        run_program(
            f"""
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            open({str(pid_file)!r}, "w").write(str(os.getpid()))
            baseline()
            step(0)
            time.sleep(600)
            """
        )
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_an_interrupt_ends_the_worker_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "GRACE_S", 5.0)

    def interrupt(spec: SegmentSpec, num_done: int, step_s: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_program("baseline(); step(0)\nwhile True: time.sleep(0.01); step(1)", interrupt)


def test_a_spec_survives_the_command_line() -> None:
    spec = SegmentSpec(mode="plain", steps=5, budget="600MiB", spill="/a b", exact_malloc=True)
    assert SegmentSpec.from_json(spec.to_json()) == spec


def test_the_environment_is_the_same_for_every_mode_but_for_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    environment = worker_process.worker_environment()
    root = str(Path(worker_process.__file__).parents[2])
    assert environment == {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}/somewhere"}
