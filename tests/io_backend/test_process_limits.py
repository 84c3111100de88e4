"""Limits of the process, a session directory that goes away, a device with large blocks.

Covers descriptors that run out, file sizes, ``rm -rf`` under a working store, O_DIRECT in units of 64 KiB. The rule:
limits are set in processes of their own.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from io_backend import open_store
from tests.io_backend.gates import TIMEOUT_S
from tests.spill_roots import sessions

if TYPE_CHECKING:
    from conftest import Case

REPOSITORY = Path(__file__).resolve().parents[2]
MIB = 1 << 20
LARGE_BLOCK_NBYTES = 65536


def run(program: str, *arguments: str) -> list[str]:
    """The lines that a process of its own prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


FILE_SIZE = """
import resource, signal, sys
from io_backend import BackendConfig, StorageFullError, open_store
assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN  # Python's own doing: the signal would end the process
resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, 8 << 20))
store = open_store(sys.argv[1], config=BackendConfig(growth_nbytes=64 << 20, reserve_free_nbytes=0), backend="posix")
kept = store.allocate(5 << 20)
store.write(b"x" * (5 << 20), kept).wait()
try:
    store.allocate(16 << 20)
except StorageFullError as error:
    print(error.errno, "ulimit" in str(error))
back = bytearray(5 << 20)
store.read(kept, back).wait()
store.write(b"y" * (5 << 20), kept).wait()
print(back == b"x" * (5 << 20), store.statistics().file_nbytes)
store.close()
"""


def test_a_limit_on_file_sizes(tmp_path: Path) -> None:
    assert run(FILE_SIZE, str(tmp_path)) == [f"{errno.EFBIG} True", f"True {5 * MIB + 4096}"]
    assert sessions(tmp_path) == []


DESCRIPTORS = """
import os, resource, sys
from io_backend import BackendError, open_store
import io_backend.kvikio_store
open_store(sys.argv[1], backend="posix").close()  # all modules are loaded
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
codes, opened = [], False
while not opened:
    for fd in taken[-1:]:  # one more to be had each time: the open gets a little further
        os.close(taken.pop())
    before = sorted(os.listdir("/proc/self/fd"))
    try:
        store = open_store(sys.argv[1], backend="posix")
    except BackendError as error:
        codes.append(error.errno)
        assert sorted(os.listdir("/proc/self/fd")) == before, "a descriptor was lost"
    else:
        opened = True
print("posix-direct" in store.describe() or "failed" not in store.describe())
extent = store.allocate(1000)
store.write(b"x" * 1000, extent).wait()
back = bytearray(1000)
store.read(extent, back).wait()
print(back == b"x" * 1000, len(codes) > 1, set(codes))
store.close()
"""


def test_no_descriptors_left(tmp_path: Path) -> None:
    assert run(DESCRIPTORS, str(tmp_path)) == ["True", f"True True {{{errno.EMFILE}}}"]
    assert sessions(tmp_path) == []


@pytest.mark.parametrize("what", ["session", "root"])
def test_the_directory_is_removed_under_the_store(tmp_path: Path, what: str) -> None:
    root = tmp_path / "root"
    store: Any = open_store(root, backend="posix")
    data = np.random.default_rng(0).integers(0, 256, 100_001, dtype=np.uint8)
    first = store.allocate(data.nbytes)
    store.write(data, first).wait(TIMEOUT_S)
    shutil.rmtree(root if what == "root" else store.file.directory.path)
    second = store.allocate(data.nbytes)
    store.write(data, second)
    for extent in (first, second):  # the file had no name to lose
        back = np.zeros_like(data)
        store.read(extent, back).wait(TIMEOUT_S)
        assert np.array_equal(back, data)
    store.allocate(300 * MIB)
    mapping = store.map(first)
    assert mapping[:] == data.tobytes()
    mapping.close()
    store.close()
    store.close()
    open_store(root, backend="posix").close()
    assert sessions(root) == []


def test_a_device_with_large_blocks(make_case: Callable[..., Case], monkeypatch: pytest.MonkeyPatch) -> None:
    """O_DIRECT is used even where it wants offsets, lengths and addresses in units of 64 KiB."""
    refused: list[int] = []

    def demanding(real: Callable[..., int]) -> Callable[..., int]:
        def call(fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
            if os.readlink(f"/proc/self/fd/{fd}").endswith("(deleted)") and is_direct(fd):
                addresses = [np.frombuffer(view, np.uint8).ctypes.data for view in buffers]
                if any(number % LARGE_BLOCK_NBYTES for number in (offset, *addresses, *map(len, buffers))):
                    refused.append(fd)
                    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return real(fd, buffers, offset, flags)

        return call

    monkeypatch.setattr(os, "pwritev", demanding(os.pwritev))
    monkeypatch.setattr(os, "preadv", demanding(os.preadv))
    case = make_case("posix-direct", chunk_nbytes=4096 * 5, bounce_nbytes=4096 * 17, growth_nbytes=4096 * 3)
    store: Any = case.store
    if store.file.direct_fd is None and not refused:
        pytest.skip("this file system has no O_DIRECT")
    assert store.file.block_nbytes == LARGE_BLOCK_NBYTES
    assert f"blocks of {LARGE_BLOCK_NBYTES}" in store.describe()
    at_the_proof = len(refused)
    assert at_the_proof > 0
    for buffer in (case.random(1), case.random(65_536), case.random(1_000_001)[1:], case.random(300_000)):
        extent = store.allocate(buffer.nbytes)
        assert extent.offset % LARGE_BLOCK_NBYTES == extent.capacity_nbytes % LARGE_BLOCK_NBYTES == 0
        store.write(buffer, extent)
        back = case.empty(buffer.nbytes)
        store.read(extent, back).wait(TIMEOUT_S)
        assert np.array_equal(back, buffer)
    assert set(store.statistics().paths) == {"posix-direct"}
    assert len(refused) == at_the_proof


def is_direct(fd: int) -> bool:
    """Whether a descriptor was opened with O_DIRECT."""
    for line in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines():
        if line.startswith("flags:"):
            return bool(int(line.split()[1], 8) & os.O_DIRECT)
    return False
