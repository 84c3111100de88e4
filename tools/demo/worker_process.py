"""A segment's worker process, seen from the parent: started, listened to, its memory sampled, its death explained.

Covers one process from start to end.
Does not know the order of segments or what their numbers mean: ``comparison`` does.
Must stay true: a worker never outlives the call that started it, and never ends without either a record or an error
that says which mode, which step and why.
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from ..errors import CommandError, UsageError
from .process_facts import AnonymousMemory
from .spec import SegmentSpec

SAMPLING_INTERVAL_S = 0.02
"""The level of a step's peak lasts longer and comes back every step; a reading takes time from the training's cores."""

SILENCE_LIMIT_S = 900.0
"""A worker that reports nothing for so long hangs."""

GRACE_S = 10.0
"""Time for a worker to clean up its files once it is told to end."""

_STDERR_TAIL_LINES = 12

OnStep = Callable[[SegmentSpec, int, float], None]
"""Called after each step with the segment, the number of steps done, and the step's seconds."""


@dataclass(kw_only=True, slots=True)
class SegmentRecord:
    """What one segment reported."""

    spec: SegmentSpec
    """What was run."""
    losses: list[str] = field(default_factory=list)
    """Loss of each timed step, as a hexadecimal float: equal strings are equal bits."""
    step_times_s: list[float] = field(default_factory=list)
    """Seconds of each timed step."""
    rss_baseline_nbytes: int = 0
    """Anonymous memory before there was a model, bytes."""
    rss_peak_nbytes: int = 0
    """Peak of anonymous memory from there to the end of the timed steps, bytes."""
    device_peak_nbytes: int | None = None
    """Peak of what CUDA's allocator handed out, bytes; ``None`` on CPU."""
    budget_nbytes: int | None = None
    """The budget in bytes, where the worker knew one."""
    weights_sha256: str = ""
    """Hash of the weights after the timed steps."""
    peak_nbytes: int | None = None
    """Peak of live tensor bytes, by ``lifetime.Recorder``; ``None`` without measuring steps."""
    session_peak_nbytes: int | None = None
    """The session's own figure for it, over all its steps; ``None`` in plain mode."""
    report: dict[str, Any] | None = None
    """The session's report over the timed steps; ``None`` in plain mode."""
    torch: str = ""
    """Version of torch."""
    threads: int = 0
    """Threads torch computes with."""

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain values for JSON."""
        return asdict(self)


def run_worker(spec: SegmentSpec, on_step: OnStep, *, argv: Sequence[str] | None = None) -> SegmentRecord:
    """Run one segment in a process of its own. Blocks until it has ended.

    Args:
        spec: What to run.
        on_step: Called in this thread after each step, the measuring ones included.
        argv: Another program to run in place of the worker (for tests).

    Returns:
        What the worker reported.

    Raises:
        UsageError: The worker says it was asked for wrongly.
        CommandError: The worker failed, was killed, or fell silent. It no longer runs.
    """
    command = argv or [sys.executable, "-m", f"{__package__}.worker", spec.to_json()]
    with tempfile.TemporaryFile() as stderr, _process(command, stderr) as process:
        listener = _Listener(SegmentRecord(spec=spec), on_step)
        with AnonymousMemory(process.pid) as memory:
            _listen(process, memory, listener)
        exit_status = _end(process)
        if not listener.is_done:
            raise CommandError(f"{listener.place}: the worker {_death(exit_status)}{_last_words(stderr)}")
    return listener.record


class _Listener:
    """Takes a worker's events into its record.

    Thread safety: one thread.
    Invariants: ``num_steps`` counts the steps reported, timed and measuring; ``is_training`` holds from the baseline to
    the end of the timed steps.
    """

    def __init__(self, record: SegmentRecord, on_step: OnStep) -> None:
        self.record = record
        self.num_steps = 0
        self.is_training = False
        self.is_done = False
        self.has_started = False
        self._on_step = on_step

    @property
    def place(self) -> str:
        """Where the worker is, as a message says it."""
        spec = self.record.spec
        num_steps = spec.steps + spec.measuring_steps
        step = (
            f"step {min(self.num_steps + 1, num_steps)} of {num_steps}" if self.has_started else "before the first step"
        )
        return f"{spec.name} mode, {step}"

    def take(self, event: dict[str, Any]) -> None:
        """Take one event in; raises the error it reports, if it reports one."""
        match event.pop("event"):
            case "baseline":
                self.has_started = self.is_training = True
                self.record.rss_baseline_nbytes = event.pop("rss_nbytes")
                self._keep(event)
            case "step":
                self._take_step(event["loss"], event["step_s"], event["measuring"])
            case "trained":
                self.is_training = False
                self._keep(event)
            case "done":
                self.is_done = True
                self._keep(event)
            case "error":
                if event["usage"]:
                    raise UsageError(event["message"])
                raise CommandError(f"{self.place}: {event['message']}")
            case name:
                raise AssertionError(f"a worker reported an event nobody knows: {name}")

    def _take_step(self, loss: str, step_s: float, measuring: bool) -> None:
        """Count one step, and keep its loss and time if it was a timed one."""
        self.num_steps += 1
        if not measuring:
            self.record.losses.append(loss)
            self.record.step_times_s.append(step_s)
        self._on_step(self.record.spec, self.num_steps, step_s)

    def _keep(self, values: dict[str, Any]) -> None:
        """Keep an event's values under the same names in the record."""
        for name, value in values.items():
            setattr(self.record, name, value)


