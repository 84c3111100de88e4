"""The main loop of a worker: a command per line on stdin, an answer per line on stdout.

Covers opening the contender that the arguments name, the commands ``prepare``, ``measure`` and ``release``, and errors.
Does not know any library: the ``*_worker`` modules do.
Must stay true: every command gets exactly one answer, also when it fails; the end of stdin ends the process.
"""

import importlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from .case import Case
from .clock import Measurement


class WorkerContender(Protocol):
    """What is measured in this process. One case is prepared at a time."""

    def describe(self) -> str:
        """One line: the library's version and the settings it runs with."""

    def prepare(self, case: Case) -> None:
        """Make buffers and files, and write every byte that will be read or overwritten."""

    def measure(self) -> Measurement:
        """Run the prepared case once."""

    def release(self) -> None:
        """Drop what ``prepare`` made."""

    def close(self) -> None:
        """Give everything back."""


def main(argv: list[str]) -> int:
    """Serve ``argv[0]``, the name of a module's contender, in the directory ``argv[1]`` with the options after it."""
    name, directory, *options = argv
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print; the channel is for answers alone

    def answer(**values: object) -> None:
        channel.write(json.dumps(values) + "\n")
        channel.flush()

    try:
        module = importlib.import_module(f".{name}_worker", __package__)
        contender: WorkerContender = module.open_contender(Path(directory), *options)
        description = contender.describe()
    except Exception as error:
        answer(error=_one_line(error))
        return 1
    answer(description=description)
    try:
        for line in sys.stdin:
            try:
                values = _obey(contender, json.loads(line))
            except Exception as error:
                answer(error=_one_line(error))
            else:
                answer(**values)
    finally:
        contender.close()
    return 0


def _obey(contender: WorkerContender, command: dict[str, Any]) -> dict[str, Any]:
    """Carry one command out; the values of its answer."""
    match command["command"]:
        case "prepare":
            contender.prepare(Case(**command["case"]))
        case "measure":
            return asdict(contender.measure())
        case "release":
            contender.release()
        case name:
            raise ValueError(f"unknown command {name!r}")
    return {}


def _one_line(error: Exception) -> str:
    """An error as a table can show it."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
