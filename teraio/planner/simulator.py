"""Replaying a plan on paper: how long a step takes, what waits, and how high memory climbs.

Covers one iteration over events with a read queue and a write queue. It is pure: no clock, no thread, no tensor. The
rules: memory counts as gone only when its write has ended; memory of a reload counts from its start; an event waits
until the memory that its segment needs is there and the storage it uses is back.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from lifetime import Hardware
from teraio.planner.plan import Move, MoveKind
from teraio.planner.problem import Problem


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a plan comes to."""

    step_s: float
    stall_s: float
    peak_nbytes: int
    written_nbytes: int
    read_nbytes: int
    timeline: tuple[tuple[str, int, float, float], ...]
    """Transfers as (kind, storage, start in s, end in s)."""


class _Replay:
    """State of one replay."""

    def __init__(self, problem: Problem, moves: Sequence[Move], hardware: Hardware, budget_nbytes: int) -> None:
        self.problem = problem
        self.hardware = hardware
        self.budget_nbytes = budget_nbytes
        self.starting: dict[int, list[Move]] = defaultdict(list)
        self.due: dict[int, list[Move]] = defaultdict(list)
        for move in moves:
            self.starting[move.trigger].append(move)
            if move.kind is MoveKind.RELOAD:
                self.due[move.deadline].append(move)
        self.now_s = 0.0
        self.stall_s = 0.0
        self.away_nbytes = 0
        self.peak_nbytes = 0
        self.free_s = {MoveKind.OFFLOAD: 0.0, MoveKind.RELOAD: 0.0}
        self.writing: list[tuple[float, int]] = []
        self.ends_s: dict[int, float] = {}
        self.waiting: list[Move] = []
        self.timeline: list[tuple[str, int, float, float]] = []

    def run(self) -> Simulation:
        problem = self.problem
        for k in range(problem.num_events):
            for move in self.starting[k]:
                self.start(move, k)
            self.start_waiting_reloads(k)
            self.make_room(int(problem.need_nbytes[k]))
            for move in self.due[k]:
                self.finish_reload(move)
            self.peak_nbytes = max(self.peak_nbytes, int(problem.need_nbytes[k]) - self.away_nbytes)
            self.now_s += float(problem.duration_s[k])
        lead_s = float(problem.start_s[0]) if problem.num_events else problem.step_s
        written = sum(m.nbytes for ms in self.starting.values() for m in ms if m.kind is MoveKind.OFFLOAD)
        read = sum(m.nbytes for ms in self.starting.values() for m in ms if m.kind is MoveKind.RELOAD)
        return Simulation(self.now_s + lead_s, self.stall_s, self.peak_nbytes, written, read, tuple(self.timeline))

    def start(self, move: Move, k: int) -> None:
        if move.kind is MoveKind.OFFLOAD:
            self.writing.append((self.transfer(move, self.hardware.write_bytes_per_s), move.nbytes))
        elif move.kind is MoveKind.DROP:
            self.away_nbytes += move.nbytes
        else:
            self.waiting.append(move)

    def start_waiting_reloads(self, k: int) -> None:
        """Reloads start as soon as their memory fits beside what the segment needs."""
        self.settle_writes()
        for move in list(self.waiting):
            level = int(self.problem.need_nbytes[k]) - self.away_nbytes
            if level + move.nbytes > self.budget_nbytes and move.deadline > k:
                break
            self.waiting.remove(move)
            self.begin_reload(move)

    def begin_reload(self, move: Move) -> None:
        self.away_nbytes -= move.nbytes
        self.ends_s[move.storage] = self.transfer(move, self.hardware.read_bytes_per_s)

    def transfer(self, move: Move, bytes_per_s: float) -> float:
        start_s = max(self.now_s, self.free_s[move.kind])
        end_s = start_s + self.hardware.latency_s + move.nbytes / bytes_per_s
        self.free_s[move.kind] = end_s
        self.timeline.append((move.kind.value, move.storage, start_s, end_s))
        return end_s

    def settle_writes(self) -> None:
        while self.writing and self.writing[0][0] <= self.now_s:
            self.away_nbytes += self.writing.pop(0)[1]

    def make_room(self, need_nbytes: int) -> None:
        self.settle_writes()
        while self.writing and need_nbytes - self.away_nbytes > self.budget_nbytes:
            self.wait_until(self.writing[0][0])
            self.settle_writes()

    def finish_reload(self, move: Move) -> None:
        if move in self.waiting:
            self.waiting.remove(move)
            self.begin_reload(move)
        self.wait_until(self.ends_s.get(move.storage, self.now_s))

    def wait_until(self, moment_s: float) -> None:
        if moment_s > self.now_s:
            self.stall_s += moment_s - self.now_s
            self.now_s = moment_s


def replay(problem: Problem, moves: Sequence[Move], hardware: Hardware, budget_nbytes: int) -> Simulation:
    """Replay `moves` on `problem` with the speeds of `hardware`; memory above `budget_nbytes` waits for writes."""
    return _Replay(problem, moves, hardware, budget_nbytes).run()
