"""Who takes part: teraio, fio, and the libraries whose environments were named.

Covers opening every contender in a directory, with the environment variables each is to run under.
Does not measure: ``rounds`` does.
Must stay true: whatever cannot be opened becomes a row with its reason; and whatever was opened is closed again.
"""

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..demo.worker_process import worker_environment
from .contender import Contender, ContenderError, Family, Missing
from .fio import FioContender, FioFile
from .fio_memory import ORDINARY, FioMemory, find_huge_pages
from .worker_process import WorkerProcess

ENGINES = ("libaio", "io_uring")

TERAIO: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("teraio, huge pages", "huge", {"THP_MEM_ALLOC_ENABLE": "1"}),
    ("teraio, torch.empty", "torch", {"THP_MEM_ALLOC_ENABLE": "1"}),
    ("teraio, torch.empty, small pages", "torch", {"THP_MEM_ALLOC_ENABLE": "0"}),
)
"""Name, buffers and environment.

Importing teraio sets the variable, and so puts torch's larger tensors on huge pages; torch by itself does not, and the
tensors then lie where O_DIRECT may not reach them. Tensors under 2 MiB are the same in both.
"""


@dataclass(slots=True)
class Lineup:
    """The contenders of a run."""

    contenders: list[Contender] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)


@contextlib.contextmanager
def open_lineup(
    directory: Path,
    *,
    deepspeed: str | None,
    tensornvme: str | None,
    on_opening: Callable[[str], None],
) -> Iterator[Lineup]:
    """All contenders that can be had, open while the block runs.

    Args:
        directory: An empty directory on the file system to measure; everything is written there.
        deepspeed: Interpreter of an environment that has DeepSpeed, or ``None``.
        tensornvme: The same for tensornvme.
        on_opening: Called with each contender's name before it is opened, which may take seconds.
    """
    lineup = Lineup()
    with contextlib.ExitStack() as opened:

        def enter(name: str, family: Family, make: Callable[[], Contender]) -> None:
            on_opening(name)
            try:
                contender = make()
            except ContenderError as error:
                lineup.missing.append(Missing(name, family, str(error)))
            else:
                opened.callback(contender.close)
                lineup.contenders.append(contender)

        for name, family, make in _candidates(directory, deepspeed=deepspeed, tensornvme=tensornvme):
            enter(name, family, make)
        yield lineup


Candidate = tuple[str, Family, Callable[[], Contender]]


def _candidates(directory: Path, *, deepspeed: str | None, tensornvme: str | None) -> Iterator[Candidate]:
    """Every contender there could be, in the order of the tables, with the function that opens it."""
    for name, buffers, variables in TERAIO:
        environment = {**worker_environment(), **variables}
        yield name, "teraio", _worker(name, "teraio", ["teraio", str(directory), buffers], sys.executable, environment)
    yield from _fio_candidates(directory)
    for name, option, interpreter, arguments in (
        ("DeepSpeed, locked tensors", "--deepspeed", deepspeed, ["deepspeed", str(directory), "locked"]),
        ("DeepSpeed, ordinary tensors", "--deepspeed", deepspeed, ["deepspeed", str(directory), "torch"]),
        ("tensornvme", "--tensornvme", tensornvme, ["tensornvme", str(directory)]),
    ):
        if interpreter is None:
            yield name, "peer", _refusing(f"not asked for: name a Python that imports it with {option}")
        else:
            yield name, "peer", _worker(name, "peer", arguments, interpreter, _foreign_environment(interpreter))


def _fio_candidates(directory: Path) -> Iterator[Candidate]:
    """Each engine with ordinary buffers and with huge pages."""
    fio = shutil.which("fio")
    if fio is None:
        for engine in ENGINES:
            yield f"fio {engine}", "fio", _refusing("fio is not installed (on Debian: apt-get install fio)")
        return
    environment = dict(os.environ)
    environment.pop("GLIBC_TUNABLES", None)
    file = FioFile(directory / "fio.bin")
    huge = find_huge_pages(fio, environment)
    for engine in ENGINES:
        for memory in (ORDINARY, huge):
            if isinstance(memory, FioMemory):
                contender = FioContender(fio, engine, memory, file=file, environment=environment)
                yield contender.name, "fio", lambda contender=contender: contender  # type: ignore[misc]
            else:
                yield f"fio {engine}, huge pages", "fio", _refusing(memory)


def _worker(
    name: str, family: Family, arguments: list[str], interpreter: str, environment: Mapping[str, str]
) -> Callable[[], Contender]:
    """A function that starts a worker; ``arguments[1]`` is its directory."""

    def start() -> Contender:
        return WorkerProcess(
            name, family, arguments, interpreter=interpreter, environment=environment, directory=Path(arguments[1])
        )

    return start


def _refusing(reason: str) -> Callable[[], Contender]:
    """A function that says why there is nothing to open."""

    def refuse() -> Contender:
        raise ContenderError(reason)

    return refuse


def _foreign_environment(interpreter: str) -> dict[str, str]:
    """This process's environment without what would lead another environment's interpreter to our modules."""
    environment = dict(os.environ)
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        environment.pop(name, None)
    # Extensions compiled at first use call tools (ninja) that lie beside their interpreter.
    environment["PATH"] = os.pathsep.join([str(Path(interpreter).absolute().parent), environment.get("PATH", "")])
    return environment
