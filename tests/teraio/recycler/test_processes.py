"""The recycler in processes of their own: forked, short of memory, with pages that cannot be moved."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 1 << 20
PAGE = mmap.PAGESIZE


FORKED = """
import os, threading, torch
from teraio.runtime.recycler import lease_recycler
lease_recycler(64 << 20)
stop = False
def busy():
    while not stop:
        torch.empty(1 << 20, dtype=torch.uint8)
threads = [threading.Thread(target=busy) for _ in range(3)]
[thread.start() for thread in threads]
for _ in range(30):
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        kept = [torch.empty(1 << 20, dtype=torch.uint8) for _ in range(4)]
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
stop = True
[thread.join() for thread in threads]
print("done")
"""

SCARCE = """
import resource, torch
from teraio.runtime.recycler import lease_recycler
lease = lease_recycler(1 << 40)
torch.set_num_threads(1)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (600 << 20),) * 2)
passing = torch.empty(400 << 20, dtype=torch.uint8); del passing
assert lease.statistics().idle_nbytes == 400 << 20
other = torch.empty(450 << 20, dtype=torch.uint8)  # fits only without what is idle
assert lease.statistics().idle_nbytes == 0
try:
    torch.empty(4 << 30, dtype=torch.uint8)
except RuntimeError as error:
    assert "allocate memory" in str(error), error
    print("done")
"""


@pytest.mark.parametrize("script", [FORKED, SCARCE], ids=["fork", "out of memory"])
def test_in_a_process_of_its_own(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr


INTERPOSER = """
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
/* mremap as it may go: the target is cleared, somebody else gets the addresses, and then it fails. */
void *mremap(void *old, size_t old_size, size_t new_size, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  void *target = va_arg(rest, void *);
  va_end(rest);
  munmap(target, new_size);
  if (LOST) {
    mmap(target, new_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    memset(target, 0xAB, new_size);
  }
  errno = ENOMEM;
  return MAP_FAILED;
}
"""

VICTIM = """
import ctypes, sys, torch
from teraio.runtime.recycler import lease_recycler
MIB = 1 << 20
lease = lease_recycler(16 * MIB)
first = torch.ones(12 * MIB, dtype=torch.uint8)
del first
second = torch.empty(14 * MIB, dtype=torch.uint8)
second.fill_(7)
assert bool((second == 7).all())
del second
third = torch.ones(13 * MIB, dtype=torch.uint8)
assert bool((third == 1).all())
del third
lease.release()
print(lease.statistics().live_nbytes)
"""


@pytest.mark.parametrize("lost", [0, 1])
def test_pages_that_cannot_be_moved_are_nobody_elses(tmp_path: Path, lost: int) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source, interposer = tmp_path / "interposer.c", tmp_path / "interposer.so"
    source.write_text(INTERPOSER)
    command = [compiler, "-shared", "-fPIC", f"-DLOST={lost}", "-o", str(interposer), str(source)]
    subprocess.run(command, check=True, timeout=60)
    repository = Path(__file__).parents[3]
    environment = {**os.environ, "LD_PRELOAD": str(interposer), "PYTHONPATH": str(repository)}
    done = subprocess.run(
        [sys.executable, "-c", VICTIM], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr
