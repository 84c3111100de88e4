"""Every system call of a store's life fails once, in every way, and nothing wrong comes of it.

Covers each call of a scripted run by itself and each kind of call from some moment on, on every rung of the ladder,
with one and two directories. Does not cover the messages (`test_direct_io`, `test_spill_file`). The rule: never a wrong
byte, a hang, an untyped error, or anything left behind.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from io_backend import SpillDirectory, direct_io, striped_store
from io_backend.spill_file import RWF_DONTCACHE
from tests.io_backend.scripted_run import ORPHAN, ScriptedRun, held, leave_an_orphan, sessions
from tests.io_backend.system_calls import (
    ERRNOS,
    TRANSFERS,
    Action,
    SystemCalls,
    fails,
    from_then_on,
    moves,
    never,
    only,
    waits_for,
)

Plan = Callable[[int, str], Action | None]
SHARED_MEMORY = Path("/dev/shm")
RUNGS = ("direct", "bounced", "uncached", "cached", "named")
TIDYING = {"unlink", "rmdir", "listdir", "open", "flock"}
"""Calls without which a session's directory cannot be removed: the next session's business then."""


class Bench:
    """Runs the script under plans, in fresh directories on one rung, and looks at what each run leaves."""

    def __init__(self, path: Path, rung: str, num_roots: int) -> None:
        self.rung = rung
        self._roots = [path / str(number) for number in range(num_roots)]

    def run(self, plan: Plan, **options: Any) -> SystemCalls:
        """One run and the checks after it; the calls that it made."""
        run = ScriptedRun(
            self._roots,
            aligned=self.rung != "bounced",
            direct_io=self.rung in ("direct", "bounced", "named"),
            **options,
        )
        for root in self._roots:
            leave_an_orphan(root)
        before = held()
        with pytest.MonkeyPatch.context() as patch:
            self._lower(patch)
            calls = SystemCalls(patch, plan)
            run()
        assert held() == before
        if not set(calls.struck) & TIDYING:
            assert set(sessions(self._roots)) <= {ORPHAN}, run.errors
        for root in self._roots:
            SpillDirectory.create(root, allow_unsafe=True).close()
        assert sessions(self._roots) == []
        for root in self._roots:
            shutil.rmtree(root)
        if options.get("patience_s") is None and len(self._roots) == 1:
            assert run.opened or calls.struck
        return calls

    def changes(self, name: str) -> bool:
        """Whether this rung has anything to do with a kind of call; ``direct`` tries them all."""
        of_rung = {"direct": (name,), "named": ("open", "unlink", "close")}
        return name in of_rung.get(self.rung, (*TRANSFERS, "fdatasync", "posix_fadvise"))

    def _lower(self, patch: pytest.MonkeyPatch) -> None:
        """Make the system one that has this rung only."""
        patch.setattr(direct_io, "_RETRY_PAUSE_S", 0.0)
        patch.setattr(striped_store, "_LEAST_PART_NBYTES", 256 << 10)
        patch.setattr(striped_store, "_PART_UNIT_NBYTES", 64 << 10)
        pwritev, preadv, opens = os.pwritev, os.preadv, os.open

        def no_flags(fd: int, buffers: list[Any], offset: int, flags: int = 0) -> int:
            if flags & RWF_DONTCACHE:
                raise OSError(errno.EOPNOTSUPP, "no")
            return pwritev(fd, buffers, offset)

        def dropping_flags(fd: int, buffers: list[Any], offset: int, flags: int = 0) -> int:
            return pwritev(fd, buffers, offset)

        def no_tmpfile(path: str, flags: int, *args: int, **options: int) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "no")
            return opens(path, flags, *args, **options)

        if self.rung == "cached":
            patch.setattr(os, "pwritev", no_flags)
        if self.rung == "uncached":  # whatever the file system and the kernel
            patch.setattr(os, "pwritev", dropping_flags)
            patch.setattr(os, "preadv", lambda fd, buffers, offset, flags=0: preadv(fd, buffers, offset))
        if self.rung == "named":
            patch.setattr(os, "open", no_tmpfile)


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A place in memory where there is one."""
    if not SHARED_MEMORY.is_dir() or shutil.disk_usage(SHARED_MEMORY).free < 256 << 20:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="teraio-test-") as path:
        yield Path(path)


