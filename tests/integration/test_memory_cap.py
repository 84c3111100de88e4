"""A hard cap by the kernel: what runs out of memory without teraio completes with it, with the same weights.

Needs root and a memory cgroup (version 1 or 2); skipped with the reason where they are missing.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
# The constant part of a process: interpreter, torch, optimizer imports, staging, kernel scratch, page tables.
CONSTANT_NBYTES = 450 * MIB
STEPS = 3


class MemoryCap:
    """A memory cgroup with a limit that a child process can be started in."""

    def __init__(self, directory: Path, limit_name: str) -> None:
        self.directory = directory
        self.limit_name = limit_name

    def set_limit(self, nbytes: int) -> None:
        (self.directory / self.limit_name).write_text(str(nbytes))

    def enter(self) -> None:
        """Move the calling process into the group; called in the child before exec."""
        (self.directory / "cgroup.procs").write_text(str(os.getpid()))


def _make_group() -> MemoryCap:
    name = f"teraio-test-{uuid.uuid4().hex[:8]}"
    v1 = Path("/sys/fs/cgroup/memory")
    if v1.is_dir():
        directory = v1 / name
        directory.mkdir()
        return MemoryCap(directory, "memory.limit_in_bytes")
    v2 = Path("/sys/fs/cgroup")
    if "memory" not in (v2 / "cgroup.subtree_control").read_text().split():
        (v2 / "cgroup.subtree_control").write_text("+memory")
    directory = v2 / name
    directory.mkdir()
    with contextlib.suppress(OSError):  # no swap on this machine
        (directory / "memory.swap.max").write_text("0")
    return MemoryCap(directory, "memory.max")


@pytest.fixture
def memory_cap() -> Iterator[MemoryCap]:
    try:
        cap = _make_group()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield cap
    cap.directory.rmdir()


def _train(mode: str, spill: Path, *arguments: str, cap: MemoryCap | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools", "demo", "--mode", mode, "--steps", str(STEPS), "--spill", str(spill)]
    enter = cap.enter if cap is not None else None
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False, preexec_fn=enter
    )


def _weights_sha256(output: str) -> str:
    found = re.search(r"\b[0-9a-f]{64}\b", output)
    assert found is not None, output
    return found[0]


@pytest.mark.slow
def test_run_that_the_kernel_kills_completes_with_teraio(memory_cap: MemoryCap, tmp_path: Path) -> None:
    budget_nbytes = 540 * MIB
    memory_cap.set_limit(budget_nbytes + CONSTANT_NBYTES)
    capped_plain = _train("plain", tmp_path, cap=memory_cap)
    assert capped_plain.returncode != 0, "the plain run fits the cap: the test proves nothing"
    assert signal.SIGKILL.name in capped_plain.stdout + capped_plain.stderr

    capped = _train("teraio", tmp_path, "--budget", f"{budget_nbytes // MIB}MiB", cap=memory_cap)
    assert capped.returncode == 0, capped.stdout + capped.stderr

    plain = _train("plain", tmp_path)
    assert plain.returncode == 0, plain.stdout + plain.stderr
    assert _weights_sha256(capped.stdout) == _weights_sha256(plain.stdout)
