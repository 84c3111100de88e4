"""Processes killed at any moment: no byte stays taken, no neighbour is harmed, the next start is clean.

Covers SIGKILL of children that open, write, read, grow and close stores in a loop, beside a neighbour that lives. The
rules: moments come from a seed; what counts is what the file system says afterwards, not how long anything took.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

from io_backend import BackendConfig, SpillDirectory, open_store
from tests.spill_roots import sessions, without_ledgers

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_KILLS = 50
NUM_AT_ONCE = 5
MOST_DELAY_S = 0.3
MIB = 1 << 20

CHILD = """
import random, sys
from io_backend import BackendConfig, open_store
rng = random.Random(int(sys.argv[2]))
config = BackendConfig(growth_nbytes=1 << 20, reserve_free_nbytes=0, bounce_nbytes=1 << 18)
print("ready", flush=True)
while True:
    store = open_store(sys.argv[1], config=config, backend="posix")
    extents = []
    for _ in range(rng.randrange(1, 12)):
        data = rng.randbytes(rng.randrange(1, 1 << 20))
        extent = store.allocate(len(data))
        store.write(data, extent)
        extents.append((extent, data))
        if rng.random() < 0.3:
            store.free(extents.pop(rng.randrange(len(extents)))[0])
    for extent, data in extents:
        back = bytearray(len(data))
        store.read(extent, back).wait()
        assert back == data
    store.close()
"""

NEIGHBOUR = """
import random, sys
from io_backend import BackendConfig, open_store
rng = random.Random(0)
store = open_store(sys.argv[1], config=BackendConfig(growth_nbytes=1 << 20, reserve_free_nbytes=0), backend="posix")
kept = []
for _ in range(20):
    data = rng.randbytes(rng.randrange(1, 1 << 20))
    extent = store.allocate(len(data))
    store.write(data, extent).wait()
    kept.append((extent, data))
print("ready", flush=True)
for line in sys.stdin:
    for extent, data in kept:
        back = bytearray(len(data))
        store.read(extent, back).wait()
        assert back == data
        store.write(data, extent).wait()
    print("unharmed", store.statistics().file_nbytes, flush=True)
store.close()
"""


def start(program: str, root: Path, *arguments: str) -> subprocess.Popen[str]:
    """A process that runs the program and has said that it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(root), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=30)


def unharmed(neighbour: subprocess.Popen[str]) -> bool:
    """Whether the neighbour finds all of its bytes."""
    assert neighbour.stdin is not None
    assert neighbour.stdout is not None
    neighbour.stdin.write("check\n")
    neighbour.stdin.flush()
    return neighbour.stdout.readline().startswith("unharmed")


def named_nbytes(root: Path) -> int:
    """What ``du`` would say of the files that have a name, but for the ledger, which is to stay."""
    files = without_ledgers([path for path in root.rglob("*") if path.is_file()])
    return sum(path.stat().st_blocks * 512 for path in files)


def unnamed_files(root: Path) -> list[str]:
    """Files without a name under the root that some process still has open or mapped."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if target.startswith(f"{root}/") and target.endswith("(deleted)"):
                    found.append(f"{pid}: {target}")
        except OSError:  # it has ended, or is not ours
            continue
    return found


def test_killed_at_any_moment(tmp_path: Path) -> None:
    rng = random.Random(20)
    neighbour = start(NEIGHBOUR, tmp_path)
    killed: list[int] = []
    failures: list[BaseException] = []

    def kill_some(seeds: list[tuple[int, float]]) -> None:
        try:
            for seed, delay_s in seeds:
                child = start(CHILD, tmp_path, str(seed))
                try:
                    child.wait(delay_s)
                    failures.append(AssertionError(f"child {seed} ended by itself with {child.returncode}"))
                except subprocess.TimeoutExpired:
                    killed.append(child.pid)
                finally:
                    end(child)
        except BaseException as error:
            failures.append(error)

    try:
        moments = [(seed, rng.uniform(0, MOST_DELAY_S)) for seed in range(NUM_KILLS)]
        threads = [
            threading.Thread(target=kill_some, args=(moments[number::NUM_AT_ONCE],)) for number in range(NUM_AT_ONCE)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(240)
        assert failures == []
        assert len(killed) == NUM_KILLS
        assert named_nbytes(tmp_path) == 0
        assert {line.partition(":")[0] for line in unnamed_files(tmp_path)} == {str(neighbour.pid)}
        assert unharmed(neighbour)
        # Whoever comes next takes the remains away, and only those.
        with_remains = {path.name for path in sessions(tmp_path)}
        config = BackendConfig(growth_nbytes=MIB, reserve_free_nbytes=0)
        store = open_store(tmp_path, config=config)
        extent = store.allocate(100)
        store.write(b"x" * 100, extent).wait(20)
        store.close()
        left = {path.name for path in sessions(tmp_path)}
        assert left == {name for name in with_remains if name.startswith(f"teraio-{neighbour.pid}-")}
        assert len(left) == 1
        assert unharmed(neighbour)
    finally:
        end(neighbour)
    assert unnamed_files(tmp_path) == []
    SpillDirectory.create(tmp_path).close()
    assert sessions(tmp_path) == []


def test_killed_while_another_waits_for_the_root(tmp_path: Path) -> None:
    """A session killed at its birth, stopped or not, never keeps the next one out."""
    child = start(CHILD, tmp_path, "1")
    try:
        child.send_signal(signal.SIGSTOP)
        child.kill()
        child.wait(30)
        SpillDirectory.create(tmp_path).close()
        assert sessions(tmp_path) == []
    finally:
        end(child)
