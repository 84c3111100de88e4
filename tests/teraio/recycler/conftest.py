"""The recycler, where it can be compiled, and a lease on it."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Iterator

import pytest

from teraio.runtime.recycler import RecyclerLease, RecyclerUnavailableError, lease_recycler
from teraio.runtime.recycler.build import library_path

MIB = 1 << 20
PAGE = mmap.PAGESIZE


@pytest.fixture(scope="module", autouse=True)
def _compiler() -> None:
    try:
        library_path()
    except RecyclerUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def _nothing_else_leases() -> None:
    gc.collect()


@pytest.fixture
def lease() -> Iterator[RecyclerLease]:
    lease = lease_recycler(64 * MIB)
    yield lease
    lease.release()
