"""Any sequence of what a store can be asked for leaves it consistent.

Covers allocating, writing, reading, cancelling, freeing, mapping and growing on stores of each kind. The invariants: no
two extents overlap, the books equal a recount, and what is read is what was written last.
"""

from __future__ import annotations

import mmap
import os
import random
import shutil
import tempfile
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from io_backend import CorruptExtentError, Extent, striped_store
from io_backend.file_store import FileStore
from io_backend.queued_store import QueuedStore
from tests.io_backend.conftest import build
from tests.io_backend.gates import TIMEOUT_S, Gate
from tests.spill_roots import without_ledgers

KIB = 1 << 10
SIZES = st.one_of(st.sampled_from([0, 1, 4095, 4096, 4097, 65_536]), st.integers(0, 300_000))
PICKS = st.integers(0, 1 << 30)


@dataclass(eq=False)
class Known:
    """What must be true of one extent."""

    extent: Extent
    content: bytes | None = None
    """What a read gives; ``None``: it must fail."""
    mappings: list[mmap.mmap] = field(default_factory=list)


class StoreMachine(RuleBasedStateMachine):
    """One store; subclasses name its kind."""

    kind: ClassVar[str] = ""

    @initialize(num_seed=st.integers(0, 1000))
    def open(self, num_seed: int) -> None:
        self.rng = random.Random(num_seed)
        self.path = Path(tempfile.mkdtemp(prefix="teraio-test-"))
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(striped_store, "_LEAST_PART_NBYTES", 64 * KIB)
        self.patch.setattr(striped_store, "_PART_UNIT_NBYTES", 16 * KIB)
        self.store: Any = build(
            self.kind, self.path, num_workers=1, growth_nbytes=256 * KIB, bounce_nbytes=64 * KIB, chunk_nbytes=64 * KIB
        )
        for leaf in self.leaves():
            if isinstance(leaf, FileStore):
                leaf._grows_ahead = False  # a worker would do so between two looks at the books
        self.live: list[Known] = []
        self.leaving: list[tuple[Known, list[tuple[int, Extent]]]] = []
        """Freed, and kept by a mapping."""
        self.high_water_nbytes = [0] * len(self.leaves())

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        for known in [*self.live, *(known for known, _ in self.leaving)]:
            for mapping in known.mappings:
                mapping.close()
        for known in self.live:
            self.store.free(known.extent)
        assert self.store.statistics().live_nbytes == 0
        self.store.close()
        self.patch.undo()
        assert without_ledgers(list(self.path.rglob("teraio-*"))) == []
        shutil.rmtree(self.path)

    def leaves(self) -> list[QueuedStore]:
        """The stores that hold the bytes."""
        members = getattr(self.store, "_members", None)
        return [self.store] if members is None else [member.store for member in members]

    def places(self, extent: Extent) -> list[tuple[int, Extent]]:
        """(leaf, extent) of what an extent consists of."""
        if len(self.leaves()) == 1:
            return [(0, extent)]
        return [(part.member, part.extent) for part in self.store._parts[extent.serial]]

    def pick(self, number: int) -> Known:
        return self.live[number % len(self.live)]

    def data(self, known: Known) -> bytes:
        return self.rng.randbytes(known.extent.nbytes)

    def hold(self) -> list[tuple[QueuedStore, Extent, Gate]]:
        """Keep every worker busy."""
        held = []
        for leaf in self.leaves():
            extent, gate = leaf.allocate(0), Gate()
            leaf.write(b"", extent, priority=0, after=gate)  # type: ignore[arg-type]
            assert gate.reached.wait(TIMEOUT_S)
            held.append((leaf, extent, gate))
        return held

    @staticmethod
    def let_go(held: list[tuple[QueuedStore, Extent, Gate]]) -> None:
        for leaf, extent, gate in held:
            gate.opened.set()
            leaf.free(extent)

    @rule(nbytes=SIZES, contiguous=st.booleans())
    def allocate(self, nbytes: int, contiguous: bool) -> None:
        self.live.append(Known(self.store.allocate(nbytes, contiguous=contiguous), b"" if nbytes == 0 else None))
        for number, nbytes_now in enumerate(self.recount()):
            self.high_water_nbytes[number] = max(self.high_water_nbytes[number], nbytes_now)

    @precondition(lambda self: self.live)
    @rule(number=PICKS)
    def write(self, number: int) -> None:
        known = self.pick(number)
        data = self.data(known)
        self.store.write(data, known.extent).wait(TIMEOUT_S)
        known.content = data

    @precondition(lambda self: self.live)
    @rule(numbers=st.lists(PICKS, min_size=1, max_size=12))
    def write_and_read_many(self, numbers: list[int]) -> None:
        """All queued before the first starts: neighbours go together, and order within an extent counts."""
        held = self.hold()
        reads = []
        for number in numbers:
            known = self.pick(number)
            known.content = self.data(known)
            self.store.write(known.content, known.extent)
            back = bytearray(known.extent.nbytes)
            reads.append((back, known.content, self.store.read(known.extent, back)))
        self.let_go(held)
        for back, expected, ticket in reads:
            ticket.wait(TIMEOUT_S)
            assert back == expected

    @precondition(lambda self: self.live)
    @rule(number=PICKS)
    def read(self, number: int) -> None:
        known = self.pick(number)
        back = bytearray(known.extent.nbytes)
        ticket = self.store.read(known.extent, back)
        if known.content is None:
            with pytest.raises(CorruptExtentError):
                ticket.wait(TIMEOUT_S)
        else:
            ticket.wait(TIMEOUT_S)
            assert back == known.content

    @precondition(lambda self: self.live)
    @rule(number=PICKS)
    def cancel(self, number: int) -> None:
        known = self.pick(number)
        held = self.hold()
        ticket = self.store.write(self.data(known), known.extent)
        taken_back = ticket.cancel()
        self.let_go(held)
        assert taken_back == (known.extent.nbytes > 0)
        if taken_back:
            known.content = None
            with pytest.raises(CancelledError):
                ticket.wait(TIMEOUT_S)

    @precondition(lambda self: self.live)
    @rule(number=PICKS)
    def free(self, number: int) -> None:
        known = self.live.pop(number % len(self.live))
        places = self.places(known.extent)
        self.store.free(known.extent)
        if any(not mapping.closed for mapping in known.mappings):
            self.leaving.append((known, places))
        with pytest.raises(ValueError, match="not live"):
            self.store.read(known.extent, bytearray(known.extent.nbytes))

    @precondition(lambda self: self.live and isinstance(self.leaves()[0], FileStore))
    @rule(number=PICKS)
    def map(self, number: int) -> None:
        known = self.pick(number)
        if known.extent.nbytes == 0 or len(self.places(known.extent)) > 1:
            with pytest.raises(ValueError, match="cannot map"):
                self.store.map(known.extent)
            return
        mapping = self.store.map(known.extent)
        assert known.content is None or mapping[:] == known.content
        mapping[-1] = mapping[-1] ^ 0xFF
        known.content = mapping[:]
        known.mappings.append(mapping)

    @precondition(lambda self: any(not mapping.closed for known in self.all() for mapping in known.mappings))
    @rule(number=PICKS)
    def unmap(self, number: int) -> None:
        opened = [mapping for known in self.all() for mapping in known.mappings if not mapping.closed]
        opened[number % len(opened)].close()
        self.leaving = [each for each in self.leaving if any(not mapping.closed for mapping in each[0].mappings)]

    def all(self) -> list[Known]:
        return [*self.live, *(known for known, _ in self.leaving)]

    def taken(self) -> list[tuple[int, Extent]]:
        """What takes space: live, or freed and still mapped."""
        places = [place for known in self.live for place in self.places(known.extent)]
        return places + [place for _, kept in self.leaving for place in kept]

    def recount(self) -> list[int]:
        """Live bytes of each leaf."""
        counts = [0] * len(self.leaves())
        for leaf, extent in self.taken():
            counts[leaf] += extent.capacity_nbytes
        return counts

    @invariant()
    def no_extents_overlap(self) -> None:
        if self.kind == "host":  # its offsets are the numbers of slabs
            slabs = [extent.offset for _, extent in self.taken()]
            assert len(slabs) == len(set(slabs))
            return
        ends = [0] * len(self.leaves())
        for leaf, extent in sorted(self.taken(), key=lambda place: (place[0], place[1].offset, place[1].nbytes)):
            if extent.capacity_nbytes:
                assert extent.offset >= ends[leaf]
                ends[leaf] = extent.offset + extent.capacity_nbytes

    @invariant()
    def the_books_are_right(self) -> None:
        counts = self.recount()
        each = [leaf.statistics() for leaf in self.leaves()]
        assert [statistics.live_nbytes for statistics in each] == counts
        assert [statistics.high_water_nbytes for statistics in each] == self.high_water_nbytes
        whole = self.store.statistics()
        assert whole.live_nbytes == sum(counts)
        assert whole.queued == 0
        for number, (leaf, statistics) in enumerate(zip(self.leaves(), each, strict=True)):
            if not isinstance(leaf, FileStore):
                continue
            assert os.fstat(leaf.file.fd).st_size == statistics.file_nbytes == leaf._allocator.size_nbytes
            assert statistics.largest_free_nbytes == self.largest_gap(number, statistics.file_nbytes)

    def largest_gap(self, leaf: int, size_nbytes: int) -> int:
        """The largest run of bytes that nothing takes."""
        taken = sorted(
            (extent.offset, extent.capacity_nbytes)
            for number, extent in self.taken()
            if number == leaf and extent.nbytes
        )
        gaps, end = [0], 0
        for offset, nbytes in [*taken, (size_nbytes, 0)]:
            gaps.append(offset - end)
            end = offset + nbytes
        return max(gaps)


class PosixMachine(StoreMachine):
    kind = "posix-direct"


class StripedMachine(StoreMachine):
    kind = "posix-two-directories"


class HostMachine(StoreMachine):
    kind = "host"


class MemoryMachine(StoreMachine):
    kind = "memory"


SETTINGS = settings(max_examples=50, stateful_step_count=30, derandomize=True)
TestPosixMachine = PosixMachine.TestCase
TestStripedMachine = StripedMachine.TestCase
TestHostMachine = HostMachine.TestCase
TestMemoryMachine = MemoryMachine.TestCase
TestPosixMachine.settings = TestStripedMachine.settings = SETTINGS
TestHostMachine.settings = TestMemoryMachine.settings = SETTINGS
