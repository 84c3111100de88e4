"""The store that reaches GPU memory: a local file, GPUDirect Storage or its compatibility mode, by KvikIO.

Covers handing buffers of any type to KvikIO, waiting for its futures, and truth about which way bytes went. It does not
implement space (``file_store``) nor queueing and ordering (``queued_store``).

Rules:
- No `CuFile` is opened where no CUDA driver was found to answer: opening one in AUTO or OFF mode can spin for ever.
- KvikIO's futures hold neither buffer nor file: the worker that waits for one holds both.
- KvikIO is not used across a fork: the queue refuses that.

KvikIO is an extra (``teraio[cuda12]`` or ``[cuda13]``) and imported here alone, when chosen.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib.util
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from io_backend import integrity
from io_backend.buffers import Memory, resolve_device
from io_backend.errors import BackendUnavailableError, ShortTransferError
from io_backend.file_store import FileStore
from io_backend.meter import TransferOutcome

if TYPE_CHECKING:
    from io_backend.config import BackendConfig
    from io_backend.quota import Quota
    from io_backend.spill_directory import SpillDirectory
    from io_backend.store import BufferLike, Extent, Operation

_DRIVER = "libcuda.so.1"
_THREADS = 4
_TASK_NBYTES = 16 << 20
_PROBE_NBYTES = 1 << 20


def unavailable_reason() -> str | None:
    """Why KvikIO cannot be used in this process; ``None`` if it can.

    Asks the CUDA driver for its version, which takes no device, before KvikIO is touched.
    """
    if importlib.util.find_spec("kvikio") is None:
        return "KvikIO is not installed (pip install 'teraio[cuda12]' or 'teraio[cuda13]', as torch was built)"
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError as error:
        return f"there is no CUDA driver ({error})"
    version = ctypes.c_int()
    status = driver.cuDriverGetVersion(ctypes.byref(version))
    if status != 0 or version.value == 0:
        return f"the CUDA driver {_DRIVER} does not answer (cuDriverGetVersion gave {status})"
    return None


class KvikioStore(FileStore):
    """Extents in one anonymous file, moved by KvikIO from and into host or CUDA memory.

    Thread safety and invariants: as the ``Store`` protocol says.
    """

    def __init__(self, directory: SpillDirectory, config: BackendConfig, quota: Quota | None = None) -> None:
        """As `FileStore`.

        Raises:
            BackendUnavailableError: KvikIO or the CUDA driver is missing, or a first transfer does not come back whole.
        """
        self._cufile: Any = None
        self._monitor: Any = None
        reason = unavailable_reason()
        if reason is not None:
            directory.close()
            raise BackendUnavailableError(reason)
        super().__init__(directory, config, quota)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        import kvikio
        import kvikio.defaults

        settings: dict[str, Any] = {
            "num_threads": _THREADS,
            "task_size": _TASK_NBYTES,
            "auto_direct_io_read": True,  # its default read fills the page cache
            "auto_direct_io_write": True,
        }
        if not _has_gpu():
            settings["compat_mode"] = kvikio.CompatMode.ON  # OFF and AUTO may spin for ever without a device
        for name, value in settings.items():
            _set_default(kvikio.defaults, name, value)
        # The file has no name: its descriptor leads to it, and KvikIO opens it anew, with O_DIRECT too.
        self._cufile = kvikio.CuFile(f"/proc/self/fd/{self.file.fd}", "r+")
        self._monitor = _summary_monitor(kvikio)
        self._prove()

    def _prove(self) -> None:
        """One transfer there and back, before anything depends on it."""
        extent = self.allocate(_PROBE_NBYTES)
        pattern, back = os.urandom(_PROBE_NBYTES), bytearray(_PROBE_NBYTES)
        try:
            self.write(pattern, extent).wait()
            self.read(extent, back).wait()
        finally:
            self.free(extent)
        if pattern != back:
            raise BackendUnavailableError(f"KvikIO on {self.file.name}: bytes came back changed; use backend='posix'")
        self.meter.reset()
        self._allocator.high_water_nbytes = 0

    @property
    def staging_nbytes(self) -> int:
        """Bytes of staging memory at most: KvikIO keeps one pinned buffer a thread when GPUDirect is not in use."""
        return _THREADS * _TASK_NBYTES

    def describe(self) -> str:
        """One line: the way bytes go, as far as KvikIO tells before they do."""
        return f"{self._path()} on {self._directory.root} ({self._directory.file_system}): a write and a read came back"

    def _path(self) -> str:
        """``kvikio-gds`` where cuFile carries the bytes, else ``kvikio-compat``."""
        if self._monitor is None:
            import kvikio.defaults

            return "kvikio-compat" if kvikio.defaults.is_compat_mode_preferred() else "kvikio-gds"
        carried = self._monitor.get().by_backend
        return "kvikio-gds" if carried.get("GDS", {}).get("bytes_transferred", 0) else "kvikio-compat"

    def _resolve(self, buffer: BufferLike | Memory) -> Memory:
        return resolve_device(buffer)

    def sums(self, memory: Memory) -> tuple[int, ...]:
        """As `QueuedStore.sums`, for device memory through a copy of each chunk."""
        if memory.device is None:
            return super().sums(memory)
        import torch

        pieces = torch.as_tensor(_as_array(memory), device=memory.device).split(integrity.CHUNK_NBYTES)
        return integrity.checksums(piece.cpu().numpy().data for piece in pieces)

    def move(self, operation: Operation, extent: Extent, memory: Memory) -> TransferOutcome:
        """See `Transport.move`. One future a chunk: KvikIO before 26.10 may go on in others when one has failed."""
        call = self._cufile.pwrite if operation == "write" else self._cufile.pread
        chunk_nbytes = self.config.chunk_nbytes
        chunks = [
            memory.part(start, min(chunk_nbytes, memory.nbytes - start))
            for start in range(0, memory.nbytes, chunk_nbytes)
        ]
        failure: RuntimeError | None = None
        moved_nbytes = 0
        futures = []
        try:
            for number, chunk in enumerate(chunks):
                offset = extent.offset + number * chunk_nbytes
                futures.append(call(_as_array(chunk), size=chunk.nbytes, file_offset=offset, task_size=chunk_nbytes))
        finally:  # `memory` must outlive every future, whatever happened
            for future in futures:
                try:
                    moved_nbytes += future.get()
                except RuntimeError as error:
                    failure = error
        if failure is not None:
            raise _as_os_error(failure) from failure
        if moved_nbytes != extent.nbytes:
            raise ShortTransferError(
                errno.EIO, f"{operation} of {extent} in {self.file.name}: KvikIO moved {moved_nbytes} bytes of them"
            )
        return TransferOutcome(self._path())

    def _release(self) -> None:
        if self._cufile is not None:
            self._cufile.close()
        super()._release()


def _as_array(memory: Memory) -> object:
    """What KvikIO takes: bytes in host memory as a numpy array, in device memory by the CUDA array interface."""
    if memory.device is None:
        return np.frombuffer(memory.view(), dtype=np.uint8)
    return _DeviceBytes(memory)


class _DeviceBytes:
    """Bytes in device memory. Tensors themselves will not do: their interface refuses several types."""

    def __init__(self, memory: Memory) -> None:
        self.owner = memory.owner
        self.__cuda_array_interface__ = {
            "shape": (memory.nbytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "strides": None,
            "version": 3,
        }


def _has_gpu() -> bool:
    """Whether a CUDA device can be used, asked of torch, which the caller's tensors come from."""
    import torch

    return torch.cuda.is_available()


def _set_default(defaults: Any, name: str, value: Any) -> None:
    """Set one of KvikIO's process-wide defaults; one that this version lacks stays as it is."""
    with contextlib.suppress(KeyError, AttributeError):
        defaults.set({name: value})


def _summary_monitor(kvikio: Any) -> Any:
    """KvikIO's own account of what carried the bytes (26.10 on), else ``None``."""
    make = getattr(kvikio, "SummaryMonitor", None)
    return make() if make is not None else None


def _as_os_error(error: RuntimeError) -> OSError:
    """The system error behind a failure: KvikIO passes its description on, and not its number."""
    text = str(error)
    for code in sorted(errno.errorcode, key=lambda code: -len(os.strerror(code))):
        if os.strerror(code) in text:
            return OSError(code, text)
    return OSError(errno.EIO, text)
