"""``teraio clean``: what it says, its exit codes, its JSON. What is removed is tested with `io_backend.reclaim`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from io_backend import SpillDirectory
from tools import cli


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with a dead session, a folder that is nobody's session, and a file."""
    root = tmp_path / "root"
    (root / "teraio-42-333333333333").mkdir(parents=True)
    (root / "teraio-42-333333333333" / "spill-0123456789ab.bin").write_bytes(bytes(8192))
    (root / "teraio-notes").mkdir()
    (root / "data.bin").touch()
    return root


def test_removes_and_reports(root: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    alive = SpillDirectory.create(tmp_path / "other")
    assert cli.main(["clean", str(root), str(tmp_path / "other"), "--json", str(tmp_path / "out.json")]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    dead = root / "teraio-42-333333333333"
    assert f"removed {dead}: its process 42 has ended (8.00 KiB)" in out
    assert f"alive: {alive.path}, process" in out
    assert f"left alone {root / 'teraio-notes'}" in out
    assert sorted(path.name for path in root.iterdir()) == ["data.bin", "teraio-notes"]
    first, second = json.loads((tmp_path / "out.json").read_text())["directories"]
    assert [session["path"] for session in first["removed"]] == [str(dead)]
    assert [session["path"] for session in second["alive"]] == [str(alive.path)]
    alive.close()


def test_a_dry_run_removes_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(root.rglob("*"))
    assert cli.main(["clean", "--dry-run", str(root)]) == 0
    assert "would remove" in capsys.readouterr().out
    assert sorted(root.rglob("*")) == before


def test_the_default_directory(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TERAIO_SPILL", str(root))
    assert cli.main(["clean"]) == 0
    assert "removed" in capsys.readouterr().out
    (root / "teraio-notes").rmdir()
    assert cli.main(["clean"]) == 0
    assert "nothing of teraio's" in capsys.readouterr().out


def test_a_missing_directory_does_not_stop_the_others(
    root: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["clean", str(tmp_path / "none"), str(root), "--json", str(tmp_path / "out.json")]) == 1
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert "none" in err
    assert "removed" in out
    assert "none" in json.loads((tmp_path / "out.json").read_text())["directories"][0]["error"]


@pytest.mark.parametrize("argv", [["clean", "--what"], ["clean", "--json", "/no/such/file.json"]])
def test_wrong_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    assert capsys.readouterr().err.count("\n") == 1
