"""The default policy: evict what is idle longest, as little as the budget asks for, and bring it back in good time.

Covers selection and timing. Candidates and needs are ``problem``'s, judging is ``simulator``'s. The rules:

- Whatever the disk does, the plan can be kept: with every chosen storage away from its offload to its reload, no
  segment needs more than the budget (unless no plan could reach that). When writes are late the program waits; it never
  overshoots.
- Times are planned for a disk slower than the one measured, as far as that costs nothing; the simulator decides.

Source: Algorithm 1 of TERAIO (arXiv 2506.06472) moves periods until no segment is above capacity, and counts memory as
gone only when the write, queued behind earlier ones, has ended. The order differs: among storages whose write would
have ended, the one that is used last leaves (Belady's rule), which keeps the disk busy from the first free storage on;
what proves needless is taken back. Reloads start as early as memory allows, in order of use: the eager pass of G10
(MICRO 2023), section 4.3.
"""

import heapq
from collections.abc import Container, Sequence
from typing import NamedTuple

import numpy as np

from lifetime import Hardware
from teraio.planner.disk import earliest_ends_s, latest_starts_s
from teraio.planner.plan import Limits, Move, MoveKind, sort_moves
from teraio.planner.policies.evict_all import evict_all
from teraio.planner.problem import Candidate, Float64Array, Int64Array, Problem
from teraio.planner.simulator import Simulation, replay

CAUTIONS = (1.5, 1.0, 0.0)
"""How many times slower than measured the disk is taken to be, most careful first.

With 0, memory counts as gone at once: where writes cannot keep up anyway, the program waits for them in any case, and
reloads need not be held back for what will then be gone.
"""
SAME_STEP = 1.001
"""Steps that differ by less than this factor count as equally long."""
_READ_AHEAD_S = 2.0
"""Reloads start at most this long before the queue of reads makes them: earlier gains nothing."""


def planned(problem: Problem, limits: Limits, hardware: Hardware) -> Sequence[Move]:
    """The most careful of the quickest plans that fit the budget; no moves where the budget does not bind.

    Where nothing fits, the moves come closest to the budget; the caller finds the excess by replaying them.
    """
    budget_nbytes = limits.budget_nbytes
    if problem.peak_nbytes <= budget_nbytes:
        return ()
    plans = [plan_at_pace(problem, budget_nbytes, Pace(hardware, caution)) for caution in CAUTIONS]
    plans.append(evict_all(problem, limits, hardware))
    results = [replay(problem, moves, hardware, budget_nbytes) for moves in plans]
    return plans[_best(results, budget_nbytes)]


def _best(results: Sequence[Simulation], budget_nbytes: int) -> int:
    """Position of the first result that is about as quick as any of those that come closest to the budget."""
    lowest = max(budget_nbytes, min(result.peak_nbytes for result in results))
    fitting = [i for i, result in enumerate(results) if result.peak_nbytes <= lowest]
    quickest_s = min(results[i].step_s for i in fitting)
    return next(i for i in fitting if results[i].step_s <= quickest_s * SAME_STEP)


class Pace(NamedTuple):
    """How fast transfers are taken to be."""

    hardware: Hardware
    caution: float

    def write_s(self, candidates: Sequence[Candidate]) -> Float64Array:
        """Seconds that each write takes."""
        return self.caution * self._measured_s(candidates, self.hardware.write_bytes_per_s)

    def read_s(self, candidates: Sequence[Candidate]) -> Float64Array:
        """Seconds that each read takes: never less than measured, since starting early costs memory alone."""
        return max(1.0, self.caution) * self._measured_s(candidates, self.hardware.read_bytes_per_s)

    def _measured_s(self, candidates: Sequence[Candidate], bytes_per_s: float) -> Float64Array:
        nbytes = np.array([c.nbytes for c in candidates], dtype=np.float64)
        return np.asarray(self.hardware.latency_s + nbytes / bytes_per_s)


def plan_at_pace(problem: Problem, budget_nbytes: int, pace: Pace) -> Sequence[Move]:
    """One plan that fits the budget if any does, timed for transfers at `pace`."""
    chosen = _take_back(problem, budget_nbytes, _choose(problem, budget_nbytes, pace))
    gone = _gone_events(problem, chosen, pace)
    triggers = _reload_events(problem, budget_nbytes, chosen, gone, pace)
    moves = []
    for c, gone_event, trigger in zip(chosen, gone.tolist(), triggers.tolist(), strict=True):
        moves.append(Move(MoveKind.OFFLOAD, c.storage, c.nbytes, c.free_event, gone_event, "relieves the peak"))
        moves.append(Move(MoveKind.RELOAD, c.storage, c.nbytes, trigger, c.use_event, "fits again from here on"))
    return sort_moves(moves)


