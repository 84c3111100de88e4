"""The process that runs one segment: ``python -m <package>.worker SPEC``, where SPEC is a ``SegmentSpec`` as JSON.

Covers the channel to the parent (one JSON object per line on stdout) and the errors that a user can do something about.
Does not train: ``segment`` does.
Must stay true: this module imports neither torch nor teraio. In teraio mode teraio is imported before torch, because it
prepares torch's allocator; in plain mode it is not imported at all.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import TextIO

from ..errors import CommandError, UsageError
from .segment import run_segment
from .spec import SegmentSpec

_CPU_OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory"
"""torch's own out-of-memory error covers CUDA alone; on CPU it is a ``RuntimeError`` that says this."""


def main(argv: list[str]) -> int:
    """Run the segment given in ``argv[1]`` and report it on stdout; returns the exit code."""
    channel = _take_stdout()
    spec = SegmentSpec.from_json(argv[1])
    emit = _emitter(channel)
    try:
        run_segment(spec, emit)
    except Exception as error:
        failure = as_command_error(error)
        if failure is None:
            raise
        emit("error", message=str(failure), usage=isinstance(failure, UsageError))
        return failure.exit_code
    return 0


def as_command_error(error: Exception) -> CommandError | None:
    """What to tell the user about ``error`` in one line; ``None`` if it is a bug, which keeps its traceback."""
    if isinstance(error, CommandError):
        return error
    torch, teraio, io_backend = (sys.modules.get(name) for name in ("torch", "teraio", "io_backend"))
    message = " ".join(str(error).split())
    if teraio is not None and isinstance(error, teraio.ConfigError):
        return UsageError(message)
    if teraio is not None and isinstance(error, teraio.TeraioError):
        return CommandError(message)
    if io_backend is not None and isinstance(error, io_backend.BackendError):
        return CommandError(message)
    if torch is not None and (isinstance(error, torch.OutOfMemoryError) or _CPU_OUT_OF_MEMORY in message):
        return CommandError(f"out of memory: {message}")
    return None


def _take_stdout() -> TextIO:
    """The process's stdout for events alone; whatever else prints goes to stderr from here on."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return channel


def _emitter(channel: TextIO) -> Callable[..., None]:
    """A function that writes one event per line to ``channel``, at once."""

    def emit(event: str, **values: object) -> None:
        channel.write(json.dumps({"event": event, **values}) + "\n")
        channel.flush()

    return emit


if __name__ == "__main__":
    sys.exit(main(sys.argv))
