"""Small JSON files of ours: replaced in one step, read with distrust.

Covers writing beside and renaming, and refusing what is damaged, foreign or newer. What is in them is their owners'
business (``calibration``, ``ledger``).

Rule: a reader sees the old file or the new one, never half of one, and never another user's.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Mapping
from typing import Any

_MOST_NBYTES = 1 << 20


class UnusableFileError(ValueError):
    """A file exists and is not what it should be; the message says why."""


def read_object(name: str | os.PathLike[str], *, kind: str, version: int, dir_fd: int | None = None) -> dict[str, Any]:
    """The object in a file that `replace_object` wrote.

    Args:
        name: The file.
        kind: What its field ``kind`` must say.
        version: The newest version of the format that the caller understands.
        dir_fd: The directory that ``name`` is in.

    Raises:
        FileNotFoundError: There is none.
        UnusableFileError: It is damaged, of another kind, newer, another user's, or no plain file.
        OSError: It cannot be read.
    """
    # O_NONBLOCK: in a directory that others may write to, the name could be a pipe.
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    with open(fd, "rb") as file:
        state = os.fstat(fd)
        if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid():
            raise UnusableFileError("it is not a plain file of this user")
        text = file.read(_MOST_NBYTES)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnusableFileError(f"it is damaged ({error})") from error
    if not isinstance(content, dict) or content.get("kind") != kind:
        raise UnusableFileError(f"it does not say that it is a {kind}")
    found = content.get("version")
    if not isinstance(found, int) or not 1 <= found <= version:
        raise UnusableFileError(f"its format is version {found}, this program knows up to {version}")
    return content


def replace_object(
    name: str, content: Mapping[str, Any], *, kind: str, version: int, dir_fd: int, temporary: str
) -> None:
    """Write an object to a file of mode 0600, in place of what was there.

    Not synchronised to the disk, which could take seconds on a busy one: after a power failure the file may be damaged,
    and a reader must live with that.

    Args:
        name: The file, in the directory of ``dir_fd``.
        content: What JSON can hold.
        kind: Written beside it.
        version: Written beside it.
        dir_fd: The directory.
        temporary: Name to write under first; removed if something is there.

    Raises:
        OSError: It cannot be written. The old file is as it was.
    """
    text = json.dumps({"kind": kind, "version": version, **content}, indent=2) + "\n"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary, dir_fd=dir_fd)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
    try:
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=dir_fd)
        raise
