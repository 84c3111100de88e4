"""The recycler: memory of dead tensors for new ones, within a limit, and never a byte of a living one.

Covers the allocator, its sharing among sessions, and how it is built. Whether training under it keeps its bits is shown
by every integration test, since sessions use it by default; here one also does without.
"""

from __future__ import annotations

import copy
import gc
import mmap
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import teraio
from teraio.runtime.recycler import RecyclerLease, RecyclerUnavailableError, lease_recycler, library
from teraio.runtime.recycler.build import library_path

MIB = 1 << 20
PAGE = mmap.PAGESIZE


@pytest.fixture(scope="module", autouse=True)
def _compiler() -> None:
    try:
        library_path()
    except RecyclerUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def _nothing_else_leases() -> None:
    gc.collect()


@pytest.fixture
def lease() -> Iterator[RecyclerLease]:
    lease = lease_recycler(64 * MIB)
    yield lease
    lease.release()


def tensor(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


# --- recycling --------------------------------------------------------------------------------------------------------


def test_memory_of_a_dead_tensor_is_used_again(lease: RecyclerLease) -> None:
    before = lease.statistics()
    first = tensor(3 * MIB)
    address = first.data_ptr()
    del first
    assert lease.statistics().idle_nbytes == before.idle_nbytes + 3 * MIB
    second = tensor(3 * MIB - 5)  # as many pages
    assert second.data_ptr() == address
    after = lease.statistics()
    assert after.recycled_nbytes - before.recycled_nbytes == 3 * MIB
    assert after.fresh_nbytes - before.fresh_nbytes == 3 * MIB


def test_the_last_one_freed_comes_first(lease: RecyclerLease) -> None:
    tensors = [tensor(MIB) for _ in range(4)]
    addresses = [t.data_ptr() for t in tensors]
    while tensors:
        tensors.pop(0)
    assert tensor(MIB).data_ptr() == addresses[-1]


def test_another_size_is_not_served(lease: RecyclerLease) -> None:
    first = tensor(2 * MIB)
    del first
    before = lease.statistics()
    second = tensor(MIB)
    after = lease.statistics()
    assert after.fresh_nbytes - before.fresh_nbytes == second.nbytes
    assert after.idle_nbytes == before.idle_nbytes


@pytest.mark.parametrize("nbytes", [0, 1, 64, (64 << 10) - 1])
def test_small_tensors_are_left_to_torchs_own_allocator(lease: RecyclerLease, nbytes: int) -> None:
    before = lease.statistics()
    small = tensor(nbytes)
    assert lease.statistics() == before
    del small
    assert lease.statistics() == before


@pytest.mark.parametrize("nbytes", [64 << 10, (64 << 10) + 1, MIB, 2 * MIB, 3 * MIB + 17])
def test_alignment_allows_direct_io_and_huge_pages(lease: RecyclerLease, nbytes: int) -> None:
    address = tensor(nbytes).data_ptr()
    assert address % PAGE == 0
    if nbytes >= 2 * MIB and library._huge_page_nbytes():
        assert address % library._huge_page_nbytes() == 0


def test_where_the_room_is_taken_pages_move_to_another_size(lease: RecyclerLease) -> None:
    if not library._huge_page_nbytes():
        pytest.skip("no huge pages here")
    passing = [torch.full((size * MIB,), 7, dtype=torch.uint8) for size in (5, 16, 11, 32)]  # all of the room
    while passing:
        passing.pop(0)
    before = lease.statistics()
    large = tensor(26 * MIB)  # 4 of the 5, all of the 16, 6 of the 11
    after = lease.statistics()
    assert after.recycled_nbytes - before.recycled_nbytes == 26 * MIB
    assert after.fresh_nbytes == before.fresh_nbytes
    assert after.idle_nbytes == (64 - 26 - 1 - 1) * MIB  # less the ends that are not whole huge pages
    assert bool((large == 7).all())  # the very pages
    large.fill_(3)
    other = torch.full((20 * MIB,), 9, dtype=torch.uint8)
    assert bool((large == 3).all())
    del large
    assert bool((tensor(27 * MIB)[: 26 * MIB] != 9).all())
    assert bool((other == 9).all())


def test_idle_memory_stays_within_the_limit(lease: RecyclerLease) -> None:
    base = lease.statistics().live_nbytes
    tensors = [tensor(4 * MIB) for _ in range(20)]  # more than the room: the living may
    assert lease.statistics().live_nbytes == base + 80 * MIB
    assert lease.statistics().idle_nbytes == 0
    tensors = tensors[:10]
    statistics = lease.statistics()
    assert (statistics.live_nbytes, statistics.idle_nbytes) == (base + 40 * MIB, 24 * MIB)
    odd = tensor(6 * MIB)  # takes room from what is idle, oldest first
    assert lease.statistics().idle_nbytes == 18 * MIB
    lease.set_room(50 * MIB)
    assert lease.statistics().idle_nbytes == 4 * MIB
    lease.set_room(-1)
    assert lease.statistics().idle_nbytes == 0
    del tensors, odd


def test_what_leaves_leaves_the_process(lease: RecyclerLease) -> None:
    lease.set_room(0)
    large = torch.ones(128 * MIB, dtype=torch.uint8)
    held = _anonymous_nbytes()
    del large
    assert held - _anonymous_nbytes() > 120 * MIB


def _anonymous_nbytes() -> int:
    return teraio.runtime.process_memory.anon_rss_nbytes()


sizes = st.sampled_from([1, 60_000, 65_536, 65_537, 100_000, MIB, MIB + 1, 2 * MIB, 3 * MIB, 4 * MIB, 6 * MIB, 9 * MIB])


@settings(max_examples=40)
@given(st.lists(st.tuples(st.booleans(), sizes, st.integers(0, 30)), max_size=60), st.integers(0, 30))
def test_no_living_byte_is_ever_touched(moves: list[tuple[bool, int, int]], room_mib: int) -> None:
    lease = lease_recycler(room_mib * MIB)
    try:
        base = lease.statistics().live_nbytes
        living: list[tuple[torch.Tensor, int]] = []
        for number, (make, nbytes, which) in enumerate(moves):
            if make or not living:
                living.append((torch.full((nbytes,), number % 251, dtype=torch.uint8), number % 251))
            else:
                content, value = living.pop(which % len(living))
                assert torch.all(content == value)
                del content
            statistics = lease.statistics()
            expected = sum(-(-t.nbytes // PAGE) * PAGE for t, _ in living if t.nbytes >= 64 << 10)
            assert statistics.live_nbytes == base + expected
            assert not statistics.idle_nbytes or expected + statistics.idle_nbytes <= room_mib * MIB
        assert all(torch.all(content == value) for content, value in living)
    finally:
        lease.release()


def test_many_threads_at_once(lease: RecyclerLease) -> None:
    base = lease.statistics().live_nbytes
    failures: list[int] = []

    def work(seed: int) -> None:
        chosen = random.Random(seed)
        living: list[torch.Tensor] = []
        for _ in range(300):
            if living and chosen.random() < 0.5:
                content = living.pop(chosen.randrange(len(living)))
                if not bool((content == seed).all()):
                    failures.append(seed)
            else:
                living.append(torch.full((chosen.choice([70_000, MIB, 100]),), seed, dtype=torch.uint8))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert lease.statistics().live_nbytes == base


# --- what programs do with tensors ------------------------------------------------------------------------------------


def test_what_programs_do_with_tensors(lease: RecyclerLease, tmp_path: Path) -> None:
    values = torch.arange(300_000, dtype=torch.float32)
    assert torch.equal(copy.deepcopy(values), values)
    assert torch.equal(torch.from_numpy(values.numpy()), values)
    torch.save(values, tmp_path / "values.pt")
    assert torch.equal(torch.load(tmp_path / "values.pt"), values)
    grown = values.clone().resize_(600_000)
    assert torch.equal(grown[:300_000], values)
    assert torch.equal(values.clone().share_memory_(), values)
    assert torch.equal(torch.nn.functional.gelu(values[:64]), torch.nn.functional.gelu(values[:64].clone()))
    assert bytes(values[:9].clone().untyped_storage().clone()) == bytes(values[:9].clone().untyped_storage())


def test_the_profiler_still_sees_memory(lease: RecyclerLease) -> None:
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        kept = torch.ones(MIB)
        del kept
    seen = [event.self_cpu_memory_usage for event in profile.key_averages()]
    assert max(seen) >= 4 * MIB
    assert sum(seen) == 0


# --- sharing ----------------------------------------------------------------------------------------------------------


def test_two_leases_add_up_and_the_last_one_uninstalls() -> None:
    first, second = lease_recycler(8 * MIB), lease_recycler(4 * MIB)
    base = first.statistics().live_nbytes
    tensors = [tensor(MIB) for _ in range(20)]
    tensors.clear()
    assert first.statistics().idle_nbytes == 12 * MIB
    first.release()
    first.release()
    assert second.statistics().idle_nbytes == 4 * MIB
    kept = torch.full((MIB,), 7, dtype=torch.uint8)
    second.release()
    statistics = second.statistics()
    assert (statistics.live_nbytes, statistics.idle_nbytes) == (base + MIB, 0)
    outside = tensor(MIB)
    assert second.statistics() == statistics
    assert bool((kept == 7).all())
    del kept, outside
    assert second.statistics().live_nbytes == base
    assert second.statistics().idle_nbytes == 0


def test_an_abandoned_lease_is_given_back() -> None:
    lease = lease_recycler(8 * MIB)
    passing = tensor(MIB)
    del passing
    assert lease.statistics().idle_nbytes == MIB
    del lease
    gc.collect()
    assert library.load_library().statistics().idle_nbytes == 0


def test_what_lived_before_does_not_take_from_the_room() -> None:
    first = lease_recycler(8 * MIB)
    kept = tensor(6 * MIB)
    first.release()
    second = lease_recycler(8 * MIB)
    try:
        passing = tensor(8 * MIB)
        del passing
        assert second.statistics().idle_nbytes == 8 * MIB
        assert kept.nbytes == 6 * MIB
    finally:
        second.release()


# --- processes --------------------------------------------------------------------------------------------------------

FORKED = """
import os, threading, torch
from teraio.runtime.recycler import lease_recycler
lease_recycler(64 << 20)
stop = False
def busy():
    while not stop:
        torch.empty(1 << 20, dtype=torch.uint8)
threads = [threading.Thread(target=busy) for _ in range(3)]
[thread.start() for thread in threads]
for _ in range(30):
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        kept = [torch.empty(1 << 20, dtype=torch.uint8) for _ in range(4)]
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
stop = True
[thread.join() for thread in threads]
print("done")
"""

SCARCE = """
import resource, torch
from teraio.runtime.recycler import lease_recycler
lease = lease_recycler(1 << 40)
torch.set_num_threads(1)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (600 << 20),) * 2)
passing = torch.empty(400 << 20, dtype=torch.uint8); del passing
assert lease.statistics().idle_nbytes == 400 << 20
other = torch.empty(450 << 20, dtype=torch.uint8)  # fits only without what is idle
assert lease.statistics().idle_nbytes == 0
try:
    torch.empty(4 << 30, dtype=torch.uint8)
except RuntimeError as error:
    assert "allocate memory" in str(error), error
    print("done")
"""


@pytest.mark.parametrize("script", [FORKED, SCARCE], ids=["fork", "out of memory"])
def test_in_a_process_of_its_own(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr


# --- building ---------------------------------------------------------------------------------------------------------


def test_it_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "native"
    path = library_path(cache)
    made = path.stat()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    assert library_path(cache).stat().st_mtime_ns == made.st_mtime_ns
    assert cache.stat().st_mode & 0o777 == 0o700
    assert [each.name for each in cache.iterdir()] == [path.name]


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RecyclerUnavailableError, match=r"no C\+\+ compiler .*install one"):
        library_path(tmp_path / "cache")


def test_a_compiler_that_was_named_and_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(RecyclerUnavailableError, match=r"no-such-compiler"):
        library_path(tmp_path / "cache")


def test_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such header' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(
        RecyclerUnavailableError, match=r"broken could not compile it \(x.cpp:1: error: no such header\)"
    ):
        library_path(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_others_can_write_to(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(RecyclerUnavailableError, match=r"chmod 700"):
        library_path(cache)


def test_a_cache_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecyclerUnavailableError, match=r"cannot be used"):
        library_path(tmp_path / "file" / "cache")


def test_a_damaged_library_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = library_path()
    path.write_bytes(b"not a library")
    assert library._load().statistics() == (0, 0, 0, 0)
    assert path.stat().st_size > 1000


def test_a_failure_is_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "_loaded", [])
    monkeypatch.setenv("CXX", "no-such-compiler")
    for _ in range(2):
        with pytest.raises(RecyclerUnavailableError):
            library.load_library()
        monkeypatch.delenv("CXX", raising=False)


# --- sessions ---------------------------------------------------------------------------------------------------------


def _train(**config: object) -> tuple[list[torch.Tensor], teraio.Report]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 256) for _ in range(8)]
    model = torch.nn.Sequential(*[part for layer in layers for part in (layer, torch.nn.GELU())])
    optimizer = torch.optim.AdamW(model.parameters())
    settings = teraio.Config(allow_unsafe_spill=True, min_nbytes=64 << 10, **config)  # type: ignore[arg-type]
    with teraio.offload(model, optimizer, budget="14MiB", config=settings) as session:
        for _ in range(5):
            model(torch.ones(512, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()], session.report()


def test_a_session_with_and_without_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    with_it, report = _train()
    assert report.written_nbytes > 0
    assert not [event for event in report.events if "page faults" in event]
    switched_off, report_off = _train(recycle_memory=False)
    assert not [event for event in report_off.events if "page faults" in event]
    monkeypatch.setattr(library, "_loaded", [RecyclerUnavailableError("there is no C++ compiler")])
    without, report_without = _train()
    assert [event for event in report_without.events if "page faults" in event and "no C++ compiler" in event]
    for found in (switched_off, without):
        assert all(torch.equal(a, b) for a, b in zip(with_it, found, strict=True))
    assert report_without.written_nbytes > 0
    assert report.unlimited_peak_nbytes == report_off.unlimited_peak_nbytes == report_without.unlimited_peak_nbytes
    assert max(r.peak_nbytes for r in (report, report_off, report_without)) <= 14 * MIB


def test_a_session_that_cannot_start_leaves_torchs_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    before = library.load_library().statistics()
    monkeypatch.setattr("teraio.session.Engine", lambda *_, **__: (_ for _ in ()).throw(ValueError("stop")))
    with pytest.raises(ValueError, match="stop"), teraio.offload(budget="1GiB"):
        pass
    kept = tensor(MIB)
    after = library.load_library().statistics()
    assert (after.live_nbytes, after.idle_nbytes) == (before.live_nbytes, 0)
    assert kept.nbytes == MIB


def test_config_says_what_is_wrong() -> None:
    with pytest.raises(teraio.ConfigError, match="recycle_memory"):
        teraio.Config(recycle_memory=1)  # type: ignore[arg-type]


def test_importing_teraio_asks_torch_for_huge_pages() -> None:
    assert os.environ.get("THP_MEM_ALLOC_ENABLE")


def test_moved_state_goes_when_it_dies_though_its_session_has_ended() -> None:
    before = library.load_library().statistics().live_nbytes
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters())
    settings = teraio.Config(allow_unsafe_spill=True, min_nbytes=64 << 10)
    with teraio.offload(model, optimizer, budget="64MiB", kinds=("activation", "optimizer"), config=settings):
        for _ in range(3):
            model(torch.ones(64, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    gc.collect()  # what the session had goes first
    assert library.load_library().statistics().live_nbytes > before
    del model, optimizer
    gc.collect()
    assert library.load_library().statistics().live_nbytes == before


INTERPOSER = """
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
/* mremap as it may go: the target is cleared, somebody else gets the addresses, and then it fails. */
void *mremap(void *old, size_t old_size, size_t new_size, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  void *target = va_arg(rest, void *);
  va_end(rest);
  munmap(target, new_size);
  if (LOST) {
    mmap(target, new_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    memset(target, 0xAB, new_size);
  }
  errno = ENOMEM;
  return MAP_FAILED;
}
"""

VICTIM = """
import ctypes, sys, torch
from teraio.runtime.recycler import lease_recycler
MIB = 1 << 20
lease = lease_recycler(16 * MIB)
first = torch.ones(12 * MIB, dtype=torch.uint8)
del first
second = torch.empty(14 * MIB, dtype=torch.uint8)
second.fill_(7)
assert bool((second == 7).all())
del second
third = torch.ones(13 * MIB, dtype=torch.uint8)
assert bool((third == 1).all())
del third
lease.release()
print(lease.statistics().live_nbytes)
"""


@pytest.mark.parametrize("lost", [0, 1])
def test_pages_that_cannot_be_moved_are_nobody_elses(tmp_path: Path, lost: int) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source, interposer = tmp_path / "interposer.c", tmp_path / "interposer.so"
    source.write_text(INTERPOSER)
    command = [compiler, "-shared", "-fPIC", f"-DLOST={lost}", "-o", str(interposer), str(source)]
    subprocess.run(command, check=True, timeout=60)
    repository = Path(__file__).parent.parent.parent
    environment = {**os.environ, "LD_PRELOAD": str(interposer), "PYTHONPATH": str(repository)}
    done = subprocess.run(
        [sys.executable, "-c", VICTIM], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr
