"""The options of ``teraio clean``, and what they make it do.

Covers argument parsing, one report a directory, and JSON.
Does not remove anything itself: ``io_backend.reclaim`` does.
Must stay true: one directory that cannot be looked into does not keep the others from being cleaned.
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..json_output import check_json_file, write_json
from ..sizes import format_nbytes

if TYPE_CHECKING:
    from io_backend import Reclaimed

DESCRIPTION = """
Remove the session directories of processes that were killed. A new session does so by itself; this is for when none
will start. Sessions that are alive, and whatever is not teraio's or belongs to another user, stay.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``clean`` and its options."""
    parser = subparsers.add_parser("clean", help="remove what killed sessions left", description=DESCRIPTION)
    parser.add_argument(
        "directories",
        nargs="*",
        type=Path,
        metavar="DIR",
        help="spill directories (default: $TERAIO_SPILL, else teraio in the user's cache directory)",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to FILE")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Clean the directories; returns 0, or 1 if one could not be looked into.

    Raises:
        UsageError: An option's value cannot be used here.
        CommandError: The JSON file cannot be written.
    """
    check_json_file(args.json)
    from io_backend import BackendError, reclaim  # what a command needs is loaded when it is chosen
    from io_backend.user_cache import default_spill_directory

    results: list[dict[str, Any]] = []
    failed = False
    for directory in args.directories or [default_spill_directory()]:
        try:
            found = reclaim(directory, dry_run=args.dry_run)
        except BackendError as error:
            failed = True
            reason = error.strerror or str(error)
            print(f"teraio clean: {reason}", file=sys.stderr)
            results.append({"root": str(directory), "error": reason})
            continue
        for line in lines(found):
            print(line)
        results.append(dataclasses.asdict(found))
    write_json(args.json, {"directories": results})
    return 1 if failed else 0


def lines(found: "Reclaimed") -> list[str]:
    """What to tell a person about one directory."""
    verb = "would remove" if found.dry_run else "removed"
    text = [
        f"{verb} {session.path}: its process {session.pid} has ended"
        + (f" ({format_nbytes(session.nbytes)})" if session.nbytes else "")
        for session in found.removed
    ]
    text += [f"alive: {session.path}, process {session.pid}" for session in found.alive]
    text += [f"left alone {each.path}: {each.reason}" for each in found.left]
    return text or [f"{found.root}: nothing of teraio's sessions there"]
