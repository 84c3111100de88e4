"""What every test runs under: a fixed numeric state, and a check that the test left nothing behind.

Covers: seeds and torch's process-wide switches; leaked file descriptors, threads, and files. Does not cover leaked
memory, which is the matter of the tests of the code that accounts for it. The rule: a leak fails the test that made
it, and a test that already raised is not blamed a second time (its traceback keeps objects alive).
"""

from __future__ import annotations

import gc
import itertools
import os
import re
import shutil
import threading
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.spill_roots import without_ledgers

# Derived from the profile in force, so that the settings hypothesis chooses for a CI run stay.
# No deadline: the first example pays for torch's lazy initialisation, and test machines are shared.
settings.register_profile("teraio", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("teraio")

NUM_THREADS = 2

TOLERATED_FDS = re.compile(
    r"/dev/urandom"  # Python and hypothesis open it at the first need and keep it
    r"|/dev/(nvidia|char/).*"  # the CUDA driver keeps its device nodes open until the process ends
)

TOLERATED_THREADS = re.compile(
    r"pytest_timeout .*"  # the watchdog of pytest-timeout
    r"|Dummy-\d+"  # a C++ thread (of autograd, of the CUDA driver) that once called Python; Python cannot end it
)

# What tools other than the tests write beside the sources: hidden caches, builds, byte code.
UNWATCHED_FILES = re.compile(r"\..*|build|dist|.*\.egg-info|__pycache__")

RAISED = pytest.StashKey[bool]()
"""Set on a test item when its body, or a fixture of it, raised."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember, for the leak check, that a test raised (also by skipping itself or by an expected failure)."""
    if call.excinfo is not None:
        item.stash[RAISED] = True
    return (yield)


@pytest.fixture(autouse=True)
def numeric_state() -> Iterator[None]:
    """Start every test from seed 0 on two threads, and undo what it does to torch's process-wide switches."""
    torch.manual_seed(0)
    if torch.get_num_threads() != NUM_THREADS:
        torch.set_num_threads(NUM_THREADS)
    dtype = torch.get_default_dtype()
    deterministic = torch.get_deterministic_debug_mode()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    cudnn = (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark)
    yield
    if torch.get_default_dtype() != dtype:
        torch.set_default_dtype(dtype)
    if torch.get_deterministic_debug_mode() != deterministic:
        torch.set_deterministic_debug_mode(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fills
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn


@pytest.fixture(scope="session")
def spill_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the directory that holds each test's spill directory."""
    root = tmp_path_factory.mktemp("spill")
    yield root
    shutil.rmtree(root, ignore_errors=True)


_serial = itertools.count()


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest, spill_root: Path) -> Iterator[None]:
    """Give the test a ``$TERAIO_SPILL`` of its own; fail it if it leaves a descriptor, a thread or a file behind.

    Autouse fixtures are set up first and torn down last, so what the test's other fixtures close is closed by then.
    """
    spill = spill_root / str(next(_serial))
    spill.mkdir()
    on_gpu = any(request.node.get_closest_marker(name) for name in ("gpu", "gds"))
    if on_gpu and torch.cuda.is_available():
        # The driver's own descriptors come with the first use: have them before the first look.
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
    before = Snapshot.take(spill, Path.cwd())
    # Not the `monkeypatch` fixture: a test's own patches through that one must be undone before the check.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERAIO_SPILL", str(spill))
        yield
    found = [] if request.node.stash.get(RAISED, False) else before.leaks(files_only=on_gpu)
    shutil.rmtree(spill, ignore_errors=True)
    if found:
        pytest.fail("the test left behind:\n" + "\n".join(f"  {leak}" for leak in found), pytrace=False)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What the process holds at one moment."""

    fds: Counter[str]
    """Open descriptors, by what ``/proc/self/fd`` says that they are."""
    threads: frozenset[threading.Thread]
    files: frozenset[Path]
    """Entries of the directories that a test could write to without meaning to."""
    spill: Path
    cwd: Path

    @classmethod
    def take(cls, spill: Path, cwd: Path) -> Snapshot:
        """Look at the process now (some tens of microseconds)."""
        return cls(
            fds=open_fds(),
            threads=frozenset(t for t in threading.enumerate() if not TOLERATED_THREADS.fullmatch(t.name)),
            files=watched_files(spill, cwd),
            spill=spill,
            cwd=cwd,
        )

    def leaks(self, *, files_only: bool) -> list[str]:
        """Return a line for each thing held now and not at the time of this snapshot.

        Args:
            files_only: Of the descriptors, compare those of named files alone: a GPU driver opens and keeps event
                descriptors, pipes and sockets of its own at any call.
        """
        if not self._new(files_only):
            return []
        # Garbage in cycles holds descriptors until it is collected, and a stopped thread may be on its last lines.
        gc.collect()
        for thread in threading.enumerate():
            if thread not in self.threads and not TOLERATED_THREADS.fullmatch(thread.name):
                thread.join(timeout=1.0)
        return self._new(files_only)

    def _new(self, files_only: bool) -> list[str]:
        now = Snapshot.take(self.spill, self.cwd)
        fds = now.fds - self.fds
        if files_only:
            fds = Counter({target: count for target, count in fds.items() if target.startswith("/")})
        return [
            *(f"{count} open descriptor(s) of {target}" for target, count in sorted(fds.items())),
            *(f"thread {thread.name!r}" for thread in sorted(now.threads - self.threads, key=lambda t: t.name)),
            *(f"{path}" for path in sorted(now.files - self.files)),
        ]


def open_fds() -> Counter[str]:
    """Count this process's open descriptors by target, without those in ``TOLERATED_FDS``."""
    targets: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
        if not TOLERATED_FDS.fullmatch(target):
            targets[target] += 1
    return targets


def watched_files(spill: Path, cwd: Path) -> frozenset[Path]:
    """List session directories in the spill and the cache directory, and what lies in the working directory.

    The ledger of a spill directory is meant to stay, so it is no leak.
    """
    found = set(without_ledgers(list(spill.glob("teraio-*"))))
    # The default place is shared with every other run of the same user: look for this process's own sessions.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "teraio"
    found.update(cache.glob(f"teraio-{os.getpid()}-*"))
    found.update(path for path in cwd.iterdir() if not UNWATCHED_FILES.fullmatch(path.name))
    return frozenset(found)