@contextmanager
def _process(command: Sequence[str], stderr: IO[bytes]) -> "Iterator[subprocess.Popen[bytes]]":
    """The running worker; whatever happens inside the block, it has ended when the block is left."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, env=worker_environment(), bufsize=0
    )
    try:
        yield process
    finally:
        if process.stdout is not None:
            process.stdout.close()  # a worker still at work ends at its next event
        _end(process)


def _end(process: "subprocess.Popen[bytes]") -> int:
    """The worker's exit status: given time to end by itself, then interrupted, which cleans up, then killed."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            return process.wait(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            process.send_signal(number)
    return process.wait()


def worker_environment() -> dict[str, str]:
    """This process's environment, in which a worker finds this package: the same for every mode.

    An installed package is found anyway. In the source tree it is found by the tree's root, which this process may have
    from elsewhere than its environment.
    """
    environment = dict(os.environ)
    package = (__package__ or "").partition(".")[0]
    if package == "tools":
        root = str(Path(__file__).resolve().parents[2])
        inherited = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([root, inherited] if inherited else [root])
    return environment


def _listen(process: "subprocess.Popen[bytes]", memory: AnonymousMemory, listener: _Listener) -> None:
    """Take the worker's events in until it closes its stdout, and sample its memory while it trains."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    pending = b""
    heard_s = time.monotonic()
    while True:
        readable, _, _ = select.select([descriptor], [], [], SAMPLING_INTERVAL_S)
        if listener.is_training:
            memory.sample()
            listener.record.rss_peak_nbytes = memory.peak_nbytes
        if not readable:
            if time.monotonic() - heard_s > SILENCE_LIMIT_S:
                raise CommandError(f"{listener.place}: the worker reported nothing for {SILENCE_LIMIT_S:.0f} s")
            continue
        chunk = os.read(descriptor, 1 << 16)
        if not chunk:
            return
        heard_s = time.monotonic()
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            listener.take(json.loads(line))


def _death(exit_status: int) -> str:
    """How a process ended, in words."""
    if exit_status >= 0:
        return f"ended with exit code {exit_status} without a result"
    try:
        name = signal.Signals(-exit_status).name
    except ValueError:
        name = f"signal {-exit_status}"
    cause = ", as the kernel does when a memory limit is exceeded" if name == "SIGKILL" else ""
    return f"was killed by {name}{cause}"


def _last_words(stderr: IO[bytes]) -> str:
    """The end of what the worker wrote to stderr, indented on lines of its own; empty if it wrote nothing."""
    stderr.seek(0)
    lines = stderr.read().decode(errors="replace").splitlines()[-_STDERR_TAIL_LINES:]
    return "".join(f"\n  {line}" for line in lines)
