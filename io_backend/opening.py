"""Opening the store that suits a machine and its directories.

Covers choosing the transport, one store a directory, and striping over several. It moves nothing.

Rule: whatever was opened before a failure is closed again.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from io_backend.calibration import Calibration
from io_backend.config import BackendConfig
from io_backend.errors import BackendUnavailableError
from io_backend.posix_store import PosixStore
from io_backend.quota import Quota
from io_backend.spill_directory import SpillDirectory
from io_backend.striped_store import StripedStore

if TYPE_CHECKING:
    from io_backend.file_store import FileStore
    from io_backend.store import Store

_logger = logging.getLogger(__name__)
BACKENDS = ("auto", "posix", "kvikio")


def open_store(
    spill: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    config: BackendConfig | None = None,
    backend: str = "auto",
    on_event: Callable[[str], None] | None = None,
) -> Store:
    """A store over one directory, or one per SSD. Close it when done.

    Args:
        spill: Directories to spill into; made if missing. A session directory is leased inside each.
        config: Settings; ``None`` takes the defaults.
        backend: ``"auto"`` (the best transport this machine has), ``"posix"`` or ``"kvikio"``.
        on_event: Told, from any thread, of what users should know, such as a device that is taken out; ``None`` logs.

    Raises:
        SpillDirectoryError: A directory cannot be used. Nothing stays behind.
        StorageFullError: A file system has no room even for a proof of its transport.
        ValueError: No directory, or an unknown backend.
        BackendUnavailableError: The transport asked for does not exist here.

    Example:
        >>> with contextlib.closing(open_store("/mnt/nvme0")) as store:
        ...     extent = store.allocate(tensor.nbytes)
        ...     store.write(tensor, extent).wait()
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}, expected one of {', '.join(map(repr, BACKENDS))}")
    roots = [spill] if isinstance(spill, (str, os.PathLike)) else list(spill)
    if not roots:
        raise ValueError("a store needs at least one spill directory")
    config = config if config is not None else BackendConfig()
    make = _transport(backend)
    quota = Quota(config.max_spill_nbytes)
    with contextlib.ExitStack() as opened:
        directories = []
        for root in roots:
            directory = SpillDirectory.create(Path(root), allow_unsafe=config.allow_unsafe_spill)
            opened.callback(directory.close)
            directories.append(directory)
        members: list[FileStore] = []
        for directory in directories:
            members.append(make(directory, config, quota))
            opened.callback(members[-1].close)
        store: Store = members[0]
        if len(members) > 1:
            store = StripedStore(
                members,
                names=[str(root) for root in roots],
                on_event=on_event or _logger.warning,
                weights=_measured_speeds(roots),
            )
        opened.pop_all()
    return store


def _measured_speeds(roots: Sequence[str | os.PathLike[str]]) -> list[float] | None:
    """Bytes a second of each directory as measured before; ``None`` unless all were: one scale for all or none."""
    calibration = Calibration.load(roots)
    return None if calibration is None else [device.combined_bytes_per_s for device in calibration.devices]


def _transport(backend: str) -> Callable[[SpillDirectory, BackendConfig, Quota], FileStore]:
    """The class of store to open.

    Raises:
        BackendUnavailableError: It cannot work on this machine; the message says why.
    """
    if backend != "kvikio":  # for host memory, which is all that "auto" knows of, nothing is faster
        return PosixStore
    from io_backend import kvikio_store  # KvikIO is an extra, and slow to import

    reason = kvikio_store.unavailable_reason()
    if reason is not None:
        raise BackendUnavailableError(f"backend 'kvikio' cannot be used here: {reason}. Use backend='auto' or 'posix'")
    return kvikio_store.KvikioStore
