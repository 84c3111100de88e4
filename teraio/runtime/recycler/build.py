"""Compiling the recycler, once for each torch and compiler, on the machine that runs it.

Covers the compiler's command line and the cache of what it made. Nothing is compiled at installation, and nothing needs
to be: without a compiler teraio works, only slower. The rules: a library is loaded only from a directory that nobody
else can write to; a build that was interrupted, or that two processes make at once, never leaves half a file.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from io_backend.user_cache import user_cache_directory

SOURCE = Path(__file__).with_name("recycler.cpp")
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++20", "-O2", "-shared", "-fPIC")
_TIMEOUT_S = 180.0


class RecyclerUnavailableError(Exception):
    """The recycler cannot be had here; the message says why and what to do. Sessions go on without it."""


def library_path(cache: Path | None = None) -> Path:
    """The compiled recycler for this torch; compiles it where the cache has none, which takes some seconds.

    Args:
        cache: Where compiled libraries are kept. Default: ``teraio-native`` in the user's cache directory.

    Raises:
        RecyclerUnavailableError: There is no compiler, it failed, or the cache cannot be used.
    """
    compiler = _find_compiler()
    command = [*compiler, *_FLAGS, *_torch_flags()]
    cache = default_cache() if cache is None else cache
    try:
        _check_private(cache)
        path = cache / f"recycler-{_key(command)}.so"
        if not path.is_file():
            _compile(command, path)
    except OSError as error:
        raise RecyclerUnavailableError(f"its cache {cache} cannot be used ({error})") from error
    return path


def default_cache() -> Path:
    """``teraio-native`` in the user's cache directory."""
    return user_cache_directory() / "teraio-native"


def _find_compiler() -> list[str]:
    named = shlex.split(os.environ.get("CXX", ""))
    for candidate in [named] if named else [[name] for name in _COMPILERS]:
        found = shutil.which(candidate[0])
        if found is not None:
            return [found, *candidate[1:]]
    wanted = named[0] if named else "any of " + ", ".join(_COMPILERS)
    raise RecyclerUnavailableError(f"there is no C++ compiler ({wanted}): install one, for example g++")


def _torch_flags() -> list[str]:
    root = Path(torch.__file__).parent
    if not (root / "include/c10/core/CPUAllocator.h").is_file():
        raise RecyclerUnavailableError(f"torch {torch.__version__} came without its C++ headers: install the wheel")
    abi = int(torch.compiled_with_cxx11_abi())
    return [f"-D_GLIBCXX_USE_CXX11_ABI={abi}", f"-I{root / 'include'}", f"-L{root / 'lib'}"]


def _key(command: list[str]) -> str:
    """Names what the library depends on: source, torch, flags, and the kind of machine."""
    parts = [SOURCE.read_text(), torch.__version__, str(torch.version.git_version), *command]
    parts += [platform.machine(), sys.platform]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _check_private(cache: Path) -> None:
    """What is loaded from it runs as this user.

    Raises:
        RecyclerUnavailableError: Somebody else could put a file there.
        OSError: It cannot be made.
    """
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = cache.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise RecyclerUnavailableError(f"other users can write to its cache {cache}: chmod 700 it")


def _compile(command: list[str], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as directory:
        made = Path(directory) / path.name
        full = [*command, str(SOURCE), "-o", str(made), "-lc10"]
        try:
            subprocess.run(full, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S, cwd=directory)
        except subprocess.CalledProcessError as error:
            lines = [line for line in error.stderr.splitlines() if "error" in line] or error.stderr.splitlines()
            reason = lines[0].strip() if lines else f"exit status {error.returncode}"
            raise RecyclerUnavailableError(f"{command[0]} could not compile it ({reason})") from error
        except subprocess.TimeoutExpired as error:
            raise RecyclerUnavailableError(f"{command[0]} had not compiled it after {_TIMEOUT_S:g} s") from error
        made.replace(path)
