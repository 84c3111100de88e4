"""A contender in a process of its own, seen from the parent.

Covers starting a worker under any interpreter, its commands and answers, and its death.
Does not know what it measures: the modules of ``workers`` do.
Must stay true: no worker outlives ``close``, and none is waited for without a limit.
"""

import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .contender import ContenderError, Family
from .workers.case import Case
from .workers.clock import Measurement

OPENING_LIMIT_S = 1800.0
"""A library may compile itself when it is first loaded."""

ANSWER_LIMIT_S = 600.0
GRACE_S = 10.0
_STDERR_TAIL_LINES = 3

# Imports the package of workers by its place, under a name of its own: under another environment's interpreter the rest
# of the tree must not be found, and a folder on `sys.path` could hide that environment's modules.
_START = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("bench_workers", sys.argv[1])
package = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = package
spec.loader.exec_module(package)
from bench_workers.serve import main
sys.exit(main(sys.argv[2:]))
"""


class WorkerProcess:
    """One worker and the contender in it.

    Thread safety: one thread.
    """

    def __init__(
        self,
        name: str,
        family: Family,
        arguments: Sequence[str],
        *,
        interpreter: str,
        environment: Mapping[str, str],
        directory: Path,
    ) -> None:
        """Start the worker and wait until its contender is open.

        Args:
            name: As tables show it.
            family: Whose contender it is.
            arguments: What ``workers.serve`` takes.
            interpreter: The Python to run it.
            environment: All of its environment variables.
            directory: Its working directory.

        Raises:
            ContenderError: It could not be started or opened. Nothing runs any more.
        """
        self.name = name
        self.family: Family = family
        self.description = ""
        self._pending = b""
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        package = Path(__file__).with_name("workers") / "__init__.py"
        try:
            self._process = subprocess.Popen(
                [interpreter, "-c", _START, str(package), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=dict(environment),
                cwd=directory,
                bufsize=0,
            )
        except OSError as error:
            self._stderr.close()
            raise ContenderError(f"cannot start {interpreter}: {error.strerror}") from error
        try:
            self.description = str(self._answer(OPENING_LIMIT_S)["description"])
        except BaseException:
            self.close()
            raise

    def prepare(self, case: Case) -> None:
        """Have the worker prepare the case."""
        self._command("prepare", case=case.to_dict())

    def measure(self) -> Measurement:
        """Have the worker run the case."""
        return Measurement(**self._command("measure"))

    def release(self) -> None:
        """Have the worker drop the case."""
        self._command("release")

    def close(self) -> None:
        """End the worker: it is given time to clean up, then killed. Idempotent."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._end()
        self._process.stdout.close()
        self._stderr.close()

    def _end(self) -> int:
        """The worker's exit status: given time to end by itself, then killed."""
        try:
            return self._process.wait(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _command(self, command: str, **values: object) -> dict[str, Any]:
        """Send one command; its answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"command": command, **values}).encode() + b"\n")
        except (OSError, ValueError) as error:
            raise ContenderError(f"its process has ended{self._last_words()}") from error
        return self._answer(ANSWER_LIMIT_S)

    def _answer(self, limit_s: float) -> dict[str, Any]:
        """The next line of the worker; raises ``ContenderError`` with the error it reports, if it reports one."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline_s = time.monotonic() + limit_s
        while b"\n" not in self._pending:
            left_s = max(0.0, deadline_s - time.monotonic())
            if not select.select([descriptor], [], [], left_s)[0]:
                self._process.kill()
                raise ContenderError(f"its process did not answer for {limit_s:.0f} s")
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                raise ContenderError(f"its process ended with status {self._end()}{self._last_words()}")
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ContenderError(str(answer["error"]))
        return answer

    def _last_words(self) -> str:
        """The end of what the worker wrote to stderr, on the same line; empty if it wrote nothing."""
        if self._stderr.closed:
            return ""
        self._stderr.seek(0)
        lines = [line.strip() for line in self._stderr.read().decode(errors="replace").splitlines() if line.strip()]
        return ": " + " / ".join(lines[-_STDERR_TAIL_LINES:]) if lines else ""
