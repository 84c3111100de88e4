"""Replaying a plan on paper: how long a step takes, what waits, and how high memory climbs.

Covers one iteration over events beside a disk. It is pure: no clock, no thread, no tensor. How the disk shares its time
is ``disk``'s. The rules are the runtime's own, in the order in which it applies them at each event:

1. Writes that have ended give their memory back; those that the event triggers join the queue.
2. Reloads start, in order of trigger, as long as their memory fits beside what the segment needs; from then on it
   counts. One whose write has not ended holds back those behind it.
3. The program waits for writes until what the segment needs fits.
4. The storage that the event uses is fetched: read now if its reload has not started; used where it is, and not moved
   at all, if its write has not ended.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from lifetime import Hardware
from teraio.planner.disk import Disk, Transfer
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
    """Transfers as (kind, storage, start in s, end in s), in order of their end."""


class _Place(Enum):
    """Where a storage is."""

    RESIDENT = 0
    LEAVING = 1
    """In memory, its write queued or running."""
    AWAY = 2
    COMING = 3
    """Memory is taken, its read queued or running."""


class _Replay:
    """State of one replay."""

    def __init__(self, problem: Problem, moves: Sequence[Move], hardware: Hardware, budget_nbytes: int) -> None:
        self.problem = problem
        self.budget_nbytes = budget_nbytes
        self.compute_factor = hardware.compute_factor
        self.disk = Disk(hardware)
        self.starting: dict[int, list[Move]] = defaultdict(list)
        self.due: dict[int, list[Move]] = defaultdict(list)
        for move in moves:
            self.starting[move.trigger].append(move)
            if move.kind is MoveKind.RELOAD:
                self.due[move.deadline].append(move)
        self.place: dict[int, _Place] = defaultdict(lambda: _Place.RESIDENT)
        self.transfers: dict[int, Transfer] = {}
        self.waiting: deque[Move] = deque()
        self.now_s = float(problem.start_s[0]) if problem.num_events else problem.step_s
        self.stall_s = 0.0
        self.away_nbytes = 0
        self.peak_nbytes = problem.lead_nbytes
        self.moved_nbytes = {MoveKind.OFFLOAD: 0, MoveKind.RELOAD: 0}
        self.timeline: list[tuple[str, int, float, float]] = []

    def run(self) -> Simulation:
        needs, durations_s = self.problem.need_nbytes.tolist(), self.problem.duration_s.tolist()
        for k, (need_nbytes, duration_s) in enumerate(zip(needs, durations_s, strict=True)):
            if k in self.starting:
                self.take_up(self.starting[k])
            if self.waiting:
                self.start_reloads(k, need_nbytes)
            self.make_room(need_nbytes)
            for move in self.due.get(k, ()):
                self.fetch(move, need_nbytes)
            self.peak_nbytes = max(self.peak_nbytes, need_nbytes - self.away_nbytes)
            self.compute(duration_s)
        return Simulation(
            self.now_s,
            self.stall_s,
            self.peak_nbytes,
            self.moved_nbytes[MoveKind.OFFLOAD],
            self.moved_nbytes[MoveKind.RELOAD],
            tuple(self.timeline),
        )

    # --- moves -------------------------------------------------------------------------------------------------------

    def take_up(self, moves: Sequence[Move]) -> None:
        """The event fires its moves: writes join the queue, reloads wait until they fit."""
        for move in moves:
            if move.kind is MoveKind.RELOAD:
                self.waiting.append(move)
            elif self.place[move.storage] is _Place.RESIDENT:
                if move.kind is MoveKind.OFFLOAD:
                    self.begin(move, _Place.LEAVING)
                else:
                    self.place[move.storage] = _Place.AWAY
                    self.away_nbytes += move.nbytes

    def start_reloads(self, k: int, need_nbytes: int) -> None:
        """Start what fits beside the segment's need; at its deadline a reload is left to `fetch`."""
        while self.waiting:
            move = self.waiting[0]
            place = self.place[move.storage]
            if move.deadline > k and place is _Place.LEAVING:
                return
            if move.deadline > k and place is _Place.AWAY:
                if need_nbytes - self.away_nbytes + move.nbytes > self.budget_nbytes:
                    return
                self.begin(move, _Place.COMING)
            self.waiting.popleft()

    def make_room(self, need_nbytes: int) -> None:
        """Wait for writes, oldest first, until `need_nbytes` fits or nothing more can leave."""
        while self.disk.writes and need_nbytes - self.away_nbytes > self.budget_nbytes:
            self.wait_for(self.disk.writes[0])

    def fetch(self, move: Move, need_nbytes: int) -> None:
        """The program is about to use the storage: it goes on when the storage is in memory."""
        place = self.place[move.storage]
        if place is _Place.LEAVING:  # used where it is; a write that has not begun never does
            self.place[move.storage] = _Place.RESIDENT
            transfer = self.transfers[move.storage]
            if self.disk.cancel(transfer):
                self.moved_nbytes[transfer.move.kind] -= transfer.move.nbytes
        if place is _Place.AWAY:
            self.make_room(need_nbytes + move.nbytes)
            self.begin(move, _Place.COMING)
        if self.place[move.storage] is _Place.COMING:
            self.disk.hurry(self.transfers[move.storage])
            self.wait_for(self.transfers[move.storage])

    def begin(self, move: Move, place: _Place) -> None:
        self.place[move.storage] = place
        if place is _Place.COMING:
            self.away_nbytes -= move.nbytes
        self.moved_nbytes[move.kind] += move.nbytes
        self.transfers[move.storage] = self.disk.add(move, self.now_s)

    def ended(self, transfer: Transfer) -> None:
        move = transfer.move
        self.timeline.append((move.kind.value, move.storage, transfer.start_s, self.now_s))
        if move.kind is MoveKind.RELOAD:
            self.place[move.storage] = _Place.RESIDENT
        elif self.place[move.storage] is _Place.LEAVING:
            self.place[move.storage] = _Place.AWAY
            self.away_nbytes += move.nbytes

    # --- time --------------------------------------------------------------------------------------------------------

    def compute(self, duration_s: float) -> None:
        """Run a segment; it is slower while the disk works, where the hardware says so."""
        while self.disk.is_busy and duration_s > 0:
            passing_s = min(duration_s / self.compute_factor, self.disk.next_end_s())
            duration_s -= passing_s * self.compute_factor
            self.pass_time(passing_s)
        self.now_s += max(0.0, duration_s)

    def wait_for(self, transfer: Transfer) -> None:
        """The program stands still until `transfer` has ended."""
        while not transfer.done:
            passing_s = self.disk.next_end_s()
            self.stall_s += passing_s
            self.pass_time(passing_s)

    def pass_time(self, passing_s: float) -> None:
        self.now_s += passing_s
        for transfer in self.disk.work(passing_s, self.now_s):
            self.ended(transfer)


def replay(problem: Problem, moves: Sequence[Move], hardware: Hardware, budget_nbytes: int) -> Simulation:
    """Replay `moves` on `problem` with the speeds of `hardware`; memory above `budget_nbytes` waits for writes."""
    return _Replay(problem, moves, hardware, budget_nbytes).run()
