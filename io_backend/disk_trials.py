"""Measuring how fast a directory is, with the store that will use it.

Covers rates in each direction and both at once, the latency of one small request, processor time, and which call size
and how many threads do best. It saves nothing and decides nothing: ``calibration`` does.

Rules:
- Everything goes through the real store, from recycled buffers on huge pages, onto space that was written before:
  that is the steady state of training.
- Rounds of different trials alternate, so that a disk whose speed drifts does not favour one of them.
- Reads and writes use different parts of the file: none waits for the other because of order.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import queue
import random
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from io_backend.buffers import Memory, aligned_memory, copy_bytes, resolve
from io_backend.store import Priority

if TYPE_CHECKING:
    from io_backend.posix_store import PosixStore
    from io_backend.store import Extent, Operation
    from io_backend.ticket import Ticket

    _Ended: TypeAlias = tuple[Operation, Memory, Ticket]

_MIB = 1 << 20
MOST_THREADS = 4
_THREADS = (2, 1, 4)  # the default first: on a disk too slow for the whole sweep it is at least known
_CHUNKS_NBYTES = (16 * _MIB, 4 * _MIB, 1 * _MIB)
_UNIT_NBYTES = 16 * _MIB
_LEAST_UNITS = 2 * MOST_THREADS  # so that what is in flight never meets on one extent
_SMALL_NBYTES = 4096
_NUM_SMALL = 64
_MOST_SMALL_READS = 400
_MOST_ROUNDS = 5
_LEAST_ROUNDS = 2
_TOLERANCE = 0.05
_GB = 1e9


class Rate(NamedTuple):
    """What one trial found."""

    nbytes_by_operation: Mapping[Operation, int]
    elapsed_s: float
    cpu_s: float

    def bytes_per_s(self, operation: Operation) -> float:
        """Of one direction."""
        return self.nbytes_by_operation.get(operation, 0) / self.elapsed_s


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """All that was measured in one directory; medians over rounds, see `DeviceCalibration` for the fields."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    mixed_read_bytes_per_s: float
    mixed_write_bytes_per_s: float
    mixed_factor: float
    latency_s: float
    chunk_nbytes: int
    num_threads: int
    read_cpu_s_per_gb: float
    write_cpu_s_per_gb: float
    read_noise: float
    write_noise: float
    mixed_noise: float


