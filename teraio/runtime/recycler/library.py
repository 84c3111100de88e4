"""The compiled recycler, as Python calls it.

Covers loading and calling. One library per process, loaded at first use and never unloaded: tensors that it made
outlast every session.
"""

import ctypes
import mmap
from pathlib import Path
from typing import Any, NamedTuple

from teraio.runtime.recycler.build import RecyclerUnavailableError, library_path

__all__ = ["Library", "RecyclerStatistics", "RecyclerUnavailableError", "load_library"]

_HUGE_PAGE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_LARGEST_HUGE_PAGE_NBYTES = 2 << 20
"""Beyond it (64 KiB base pages have huge ones of 512 MiB) no tensor would be aligned."""

_loaded: "list[Library | RecyclerUnavailableError]" = []


class RecyclerStatistics(NamedTuple):
    """Bytes of blocks: live and idle now; taken fresh from the system and used again since the process began."""

    live_nbytes: int
    idle_nbytes: int
    fresh_nbytes: int
    recycled_nbytes: int


class Library:
    """The recycler of this process.

    Thread safety: all methods from any thread, but install and uninstall while no other thread makes tensors.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._install = _function(library, "install", None, ctypes.c_size_t, ctypes.c_size_t)
        self._uninstall = _function(library, "uninstall", None)
        self._set_limit = _function(library, "set_limit", None, ctypes.c_size_t)
        self._allocate = _function(library, "allocate", ctypes.c_void_p, ctypes.c_size_t)
        self._free = _function(library, "free", None, ctypes.c_void_p)
        self._statistics = _function(library, "statistics", None, ctypes.POINTER(ctypes.c_uint64))

    def install(self) -> None:
        """Make it torch's allocator of CPU tensors; its limit is 0 until set."""
        self._install(mmap.PAGESIZE, _huge_page_nbytes())

    def uninstall(self) -> None:
        """Put torch's former allocator back and give idle memory to the system."""
        self._uninstall()

    def set_limit(self, nbytes: int) -> None:
        """Most bytes that live and idle blocks take together; idle ones beyond it leave at once."""
        self._set_limit(max(0, nbytes))

    def allocate(self, nbytes: int) -> int:
        """The address of `nbytes` bytes with undefined content, as a tensor of that size would get them.

        Raises:
            MemoryError: The system has no more.
        """
        address = self._allocate(nbytes)
        if not address:
            raise MemoryError(f"no memory for {nbytes} bytes to read a tensor back into")
        return int(address)

    def free(self, address: int) -> None:
        """Take back what `allocate` gave."""
        self._free(address)

    def statistics(self) -> RecyclerStatistics:
        """Its counters."""
        values = (ctypes.c_uint64 * 4)()
        self._statistics(values)
        return RecyclerStatistics(*values)


def load_library() -> Library:
    """The recycler of this process; the first call may compile it. A failure is remembered.

    Raises:
        RecyclerUnavailableError: It cannot be had here.
    """
    if not _loaded:
        try:
            _loaded.append(_load())
        except RecyclerUnavailableError as error:
            _loaded.append(error)
    found = _loaded[0]
    if isinstance(found, RecyclerUnavailableError):
        raise RecyclerUnavailableError(*found.args)
    return found


def _load() -> Library:
    path = library_path()
    try:
        return Library(path)
    except (OSError, AttributeError):
        path.unlink(missing_ok=True)  # it was damaged: once more
    path = library_path()
    try:
        return Library(path)
    except (OSError, AttributeError) as error:
        raise RecyclerUnavailableError(f"what the compiler made cannot be loaded ({error})") from error


def _function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    """One function of the library, with its types set."""
    function = getattr(library, f"teraio_recycler_{name}")
    function.restype, function.argtypes = result, arguments
    return function


def _huge_page_nbytes() -> int:
    try:
        nbytes = int(_HUGE_PAGE.read_text())
    except (OSError, ValueError):
        return 0
    return nbytes if nbytes <= _LARGEST_HUGE_PAGE_NBYTES else 0
