"""The command's exit codes, and that a user's mistake is one line on stderr.

Covers parsing and error mapping. Does not cover what the subcommands do: their own tests do.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from tools import cli
from tools.demo import command as demo
from tools.errors import CommandError, UsageError


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "COMMAND"),
        (["nope"], "nope"),
        (["demo", "--steps", "0"], "--steps"),
        (["demo", "--layers", "two"], "'two'"),
        (["demo", "--width", "100"], "multiple of 64, got 100"),
        (["demo", "--device", "tpu"], "tpu"),
        (["demo", "--mode", "fast"], "fast"),
        (["demo", "--mode", "plain", "--budget", "1GiB"], "--budget"),
        (["demo", "--json", "/no/such/directory/result.json"], "/no/such/directory"),
        (["demo", "--what"], "--what"),
        (["bench"], "BENCHMARK"),
        (["bench", "io"], "DIR"),
        (["bench", "io", "/no/such/directory"], "/no/such/directory"),
        (["bench", "io", ".", "--rounds", "0"], "--rounds"),
        (["bench", "io", ".", "--json", "/no/such/directory/result.json"], "/no/such/directory"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("teraio")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert expected in err


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["demo", "--help"],
        ["doctor", "--help"],
        ["clean", "--help"],
        ["bench", "io", "--help"],
        ["--version"],
    ],
)
def test_asking_for_help_succeeds(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 0
    assert "teraio" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code"), [(CommandError("went wrong"), 1), (UsageError("went wrong"), 2), (KeyboardInterrupt(), 130)]
)
def test_errors_become_exit_codes(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(demo, "run", fail)
    assert cli.main(["demo"]) == code
    assert capsys.readouterr().err.count("\n") == 1


def test_the_command_itself_loads_neither_torch_nor_teraio() -> None:
    code = (
        "import sys, tools.cli; tools.cli.main(['demo', '--help']); tools.cli.main(['bench', 'io', '--help']); "
        "assert not {'torch', 'teraio', 'lifetime', 'io_backend'} & set(sys.modules), 'loaded'"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr


def test_python_m_tools_is_the_command() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tools", "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0
    assert ended.stdout.startswith("teraio ")
