"""``teraio doctor`` as a command: exit codes, JSON, what is kept, and that mistakes are one line.

No test says how fast a disk is.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from io_backend import load_calibration
from io_backend.mounts import find_mount
from tools import cli


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_directory_that_can_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spill, out_file = tmp_path / "spill [x]", tmp_path / "out.json"
    assert cli.main(["doctor", str(spill), "--seconds", "0.05", "--json", str(out_file), "--tb-per-day", "1"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert str(spill) in out
    assert "In a training step of 1 s" in out
    assert "the directory can be used" in out
    content = json.loads(out_file.read_text())
    (found,) = content["directories"]
    assert found["usable"] is True
    assert found["calibration"]["read_bytes_per_s"] > 0
    assert found["bytes_per_day"] == 1e12
    assert content["machine"]["num_cores"] == os.cpu_count()
    assert all(each["remedy"] for each in content["problems"])
    assert "serial" not in out_file.read_text()
    assert not spill.exists(), "what was made for the measurement is gone"
    assert load_calibration(spill) is not None


def test_speeds_are_not_kept_when_not_wanted(tmp_path: Path) -> None:
    assert cli.main(["doctor", str(tmp_path / "spill"), "--seconds", "0.01", "--no-save"]) == 0
    assert load_calibration(tmp_path / "spill") is None


def test_the_default_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERAIO_SPILL", str(tmp_path / "mine"))
    assert cli.main(["doctor", "--seconds", "0.01"]) == 0
    assert str(tmp_path / "mine") in capsys.readouterr().out


def test_one_bad_directory_is_code_1_and_the_other_is_examined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    out_file = tmp_path / "out.json"
    argv = ["doctor", str(tmp_path / "file"), str(tmp_path / "good"), "--seconds", "0.01", "--json", str(out_file)]
    assert cli.main(argv) == 1
    bad, good = json.loads(out_file.read_text())["directories"]
    assert (bad["usable"], good["usable"]) == (False, True)
    assert "cannot use" in bad["failure"]
    assert bad["calibration"] is None
    assert "cannot be used" in capsys.readouterr().out


def test_memory_is_no_disk(capsys: pytest.CaptureFixture[str]) -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir() or find_mount(shm).file_system != "tmpfs":
        pytest.skip("no tmpfs at /dev/shm")
    target = shm / f"teraio-doctor-{os.getpid()}"
    assert cli.main(["doctor", str(target), "--seconds", "0.01"]) == 1
    assert "keeps files in memory" in capsys.readouterr().out
    assert not target.exists()


def test_a_cache_that_cannot_be_written_is_a_warning(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.write_text("a file")
    assert cli.main(["doctor", str(tmp_path / "spill"), "--seconds", "0.01"]) == 0
    assert "could not be kept" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--seconds", "0"], "--seconds"),
        (["--seconds", "nan"], "'nan'"),
        (["--seconds", "1e9"], "at most 600"),
        (["--seconds", "soon"], "'soon'"),
        (["--tb-per-day", "-1"], "--tb-per-day"),
        (["--rated-tb", "inf"], "--rated-tb"),
        (["--json", "/no/such/directory/out.json"], "/no/such/directory"),
        (["--what"], "--what"),
    ],
)
def test_wrong_usage(argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert expected in err
