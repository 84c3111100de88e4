"""The clock of a worker, and the threads that run its streams.

Covers elapsed time, processor time of the whole process, and running several streams at once.
Does not prepare or check anything: contenders do, before the clock starts and after it stopped.
Must stay true: what is between the two readings is the measured work alone.
"""

import contextlib
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Measurement:
    """What one run of a case took."""

    elapsed_s: float = 0.0
    cpu_s: float = 0.0
    """User and system seconds of the process, all its threads together."""


@contextlib.contextmanager
def timed() -> Iterator[Measurement]:
    """Measure the block; the numbers are there when it ends."""
    measurement = Measurement()
    cpu_before_s = _cpu_s()
    started_s = time.perf_counter()
    yield measurement
    measurement.elapsed_s = time.perf_counter() - started_s
    measurement.cpu_s = _cpu_s() - cpu_before_s


def run_together(streams: Sequence[Callable[[], None]]) -> None:
    """Run all at the same time, the first in this thread; raises what the first that failed raised."""
    errors: list[BaseException] = []

    def run(stream: Callable[[], None]) -> None:
        try:
            stream()
        except BaseException as error:  # it belongs to the caller, in whichever thread it arose
            errors.append(error)

    threads = [threading.Thread(target=run, args=(stream,)) for stream in streams[1:]]
    for thread in threads:
        thread.start()
    run(streams[0])
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _cpu_s() -> float:
    """Processor seconds this process has used so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