def span_nbytes(free_nbytes: int, most_nbytes: int) -> int:
    """How much of a file system to use for trials: a tenth of what is free, whole units, no more than allowed."""
    wanted_nbytes = min(most_nbytes, free_nbytes // 10)
    return wanted_nbytes // (_LEAST_UNITS * _MIB) * (_LEAST_UNITS * _MIB)


class DiskTrials:
    """Trials on one open store, which the caller closes.

    Thread safety: one thread.
    """

    def __init__(self, store: PosixStore, *, span_nbytes: int, seconds: float) -> None:
        """Take space in the store.

        Args:
            store: Nobody else uses it; with at least `MOST_THREADS` workers.
            span_nbytes: From `span_nbytes`, more than 0.
            seconds: What all trials together should take. A slow disk takes longer: each needs a few transfers.

        Raises:
            StorageFullError: The space is not there.
        """
        self._store = store
        self._seconds = seconds
        self._started_s = time.monotonic()
        self._unit_nbytes = min(_UNIT_NBYTES, span_nbytes // _LEAST_UNITS // _MIB * _MIB)
        num_units = max(_LEAST_UNITS, span_nbytes // self._unit_nbytes)
        self._small: list[Extent] = []
        self._large: list[Extent] = []
        for number in range(num_units):  # small ones between the large, so that they lie apart
            self._large.append(store.allocate(self._unit_nbytes))
            if number < _NUM_SMALL:
                self._small.append(store.allocate(_SMALL_NBYTES))
        self._buffers = [_noise(self._unit_nbytes) for _ in range(MOST_THREADS)]
        self._turns: dict[Operation, Iterator[Extent]] = {}

    def run(self) -> Findings:
        """Measure everything.

        Raises:
            BackendError: A transfer failed.
            TimeoutError: A transfer did not end.
        """
        self._fill()
        latency_s = self._latency_s()
        chunk_nbytes, num_threads = self._sweep(until_s=0.5 * self._seconds)
        self._use_chunk(chunk_nbytes)
        rounds = self._rounds(num_threads)
        reads = [rates[0].bytes_per_s("read") for rates in rounds]
        writes = [rates[1].bytes_per_s("write") for rates in rounds]
        mixed_reads = [rates[2].bytes_per_s("read") for rates in rounds]
        mixed_writes = [rates[2].bytes_per_s("write") for rates in rounds]
        read, write = statistics.median(reads), statistics.median(writes)
        shares = [r / read + w / write for r, w in zip(mixed_reads, mixed_writes, strict=True)]
        return Findings(
            read_bytes_per_s=read,
            write_bytes_per_s=write,
            mixed_read_bytes_per_s=statistics.median(mixed_reads),
            mixed_write_bytes_per_s=statistics.median(mixed_writes),
            mixed_factor=min(1.0, max(0.05, statistics.median(shares) / 2)),
            latency_s=latency_s,
            chunk_nbytes=chunk_nbytes,
            num_threads=num_threads,
            read_cpu_s_per_gb=_cpu_s_per_gb([rates[0] for rates in rounds]),
            write_cpu_s_per_gb=_cpu_s_per_gb([rates[1] for rates in rounds]),
            read_noise=_spread(reads),
            write_noise=_spread(writes),
            mixed_noise=_spread([r + w for r, w in zip(mixed_reads, mixed_writes, strict=True)]),
        )

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def _fill(self) -> None:
        """Write the space once; on a slow disk only as much of it as time allows."""
        pending: list[Ticket] = []
        for number, extent in enumerate(self._large):
            if number >= _LEAST_UNITS and self._elapsed_s() > 0.25 * self._seconds:
                for unused in self._large[number:]:
                    self._store.free(unused)
                del self._large[number:]
                break
            pending.append(self._submit("write", extent, self._buffers[number % len(self._buffers)]))
            if len(pending) == 2:
                pending.pop(0).wait()
        small = self._buffers[0].part(0, _SMALL_NBYTES)
        pending += [self._submit("write", extent, small) for extent in self._small]
        for ticket in pending:
            ticket.wait()
        half = len(self._large) // 2
        self._turns = {"write": itertools.cycle(self._large[:half]), "read": itertools.cycle(self._large[half:])}

    def _latency_s(self) -> float:
        """Median over single small reads, queue and threads included, in an order the disk cannot guess."""
        memory = aligned_memory(_SMALL_NBYTES)
        chooser = random.Random(0)
        took_s: list[float] = []
        started_s = time.monotonic()
        while len(took_s) < _MOST_SMALL_READS and (
            len(took_s) < _LEAST_ROUNDS or time.monotonic() - started_s < 0.1 * self._seconds
        ):
            extent = chooser.choice(self._small)
            before_s = time.perf_counter()
            self._submit("read", extent, memory).wait()
            took_s.append(time.perf_counter() - before_s)
        return statistics.median(took_s)

    def _sweep(self, *, until_s: float) -> tuple[int, int]:
        """The call size and number of threads that cost least processor time among those near the fastest."""
        chunks = list(dict.fromkeys(min(chunk, self._unit_nbytes) for chunk in _CHUNKS_NBYTES))
        settings = list(itertools.product(chunks, _THREADS))
        trial_s = max(0.0, until_s - self._elapsed_s()) / (2 * 2 * len(settings))
        found: dict[tuple[int, int], list[Rate]] = {}
        for _ in range(2):
            for chunk_nbytes, num_threads in settings:
                if found and self._elapsed_s() > until_s:
                    break
                self._use_chunk(chunk_nbytes)
                rates = found.setdefault((chunk_nbytes, num_threads), [])
                rates.append(self._trial({"write": num_threads}, trial_s))
                rates.append(self._trial({"read": num_threads}, trial_s))
        return choose(found)

    def _rounds(self, num_threads: int) -> list[tuple[Rate, Rate, Rate]]:
        """Reads alone, writes alone, both at once; again and again for as long as there is time."""
        left_s = max(0.0, self._seconds - self._elapsed_s())
        trial_s = left_s / (3 * _MOST_ROUNDS)
        each_way = max(1, num_threads // 2)
        rounds: list[tuple[Rate, Rate, Rate]] = []
        while len(rounds) < _LEAST_ROUNDS or (len(rounds) < _MOST_ROUNDS and self._elapsed_s() < self._seconds):
            read = self._trial({"read": num_threads}, trial_s)
            write = self._trial({"write": num_threads}, trial_s)
            rounds.append((read, write, self._trial({"read": each_way, "write": each_way}, trial_s)))
        return rounds

    def _use_chunk(self, chunk_nbytes: int) -> None:
        self._store.config = dataclasses.replace(self._store.config, chunk_nbytes=chunk_nbytes)

    def _trial(self, in_flight: Mapping[Operation, int], duration_s: float) -> Rate:
        """Keep so many transfers of each direction running for a while, then let them end."""
        ended: queue.SimpleQueue[_Ended] = queue.SimpleQueue()
        moved: dict[Operation, int] = dict.fromkeys(in_flight, 0)
        buffers = iter(self._buffers)

        def start(operation: Operation, memory: Memory) -> None:
            ticket = self._submit(operation, next(self._turns[operation]), memory)
            ticket.add_done_callback(lambda done: ended.put((operation, memory, done)))

        started_s, cpu_before_s = time.perf_counter(), time.process_time()
        num_running = 0
        for operation, count in in_flight.items():
            for _ in range(count):
                start(operation, next(buffers))
                num_running += 1
        while num_running:
            operation, memory, ticket = self._next_of(ended)
            ticket.wait()  # it has ended: this raises what it failed with
            moved[operation] += ticket.nbytes
            if time.perf_counter() - started_s < duration_s:
                start(operation, memory)
            else:
                num_running -= 1
        return Rate(moved, time.perf_counter() - started_s, time.process_time() - cpu_before_s)

    def _next_of(self, ended: queue.SimpleQueue[_Ended]) -> _Ended:
        limit_s = self._store.config.io_timeout_s
        try:
            return ended.get(timeout=limit_s)
        except queue.Empty:
            raise TimeoutError(
                f"no transfer in {self._store.file.name} ended within {limit_s:g} s while measuring; check the device"
            ) from None

    def _submit(self, operation: Operation, extent: Extent, memory: Memory) -> Ticket:
        # Urgent, because background writes leave one worker free and would count one thread too few.
        return self._store.submit(operation, extent, memory, Priority.URGENT, None)


def choose(found: Mapping[tuple[int, int], list[Rate]]) -> tuple[int, int]:
    """The setting, (chunk in bytes, threads), that costs least processor time among those near the fastest.

    Args:
        found: What each setting's trials gave: equally many of each direction, so that times may be added.
    """
    speeds, costs = {}, {}
    for setting, rates in found.items():
        nbytes = sum(sum(rate.nbytes_by_operation.values()) for rate in rates)
        # Time for the same bytes in each direction: a trial that happened to move more must not weigh more.
        speeds[setting] = 1 / sum(rate.elapsed_s / sum(rate.nbytes_by_operation.values()) for rate in rates)
        speeds[setting] *= len(rates)
        costs[setting] = sum(rate.cpu_s for rate in rates) / nbytes
    fastest = max(speeds.values())
    near = [setting for setting, speed in speeds.items() if speed >= (1 - _TOLERANCE) * fastest]
    return min(near, key=lambda setting: (costs[setting], setting[1]))


def _noise(nbytes: int) -> Memory:
    """A buffer whose every page is there, with bytes that a compressing disk gains nothing on."""
    memory = aligned_memory(nbytes)
    pattern = os.urandom(_MIB)
    source = resolve(pattern)
    for start in range(0, nbytes, _MIB):
        copy_bytes(memory.address + start, source.address, min(_MIB, nbytes - start))
    return memory


def _cpu_s_per_gb(rates: list[Rate]) -> float:
    nbytes = sum(sum(rate.nbytes_by_operation.values()) for rate in rates)
    return sum(rate.cpu_s for rate in rates) / (nbytes / _GB)


def _spread(values: list[float]) -> float:
    return (max(values) - min(values)) / statistics.median(values)
