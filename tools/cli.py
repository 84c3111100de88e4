"""The ``teraio`` command: finds the subcommand, runs it, and turns failures into one line and an exit code.

Covers the top parser, ``--version``, and the mapping of errors to exit codes: 0 done, 1 the thing asked for failed,
2 wrong usage.
Does not know any subcommand's options: each is a module with ``add_parser(subparsers)`` and ``run(args) -> int``,
listed in ``COMMANDS``.
Must stay true: a mistake of the user's ends in one line on stderr, never in a traceback; and nothing heavy (torch,
teraio) is imported before a subcommand asks for it.
"""

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence
from typing import NoReturn, Protocol

from .bench import command as bench
from .clean import command as clean
from .demo import command as demo
from .doctor import command as doctor
from .errors import CommandError

DISTRIBUTION = "teraio"
INTERRUPTED_EXIT_CODE = 130
"""What a shell expects of a command ended by Ctrl-C: 128 + SIGINT."""


class Command(Protocol):
    """A subcommand: one module that has these two functions."""

    def add_parser(self, subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
        """Add the subcommand's parser, with ``set_defaults(run=run)``."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it, and return the exit code."""


COMMANDS: tuple[Command, ...] = (demo, doctor, clean, bench)


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that answers wrong usage with one line instead of the whole usage text."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and where help is, and exit with code 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command, with one subparser per entry of ``COMMANDS``."""
    parser = _top_parser()
    parser.add_argument("--version", action="version", version=f"teraio {version()}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def _top_parser() -> argparse.ArgumentParser:
    """The empty parser; its subparsers are of the same class."""
    return OneLineParser(prog="teraio", description="SSD-backed tensor offload for PyTorch training.")


def version() -> str:
    """The installed version, or ``"(source tree)"`` when teraio runs without having been installed."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "(source tree)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``teraio`` command.

    Args:
        argv: The arguments after the program's name; by default those of the process.

    Returns:
        The exit code: 0 done, 1 the thing asked for failed, 2 wrong usage, 130 interrupted.
    """
    try:
        args = build_parser().parse_args(argv)
    except SystemExit as stop:  # argparse ends --help, --version and wrong usage this way
        return stop.code if isinstance(stop.code, int) else 0
    try:
        code: int = args.run(args)
    except CommandError as error:
        print(f"teraio {args.command}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"teraio {args.command}: interrupted", file=sys.stderr)
        return INTERRUPTED_EXIT_CODE
    return code
