"""How the recycler is compiled, and what happens where it cannot be."""

from __future__ import annotations

import mmap
import subprocess
from pathlib import Path

import pytest

from teraio.runtime.recycler import RecyclerUnavailableError, library
from teraio.runtime.recycler.build import library_path

MIB = 1 << 20
PAGE = mmap.PAGESIZE


def test_it_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "native"
    path = library_path(cache)
    made = path.stat()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    assert library_path(cache).stat().st_mtime_ns == made.st_mtime_ns
    assert cache.stat().st_mode & 0o777 == 0o700
    assert [each.name for each in cache.iterdir()] == [path.name]


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RecyclerUnavailableError, match=r"no C\+\+ compiler .*install one"):
        library_path(tmp_path / "cache")


def test_a_compiler_that_was_named_and_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(RecyclerUnavailableError, match=r"no-such-compiler"):
        library_path(tmp_path / "cache")


def test_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such header' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(
        RecyclerUnavailableError, match=r"broken could not compile it \(x.cpp:1: error: no such header\)"
    ):
        library_path(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_others_can_write_to(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(RecyclerUnavailableError, match=r"chmod 700"):
        library_path(cache)


def test_a_cache_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecyclerUnavailableError, match=r"cannot be used"):
        library_path(tmp_path / "file" / "cache")


def test_a_damaged_library_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = library_path()
    path.write_bytes(b"not a library")
    assert library._load().statistics() == (0, 0, 0, 0)
    assert path.stat().st_size > 1000


def test_a_failure_is_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "_loaded", [])
    monkeypatch.setenv("CXX", "no-such-compiler")
    for _ in range(2):
        with pytest.raises(RecyclerUnavailableError):
            library.load_library()
        monkeypatch.delenv("CXX", raising=False)
