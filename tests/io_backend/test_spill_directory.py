"""Leases: who may remove which session directory, and which places are refused.

Covers creating, closing, killed owners, live neighbours, foreign content, links, forks and mount types. The rule: what
is not provably a dead session of ours is still there afterwards.
"""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from io_backend import SpillDirectory, SpillDirectoryError
from io_backend import spill_root as module
from io_backend.mounts import find_mount, unsafe_reason

REPOSITORY = Path(__file__).resolve().parents[2]

CHILD = """
import sys
from io_backend import BackendConfig, open_store
store = open_store(sys.argv[1], config=BackendConfig(growth_nbytes=1 << 26, reserve_free_nbytes=0))
extent = store.allocate(1 << 26)
store.write(bytearray(1 << 26), extent).wait()
print(store.statistics().file_nbytes, flush=True)
sys.stdin.read()
"""


def start_child(root: Path) -> subprocess.Popen[str]:
    """A process with a session of its own in ``root``, holding 64 MiB there."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert child.stdout is not None
    assert int(child.stdout.readline()) >= 1 << 26
    return child


def end_child(child: subprocess.Popen[str], signal_number: int) -> None:
    child.send_signal(signal_number)
    child.communicate(timeout=30)


def sessions(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_create_and_close(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "root"
    directory = SpillDirectory.create(root)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    assert directory.path.parent == root
    assert directory.path.name.startswith(f"teraio-{os.getpid()}-")
    assert directory.file_system == find_mount(tmp_path).file_system
    assert not directory.closed
    directory.close()
    directory.close()
    assert directory.closed
    assert sessions(root) == set()


def test_a_forgotten_directory_is_removed_with_its_object(tmp_path: Path) -> None:
    SpillDirectory.create(tmp_path)
    assert sessions(tmp_path) == set()


def test_neighbours_in_one_process_and_threads(tmp_path: Path) -> None:
    made: list[SpillDirectory] = []
    threads = [threading.Thread(target=lambda: made.append(SpillDirectory.create(tmp_path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sessions(tmp_path) == {directory.path.name for directory in made}
    assert len(made) == 8
    for directory in made:
        directory.close()
    assert sessions(tmp_path) == set()


def test_a_killed_session_leaves_no_bytes_and_is_reclaimed(tmp_path: Path) -> None:
    victim, survivor = start_child(tmp_path), start_child(tmp_path)
    try:
        before = sessions(tmp_path)
        assert len(before) == 2
        end_child(victim, signal.SIGKILL)
        left = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*") if path.is_file())
        assert left == 0
        assert sessions(tmp_path) == before
        directory = SpillDirectory.create(tmp_path)
        survivors = {name for name in before if name.startswith(f"teraio-{survivor.pid}-")}
        assert sessions(tmp_path) == survivors | {directory.path.name}
        directory.close()
    finally:
        victim.kill()
        end_child(survivor, signal.SIGKILL)


def test_reclaim_touches_nothing_else(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "lease").write_text("precious")
    root = tmp_path / "root"
    root.mkdir()
    (root / "teraio-1-000000000000").symlink_to(outside)
    (root / "teraio-1-00000000000x").mkdir()
    (root / "teraio-notes").mkdir()
    (root / "teraio-1-111111111111").write_text("a file")
    foreign = root / "teraio-1-222222222222"
    foreign.mkdir()
    (foreign / "lease").touch()
    (foreign / "thesis.tex").write_text("not ours")
    kept = sessions(root)
    for orphan in ("teraio-1-333333333333", "teraio-1-444444444444"):
        (root / orphan).mkdir()
    (root / "teraio-1-333333333333" / "lease").touch()
    (root / "teraio-1-333333333333" / "spill-0123456789ab.bin").touch()
    SpillDirectory.create(root).close()
    assert sessions(root) == kept
    assert (outside / "lease").read_text() == "precious"
    assert (foreign / "thesis.tex").read_text() == "not ours"


def test_directories_of_other_users_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "teraio-1-333333333333").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    SpillDirectory.create(tmp_path).close()
    assert sessions(tmp_path) == {"teraio-1-333333333333"}


def test_a_forked_child_removes_nothing(tmp_path: Path) -> None:
    directory = SpillDirectory.create(tmp_path)
    child = os.fork()
    if child == 0:
        directory.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert sessions(tmp_path) == {directory.path.name}
    directory.close()


def test_a_held_root_lock_is_an_error_not_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.05)
    holder = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(SpillDirectoryError, match="held the lock"):
            SpillDirectory.create(tmp_path)
    finally:
        os.close(holder)


def test_a_file_as_root_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SpillDirectoryError, match="cannot use") as caught:
        SpillDirectory.create(tmp_path / "file")
    assert caught.value.errno is not None


def test_memory_file_systems_are_refused(tmp_path: Path) -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir() or find_mount(shm).file_system != "tmpfs":
        pytest.skip("no tmpfs at /dev/shm")
    root = shm / f"teraio-test-{os.getpid()}"
    with pytest.raises(SpillDirectoryError, match="keeps files in memory"):
        SpillDirectory.create(root)
    assert not root.exists()
    (tmp_path / "link").symlink_to(shm)
    with pytest.raises(SpillDirectoryError, match="allow_unsafe_spill"):
        SpillDirectory.create(tmp_path / "link" / root.name)
    directory = SpillDirectory.create(root, allow_unsafe=True)
    directory.close()
    root.rmdir()


TABLE = r"""22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:30 / /mnt rw shared:1 - nfs4 server:/x rw
31 30 259:1 / /mnt/with\040space rw - xfs /dev/nvme0n1 rw
32 22 0:31 / /over rw - ext4 /dev/vdb rw
33 32 0:32 / /over rw - tmpfs none rw
nonsense
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/data", "ext4"),
        ("/mnt/a/b", "nfs4"),
        ("/mnt", "nfs4"),
        ("/mnt2", "ext4"),
        ("/mnt/with space/x", "xfs"),
        ("/over/x", "tmpfs"),
    ],
)
def test_the_longest_mount_wins(path: str, expected: str) -> None:
    assert find_mount(path, table=TABLE).file_system == expected


@pytest.mark.parametrize("name", ["tmpfs", "ramfs", "nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "ceph", "lustre"])
def test_unsafe_types(name: str) -> None:
    assert unsafe_reason(name)


@pytest.mark.parametrize("name", ["ext4", "xfs", "btrfs", "overlay", "zfs", "fuseblk", "unknown"])
def test_safe_types(name: str) -> None:
    assert unsafe_reason(name) is None
