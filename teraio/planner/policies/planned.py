"""The default policy: evict what relieves the most pressure per byte moved, bring it back as early as memory allows.

Covers selection and timing. Candidates and needs are ``problem``'s, judging is ``simulator``'s. The rule: with every
chosen storage away from the end of its write until its reload starts, no segment needs more than the budget, provided
the writes keep up; when they do not, the runtime waits, it never overshoots.

Source: Algorithm 1 of TERAIO (arXiv 2506.06472) ranks periods by pressure relieved over cost. Here the benefit is
clipped to the real excess, so that a storage gains nothing where the budget already holds, and reloads start as early as
the level allows, the eager pass of G10 (MICRO 2023), section 4.3, instead of at the latest moment.
"""

import heapq
from collections.abc import Sequence

import numpy as np

from lifetime import Hardware
from teraio.planner.plan import Limits, Move, MoveKind, sort_moves
from teraio.planner.problem import Candidate, Float64Array, Int64Array, Problem

_READ_AHEAD_S = 2.0
"""Reloads start at most this many seconds, beyond the time they take, before their use: earlier gains nothing."""


def planned(problem: Problem, limits: Limits, hardware: Hardware) -> Sequence[Move]:
    """Choose evictions until every segment fits the budget, then time the reloads.

    Candidates that cannot help are left alone; when nothing helps any more the moves chosen so far are returned, and
    the caller finds the remaining excess by replaying them.
    """
    chosen = _choose(problem, limits.budget_nbytes, hardware)
    chosen = _give_back(problem, limits.budget_nbytes, hardware, chosen)
    moves = []
    for c, trigger in _time_reloads(problem, limits.budget_nbytes, hardware, chosen):
        gone = min(max(_gone_event(problem, c, hardware), c.free_event + 1), c.use_event)
        moves.append(Move(MoveKind.OFFLOAD, c.storage, c.nbytes, c.free_event, gone, "relieves the peak"))
        moves.append(Move(MoveKind.RELOAD, c.storage, c.nbytes, trigger, c.use_event, "fits again from here on"))
    return sort_moves(moves)


def _gone_event(problem: Problem, c: Candidate, hardware: Hardware) -> int:
    """First event at which the write of `c`, started as soon as possible on an idle disk, has ended."""
    end_s = problem.start_s[c.free_event] + hardware.latency_s + c.nbytes / hardware.write_bytes_per_s
    return int(np.searchsorted(problem.start_s, end_s, side="left"))


def _return_event(problem: Problem, c: Candidate, hardware: Hardware) -> int:
    """Last event at which a read of `c`, on an idle disk, still ends before its use; never its own use."""
    start_s = problem.start_s[c.use_event] - hardware.latency_s - c.nbytes / hardware.read_bytes_per_s
    return int(np.searchsorted(problem.start_s, start_s, side="right")) - 1


def _window(problem: Problem, c: Candidate, hardware: Hardware) -> tuple[int, int]:
    """Segments in which `c` can be away without a wait; just in time when there are none."""
    gone, back = _gone_event(problem, c, hardware), _return_event(problem, c, hardware)
    if gone < back:
        return gone, back
    return min(c.free_event + 1, c.use_event), c.use_event


def _relief(excess: Int64Array, duration_s: Float64Array, window: tuple[int, int], nbytes: int) -> float:
    """Excess bytes removed, weighted by how long they weigh; 0 where the budget already holds."""
    start, stop = window
    removed = np.minimum(np.maximum(excess[start:stop], 0), nbytes)
    return float((removed * (duration_s[start:stop] + 1e-9)).sum()) / max(nbytes, 1)


def _choose(problem: Problem, budget_nbytes: int, hardware: Hardware) -> list[tuple[Candidate, tuple[int, int]]]:
    """Greedy by relief per byte; lazy, since the relief of a candidate only falls while others are chosen."""
    excess = problem.need_nbytes - budget_nbytes
    windows = [_window(problem, c, hardware) for c in problem.candidates]
    queue = [(-_relief(excess, problem.duration_s, windows[i], c.nbytes), i) for i, c in enumerate(problem.candidates)]
    heapq.heapify(queue)
    chosen: list[tuple[Candidate, tuple[int, int]]] = []
    while queue and excess.max(initial=0) > 0:
        _, i = heapq.heappop(queue)
        c = problem.candidates[i]
        relief = _relief(excess, problem.duration_s, windows[i], c.nbytes)
        if relief <= 0:
            continue
        if queue and -queue[0][0] > relief:
            heapq.heappush(queue, (-relief, i))
            continue
        start, stop = windows[i]
        excess[start:stop] -= c.nbytes
        chosen.append((c, windows[i]))
    return chosen


def _give_back(
    problem: Problem, budget_nbytes: int, hardware: Hardware, chosen: list[tuple[Candidate, tuple[int, int]]]
) -> list[Candidate]:
    """Drop choices that later ones made unnecessary, the last chosen first."""
    level = problem.need_nbytes.copy()
    for c, (start, stop) in chosen:
        level[start:stop] -= c.nbytes
    kept = []
    for c, (start, stop) in reversed(chosen):
        without = level[start:stop] + c.nbytes
        if without.max(initial=0) <= budget_nbytes and level.max(initial=0) <= budget_nbytes:
            level[start:stop] = without
        else:
            kept.append(c)
    return sorted(kept, key=lambda c: (c.use_event, c.free_event))


def _time_reloads(
    problem: Problem, budget_nbytes: int, hardware: Hardware, chosen: list[Candidate]
) -> list[tuple[Candidate, int]]:
    """For each choice, in order of use, the earliest event from which it fits until its use."""
    level = problem.need_nbytes.copy()
    for c in chosen:
        level[min(c.free_event + 1, c.use_event) : c.use_event] -= c.nbytes
    timed = []
    for c in chosen:
        read_s = hardware.latency_s + c.nbytes / hardware.read_bytes_per_s
        earliest_s = problem.start_s[c.use_event] - _READ_AHEAD_S - read_s
        lowest = max(
            min(_gone_event(problem, c, hardware), c.use_event), int(np.searchsorted(problem.start_s, earliest_s))
        )
        blocked = np.flatnonzero(level[lowest : c.use_event] + c.nbytes > budget_nbytes)
        trigger = lowest + int(blocked[-1]) + 1 if len(blocked) else lowest
        level[trigger : c.use_event] += c.nbytes
        timed.append((c, min(trigger, c.use_event)))
    return timed
