"""Workers that cannot start, die or fall silent, and contenders that are missing.

Covers the parent's side. A worker that measures is in ``test_bench_runs``.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from tools.bench import lineup, worker_process
from tools.bench.contender import ContenderError
from tools.bench.worker_process import WorkerProcess


def start(tmp_path: Path, *arguments: str, interpreter: str = sys.executable) -> WorkerProcess:
    return WorkerProcess(
        "worker", "peer", arguments, interpreter=interpreter, environment=os.environ, directory=tmp_path
    )


def stand_in(tmp_path: Path, script: str) -> str:
    """A program that takes an interpreter's place."""
    program = tmp_path / "stand-in"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o700)
    return str(program)


def test_no_interpreter(tmp_path: Path) -> None:
    with pytest.raises(ContenderError, match="cannot start /no/such/python"):
        start(tmp_path, "teraio", str(tmp_path), "huge", interpreter="/no/such/python")


def test_interpreter_that_dies_is_quoted(tmp_path: Path) -> None:
    program = stand_in(tmp_path, "echo not today >&2; exit 4")
    with pytest.raises(ContenderError, match="status 4: not today"):
        start(tmp_path, "teraio", interpreter=program)


def test_interpreter_that_falls_silent_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "OPENING_LIMIT_S", 0.05)
    with pytest.raises(ContenderError, match="did not answer"):
        start(tmp_path, "teraio", interpreter=stand_in(tmp_path, "exec cat"))


@pytest.mark.parametrize(("library", "options"), [("deepspeed", ["locked"]), ("tensornvme", [])])
def test_library_that_is_not_there(tmp_path: Path, library: str, options: list[str]) -> None:
    if importlib.util.find_spec(library) is not None:
        pytest.skip(f"{library} is installed here")
    with pytest.raises(ContenderError, match=f"ModuleNotFoundError: No module named '{library}"):
        start(tmp_path, library, str(tmp_path), *options)


def test_worker_that_died_meanwhile_is_an_error_each_time(tmp_path: Path) -> None:
    # Answers once, as if open, and leaves.
    worker = start(tmp_path, interpreter=stand_in(tmp_path, 'echo \'{"description": "brief"}\'; exit 5'))
    assert worker.description == "brief"
    for _ in range(2):
        with pytest.raises(ContenderError, match="ended"):
            worker.release()
    worker.close()
    worker.close()


def test_worker_that_fell_silent_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A late answer would be taken for that of the next command.
    monkeypatch.setattr(worker_process, "ANSWER_LIMIT_S", 0.05)
    worker = start(tmp_path, interpreter=stand_in(tmp_path, 'echo \'{"description": ""}\'; exec cat 3>&1 >/dev/null'))
    with pytest.raises(ContenderError, match="did not answer"):
        worker.release()
    with pytest.raises(ContenderError, match="ended"):
        worker.release()
    worker.close()


def test_missing_contenders_become_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineup.shutil, "which", lambda name: None)
    monkeypatch.setattr(lineup, "TERAIO", ())
    opening: list[str] = []
    with lineup.open_lineup(
        tmp_path, deepspeed=None, tensornvme="/no/such/python", on_opening=opening.append
    ) as opened:
        assert opened.contenders == []
        reasons = {missing.name: missing.reason for missing in opened.missing}
    assert list(reasons) == opening
    assert "not installed" in reasons["fio libaio"]
    assert "not installed" in reasons["fio io_uring"]
    assert "--deepspeed" in reasons["DeepSpeed, locked tensors"]
    assert "--deepspeed" in reasons["DeepSpeed, ordinary tensors"]
    assert reasons["tensornvme"] == "cannot start /no/such/python: No such file or directory"
