"""The options of ``teraio doctor``, and what they make it do.

Covers argument parsing, the order of the examination, and the exit code.
Does not examine, judge or lay out anything: ``directory``, ``machine``, ``problems`` and ``render`` do.
Must stay true: one directory that cannot be used does not keep the others from being examined.
"""

import argparse
import math
import sys
from pathlib import Path

from ..json_output import check_json_file, write_json

_MOST_SECONDS = 600.0
_TB = 10**12
VERSION = 1
"""Of the JSON file's layout."""

DESCRIPTION = """
Examine directories to spill to: whether they can be used, how fast and how worn their disks are, and what to mend.
The speeds are kept for later sessions. At most 1 GiB, and a tenth of the free space, is used meanwhile; nothing stays.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``doctor`` and its options."""
    parser = subparsers.add_parser("doctor", help="examine spill directories and the machine", description=DESCRIPTION)
    parser.add_argument(
        "directories",
        nargs="*",
        type=Path,
        metavar="DIR",
        help="one for each SSD (default: $TERAIO_SPILL, else teraio in the user's cache directory)",
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=3.0, help="to measure each directory for (default: %(default)g)"
    )
    parser.add_argument(
        "--tb-per-day",
        type=_positive,
        metavar="TB",
        help="bytes written a day, in TB of 1e12, for the days of life (default: the average so far)",
    )
    parser.add_argument(
        "--rated-tb", type=_positive, metavar="TB", help="endurance of each disk (TBW in its data sheet), in TB of 1e12"
    )
    parser.add_argument("--no-save", action="store_true", help="do not keep the measured speeds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to FILE")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Examine; returns 0, or 1 if a directory cannot be used.

    Raises:
        UsageError: An option's value cannot be used here.
        CommandError: The JSON file cannot be written.
    """
    check_json_file(args.json)
    from io_backend.user_cache import default_spill_directory  # what a command needs is loaded when it is chosen

    from .directory import examine
    from .machine import examine_machine
    from .problems import find_problems
    from .render import render

    facts = []
    for directory in args.directories or [default_spill_directory()]:
        if sys.stderr.isatty():
            print(f"measuring {directory} for about {args.seconds:g} s ...", file=sys.stderr)
        facts.append(
            examine(
                directory,
                seconds=args.seconds,
                save=not args.no_save,
                bytes_per_day=None if args.tb_per_day is None else args.tb_per_day * _TB,
                rated_nbytes=None if args.rated_tb is None else round(args.rated_tb * _TB),
            )
        )
    machine = examine_machine()
    problems = find_problems(facts, machine)
    render(facts, machine, problems)
    write_json(
        args.json,
        {
            "version": VERSION,
            "directories": [each.to_dict() for each in facts],
            "machine": machine.to_dict(),
            "problems": [{"where": each.where, "what": each.what, "remedy": each.remedy} for each in problems],
        },
    )
    return 1 if any(each.failure for each in facts) else 0


def _seconds(text: str) -> float:
    value = _positive(text)
    if value > _MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"expected at most {_MOST_SECONDS:g} seconds, got {text!r}")
    return value


def _positive(text: str) -> float:
    """An option's value as a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value
