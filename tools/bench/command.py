"""The options of ``teraio bench``, and what they make it do.

Covers argument parsing, the working directory, and writing the result to files.
Does not measure or lay out anything: ``rounds`` and ``render`` do.
Must stay true: this process imports neither torch nor teraio; its contenders run in processes of their own.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from ..errors import CommandError, UsageError
from ..sizes import format_nbytes
from .cases import all_cases
from .lineup import open_lineup
from .machine import machine_facts
from .render import ProgressLine, format_buffer, render_result, to_markdown
from .result import BenchResult
from .rounds import run_case
from .workers.case import Case

DESCRIPTION = """
Measure the throughput and processor time of teraio's posix store on DIR beside fio (libaio and io_uring, with and
without huge pages) and, from environments of their own, DeepSpeed's aio_handle and tensornvme. All run in turns.
"""

ROUNDS = 5
QUICK_ROUNDS = 2
MOST_FILES = 7
"""Files of a case's size beside each other: three stores', fio's, two libraries', and growth ahead of need."""
_DIRECTORY_PREFIX = "teraio-bench-"


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``bench``, its benchmarks and their options."""
    bench = subparsers.add_parser("bench", help="measure this machine, beside other tools")
    benchmarks = bench.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    parser = benchmarks.add_parser("io", help="throughput of the posix store beside fio", description=DESCRIPTION)
    parser.add_argument("directory", type=Path, metavar="DIR", help="an existing directory on the disk to measure")
    parser.add_argument("--quick", action="store_true", help="a quarter of the bytes: a first look, not numbers")
    parser.add_argument(
        "--rounds", type=_positive, metavar="N", help=f"default: {ROUNDS}, or {QUICK_ROUNDS} with --quick"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables to FILE")
    parser.add_argument("--deepspeed", metavar="PYTHON", help="interpreter of an environment that has DeepSpeed")
    parser.add_argument("--tensornvme", metavar="PYTHON", help="interpreter of an environment that has tensornvme")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; returns 0, or 1 if one of teraio's own contenders failed.

    Raises:
        UsageError: An option's value cannot be used here.
        CommandError: There is no room, or a file cannot be written.
    """
    directory: Path = args.directory.absolute()
    if not directory.is_dir():
        raise UsageError(f"{args.directory} is not a directory")
    for option, file in (("--json", args.json), ("--markdown", args.markdown)):
        if file is not None and not file.absolute().parent.is_dir():
            raise UsageError(f"{option} {file}: there is no such directory")
    cases = all_cases(quick=args.quick)
    _check_room(directory, cases)
    num_rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
    result = measure(directory, cases, num_rounds=num_rounds, deepspeed=args.deepspeed, tensornvme=args.tensornvme)
    render_result(result)
    _write(args.json, json.dumps(result.to_dict(), indent=2) + "\n")
    _write(args.markdown, to_markdown(result))
    return 0 if result.teraio_succeeded else 1


def measure(
    directory: Path, cases: list[Case], *, num_rounds: int, deepspeed: str | None, tensornvme: str | None
) -> BenchResult:
    """Open every contender under ``directory``, measure all cases, and leave nothing behind. Blocks for minutes.

    Raises:
        CommandError: The directory cannot be written to.
    """
    try:
        work = tempfile.TemporaryDirectory(prefix=_DIRECTORY_PREFIX, dir=directory)
    except OSError as error:
        raise CommandError(f"cannot write to {directory}: {error.strerror}") from error
    with (
        work as name,
        ProgressLine() as progress,
        open_lineup(
            Path(name),
            deepspeed=deepspeed,
            tensornvme=tensornvme,
            on_opening=lambda contender: progress.show(f"opening {contender}"),
        ) as lineup,
    ):
        progress.expect(len(cases) * num_rounds * len(lineup.contenders))

        def on_measured(case: Case, contender: str) -> None:
            progress.count(f"{case.workload}, {format_buffer(case.buffer_nbytes)}: {contender}")

        results = [run_case(case, lineup.contenders, num_rounds, on_measured) for case in cases]
        return BenchResult(
            machine=machine_facts(directory),
            num_rounds=num_rounds,
            contenders={contender.name: contender.description for contender in lineup.contenders},
            missing=lineup.missing,
            cases=results,
        )


def _check_room(directory: Path, cases: list[Case]) -> None:
    """Refuse a disk on which the contenders' files do not fit beside each other; raises ``CommandError``."""
    needed_nbytes = MOST_FILES * max(case.total_nbytes for case in cases)
    free_nbytes = shutil.disk_usage(directory).free
    if free_nbytes < needed_nbytes:
        raise CommandError(
            f"{directory} has {format_nbytes(free_nbytes)} free; the files of the benchmark take up to "
            f"{format_nbytes(needed_nbytes)}"
        )


def _write(file: Path | None, text: str) -> None:
    """Write a file, if one was asked for; raises ``CommandError``."""
    if file is None:
        return
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {file}: {error.strerror}") from error


def _positive(text: str) -> int:
    """An option's value as an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)
