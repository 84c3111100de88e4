"""The allocator: memory of dead tensors for new ones, within a limit, and never a byte of a living one."""

from __future__ import annotations

import copy
import gc
import mmap
import random
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import teraio
from teraio.runtime.recycler import RecyclerLease, lease_recycler, library

MIB = 1 << 20
PAGE = mmap.PAGESIZE


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
