"""Typed errors of the storage backend, and the one place where an ``OSError`` becomes one of them.

Covers the error tree and the wording of its messages: what was tried, where, how many bytes, where the data is now,
what to do.
It does not decide what happens after a failure: the caller's residency table does.

Rule: every message of an I/O failure names operation, path, offset, size and remedy, and keeps the ``errno``.
"""

from __future__ import annotations

import errno as errno_codes
import os

_FULL_CODES = frozenset({errno_codes.ENOSPC, errno_codes.EDQUOT, errno_codes.EFBIG})

_REMEDIES = {
    errno_codes.ENOSPC: "free space on that file system, or spill to another directory",
    errno_codes.EDQUOT: "raise the disk quota of this user, or spill to another directory",
    errno_codes.EFBIG: "raise the file size limit (`ulimit -f`), or spill to several directories",
    errno_codes.EIO: "look in the kernel log for errors of this device and spill to another one",
    errno_codes.EROFS: "the file system went read-only, usually after a device error: see the kernel log",
    errno_codes.EBADF: "the spill file is closed: submit nothing after Store.close()",
}

_STATE_AFTER = {
    "write": "The buffer is unchanged; the extent holds no valid bytes",
    "read": "The extent keeps its bytes; the buffer's content is undefined",
}


class BackendError(OSError):
    """An I/O operation of the backend failed; base of every error this package raises on purpose.

    ``errno`` is the system's error number where there was one, else ``None``.
    """


class ShortTransferError(BackendError):
    """The system moved fewer bytes than asked and made no progress when asked again."""


class StorageFullError(BackendError):
    """No space left: the file system, a quota, a file size limit, or ``max_spill_nbytes``."""


class CorruptExtentError(BackendError):
    """The extent does not hold the bytes asked for: never written, or its write failed or was cancelled."""


class BackendUnavailableError(BackendError):
    """This store cannot serve the call: closed, used after a fork, or a transport this build lacks."""


class SpillDirectoryError(BackendError):
    """The spill directory cannot be used: wrong file system, no permission, or its lock is stuck."""


def map_os_error(error: OSError, *, operation: str, path: str, offset: int, nbytes: int) -> BackendError:
    """The typed error for a failed system call, ready to be raised ``from error``.

    Args:
        error: What the system call raised. A :class:`BackendError` is returned unchanged.
        operation: ``"write"``, ``"read"`` or another verb for the message.
        path: The directory or file the caller knows; the spill file itself has no name.
        offset: Byte offset in that file.
        nbytes: Bytes wanted by the whole operation.
    """
    if isinstance(error, BackendError):
        return error
    code = error.errno
    kind = StorageFullError if code in _FULL_CODES else BackendError
    reason = os.strerror(code) if code is not None else str(error)
    remedy = _REMEDIES.get(code, "check the device and the permissions of that directory") if code is not None else ""
    text = f"{operation} of {nbytes} bytes at offset {offset} of {path} failed: {reason}"
    text += "".join(f". {part}" for part in (_STATE_AFTER.get(operation), remedy) if part)
    return kind(text) if code is None else kind(code, text)
