"""`reclaim`: what it says of what it finds. What may be removed at all is tested with the spill directory."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from io_backend import SpillDirectory, SpillDirectoryError, reclaim, spill_root

REPOSITORY = Path(__file__).resolve().parents[2]
LEAVE = """
import os, sys
from io_backend import SpillDirectory
directory = SpillDirectory.create(sys.argv[1])
(directory.path / "spill-0123456789ab.bin").write_bytes(bytes(1 << 20))
print(directory.path, flush=True)
os.kill(os.getpid(), 9)
"""


def leave_an_orphan(root: Path) -> Path:
    """The directory of a killed session, with a named spill file of 1 MiB."""
    done = subprocess.run(
        [sys.executable, "-c", LEAVE, str(root)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    return Path(done.stdout.strip())


def test_dead_alive_and_foreign(tmp_path: Path) -> None:
    orphan = leave_an_orphan(tmp_path)
    alive = SpillDirectory.create(tmp_path.parent / f"{tmp_path.name}-other")
    alive.close()
    alive_name = "teraio-77-aaaaaaaaaaaa"
    (tmp_path / alive_name).mkdir()
    lease = os.open(tmp_path / alive_name / "lease", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lease, fcntl.LOCK_EX)
    (tmp_path / "teraio-1-bbbbbbbbbbbb").symlink_to(tmp_path)
    (tmp_path / "teraio-notes").mkdir()
    (tmp_path / "thesis").mkdir()
    foreign = tmp_path / "teraio-1-cccccccccccc"
    foreign.mkdir()
    (foreign / "thesis.tex").touch()

    before = sorted(tmp_path.rglob("*"))
    dry = reclaim(tmp_path, dry_run=True)
    assert sorted(tmp_path.rglob("*")) == before
    found = reclaim(tmp_path)
    assert (dry.removed, dry.alive, dry.left) == (found.removed, found.alive, found.left)
    assert (dry.dry_run, found.dry_run) == (True, False)

    (removed,) = found.removed
    assert removed.path == str(orphan)
    assert removed.pid == int(orphan.name.split("-")[1])
    assert removed.nbytes >= 1 << 20
    assert not orphan.exists()
    assert [(session.path, session.pid) for session in found.alive] == [(str(tmp_path / alive_name), 77)]
    reasons = {Path(each.path).name: each.reason for each in found.left}
    assert "link" in reasons["teraio-1-bbbbbbbbbbbb"]
    assert "thesis.tex" in reasons["teraio-1-cccccccccccc"]
    assert "name" in reasons["teraio-notes"]
    assert len(reasons) == 3
    os.close(lease)


def test_other_users_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "teraio-1-333333333333").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    (left,) = reclaim(tmp_path).left
    assert f"user {os.getuid()}" in left.reason


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SpillDirectoryError, match="cannot look into"):
        reclaim(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(SpillDirectoryError, match="cannot look into"):
        reclaim(tmp_path / "file")


def test_a_stuck_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill_root, "LOCK_TIMEOUT_S", 0.05)
    holder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with pytest.raises(SpillDirectoryError, match="held the lock"):
        reclaim(tmp_path)
    os.close(holder)