@pytest.fixture(params=RUNGS)
def bench(request: pytest.FixtureRequest, scratch: Path) -> Bench:
    return Bench(scratch, request.param, 1)


@pytest.fixture(params=RUNGS[:4])
def striped_bench(request: pytest.FixtureRequest, scratch: Path) -> Bench:
    return Bench(scratch, request.param, 2)


def occurrences(names: list[str]) -> dict[str, list[int]]:
    """At which numbers each kind of call came."""
    found: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        found.setdefault(name, []).append(index)
    return found


def pairs(names: list[str], most_of_a_kind: int) -> Iterator[tuple[int, int]]:
    """(call, error number): every call, every kind with every number, and all pairs of kinds that came seldom."""
    for indices in occurrences(names).values():
        every = list(itertools.product(indices, ERRNOS))
        if len(every) <= most_of_a_kind:
            yield from every
            continue
        rounds = max(1, most_of_a_kind // len(indices))
        wanted = {(indices[n % len(indices)], ERRNOS[n % len(ERRNOS)]) for n in range(rounds * len(indices))}
        wanted |= {(indices[n % len(indices)], code) for n, code in enumerate(ERRNOS)}
        yield from sorted(wanted)


def test_the_rungs_are_what_they_say(bench: Bench) -> None:
    names = Counter(bench.run(never).names)
    assert names["pwritev"] > 5
    assert names["preadv"] > 3
    assert names["posix_fallocate"] >= 2
    assert names["mmap"] >= 1
    assert bool(names["posix_fadvise"]) == (bench.rung == "cached")


def test_each_call_fails_once(bench: Bench) -> None:
    names = bench.run(never).names
    struck: Counter[str] = Counter()
    for index, code in pairs(names, 36 if bench.rung == "direct" else 9):
        if bench.changes(names[index]):
            struck.update(bench.run(only(index, fails(code))).struck)
    assert set(struck) == {name for name in names if bench.changes(name)}
    assert sum(struck.values()) >= sum(bench.changes(name) for name in names)


def test_each_transfer_is_short_once(bench: Bench) -> None:
    for index, name in enumerate(bench.run(never).names):
        if name in TRANSFERS:
            assert bench.run(only(index, moves((0.0, 0.3, 0.999)[index % 3]))).struck == [name]


def test_each_call_stalls_once(bench: Bench) -> None:
    caller = threading.current_thread()
    for index, name in enumerate(bench.run(never).names):
        if name not in (*TRANSFERS, "fdatasync", "posix_fadvise", "posix_fallocate") or not bench.changes(name):
            continue
        opened, reached = threading.Event(), threading.Event()
        hold = waits_for(opened, reached, 0.05)

        def stall(name: str, real: Any, args: Any, options: Any, hold: Action = hold) -> Any:
            # A call in the caller's own thread holds nobody else up.
            return real(*args, **options) if threading.current_thread() is caller else hold(name, real, args, options)

        bench.run(only(index, stall), patience_s=0.001, on_timeout=opened.set)


def test_each_kind_fails_from_some_moment_on(bench: Bench) -> None:
    for kind, indices in occurrences(bench.run(never).names).items():
        moments = (indices[0], indices[len(indices) // 2], indices[-1])
        for number, code in enumerate(ERRNOS):
            if not bench.changes(kind) or (kind == "flock" and code in (errno.EAGAIN, errno.EINTR)):
                continue  # a lock held by another session for ever: `test_spill_directory`
            bench.run(from_then_on(moments[number % 3], kind, fails(code)), once=False)


def test_each_call_of_two_devices_fails_once(striped_bench: Bench) -> None:
    names = striped_bench.run(never).names
    assert len(names) > 100
    struck: Counter[str] = Counter()
    for index, code in pairs(names, 9):
        if striped_bench.changes(names[index]):
            struck.update(striped_bench.run(only(index, fails(code))).struck)
    # Two devices take turns as they like: a number may meet another call than it did in the healthy run.
    assert set(struck) >= {name for name in names if striped_bench.changes(name)}
