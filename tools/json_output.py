"""The file that ``--json`` asks for.

Covers checking early that it can be written, and writing it.
Does not say what is in it: each subcommand does.
Must stay true: a mistyped directory is found before the work is done, not after it.
"""

import json
from pathlib import Path
from typing import Any

from .errors import CommandError, UsageError


def check_json_file(json_file: Path | None) -> None:
    """Refuse a file whose directory does not exist.

    Raises:
        UsageError: It does not.
    """
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise UsageError(f"--json {json_file}: there is no such directory")


def write_json(json_file: Path | None, content: Any) -> None:
    """Write ``content``, if a file was asked for.

    Raises:
        CommandError: It cannot be written.
    """
    if json_file is None:
        return
    try:
        json_file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {json_file}: {error.strerror}") from error