class _IdleLongest:
    """Candidates that have become available, the one that is used last first."""

    def __init__(self, candidates: Sequence[Candidate], available: Int64Array) -> None:
        self._candidates = candidates
        self._available = available.tolist()
        self._coming = np.argsort(available, kind="stable")[::-1].tolist()
        self._heap: list[tuple[int, int]] = []

    def take(self, k: int, taken: Container[int]) -> int | None:
        """Position of the best candidate available at event `k`, still idle then, and not in `taken`."""
        while self._coming and self._available[self._coming[-1]] <= k:
            i = self._coming.pop()
            heapq.heappush(self._heap, (-self._candidates[i].use_event, i))
        while self._heap and -self._heap[0][0] > k:
            _, i = heapq.heappop(self._heap)
            if i not in taken:
                return i
        return None


def _choose(problem: Problem, budget_nbytes: int, pace: Pace) -> list[Candidate]:
    """Go through the segments in time; where one does not fit, evict what is idle longest among what can be gone.

    What cannot have been written by then, even alone on the disk, comes last: the program would wait for it.
    """
    candidates = problem.candidates
    free = np.array([c.free_event for c in candidates], dtype=np.int64)
    written = np.maximum(free, np.searchsorted(problem.start_s, problem.start_s[free] + pace.write_s(candidates)))
    sources = (_IdleLongest(candidates, written), _IdleLongest(candidates, free))
    chosen: dict[int, Candidate] = {}
    away_nbytes = 0
    returning: list[tuple[int, int]] = []
    for k in np.flatnonzero(problem.need_nbytes > budget_nbytes).tolist():
        while returning and returning[0][0] <= k:
            away_nbytes -= heapq.heappop(returning)[1]
        while problem.need_nbytes[k] - away_nbytes > budget_nbytes:
            i = next((i for source in sources if (i := source.take(k, chosen)) is not None), None)
            if i is None:
                break
            chosen[i] = candidates[i]
            away_nbytes += candidates[i].nbytes
            heapq.heappush(returning, (candidates[i].use_event, candidates[i].nbytes))
    return list(chosen.values())


def _take_back(problem: Problem, budget_nbytes: int, chosen: list[Candidate]) -> list[Candidate]:
    """Drop choices that later ones make unnecessary, the last chosen first; the rest in order of use."""
    level = problem.need_nbytes.copy()
    for c in chosen:
        level[c.free_event : c.use_event] -= c.nbytes
    kept = []
    for c in reversed(chosen):
        without = level[c.free_event : c.use_event] + c.nbytes
        if without.max(initial=0) <= budget_nbytes:
            level[c.free_event : c.use_event] = without
        else:
            kept.append(c)
    return sorted(kept, key=lambda c: (c.use_event, c.free_event))


def _gone_events(problem: Problem, chosen: Sequence[Candidate], pace: Pace) -> Int64Array:
    """First event at which each choice has left, its write queued behind those of storages that were free earlier."""
    free = np.array([c.free_event for c in chosen], dtype=np.int64)
    use = np.array([c.use_event for c in chosen], dtype=np.int64)
    order = np.argsort(free, kind="stable")
    ends_s = np.empty(len(chosen))
    ends_s[order] = earliest_ends_s(problem.start_s[free[order]], pace.write_s(chosen)[order])
    return np.clip(np.searchsorted(problem.start_s, ends_s), free, use)


def _reload_events(
    problem: Problem, budget_nbytes: int, chosen: Sequence[Candidate], gone: Int64Array, pace: Pace
) -> Int64Array:
    """For each choice, in order of use, the earliest event from which it fits beside everything else until its use."""
    level = problem.need_nbytes.copy()
    for c, gone_event in zip(chosen, gone.tolist(), strict=True):
        level[gone_event : c.use_event] -= c.nbytes
    use = np.array([c.use_event for c in chosen], dtype=np.int64)
    wanted_s = latest_starts_s(problem.start_s[use], pace.read_s(chosen)) - _READ_AHEAD_S
    triggers = np.maximum(gone, np.searchsorted(problem.start_s, wanted_s))
    for i, c in enumerate(chosen):
        blocked = np.flatnonzero(level[triggers[i] : c.use_event] + c.nbytes > budget_nbytes)
        if len(blocked):
            triggers[i] += blocked[-1] + 1
        level[triggers[i] : c.use_event] += c.nbytes
    return triggers
