"""What is wrong with what was found, and what to do about it.

Covers one rule after another over the facts.
Does not look at the machine: ``directory`` and ``machine`` did.
Must stay true: a problem names what it costs and a remedy that the reader can carry out.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from ..sizes import format_nbytes
from .directory import DirectoryFacts
from .machine import MachineFacts

_LEAST_ROOM_NBYTES = 10 << 30
_MOST_NOISE = 0.5
_WORN_PERCENTAGE = 80.0
_FEW_DAYS = 365.0
_VIRTUAL = frozenset({"virtio", "loop", ""})


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One thing to mend."""

    where: str
    """The directory, or ``machine``."""
    what: str
    remedy: str


def find_problems(directories: Sequence[DirectoryFacts], machine: MachineFacts) -> list[Problem]:
    """All problems, those of directories first."""
    found = [problem for facts in directories for problem in _of_directory(facts)]
    return [*found, *_shared_disks(directories), *_of_machine(machine)]


def _of_directory(facts: DirectoryFacts) -> Iterator[Problem]:
    if facts.failure:
        yield Problem(facts.path, f"cannot be used: {facts.failure}", "name a directory on a local SSD")
    yield from _of_place(facts)
    yield from _of_speed(facts)
    yield from _of_wear(facts)
    if facts.ledger.note:
        yield Problem(
            facts.path, facts.ledger.note, "the next session puts the file aside and starts a new one; look into it"
        )
    if facts.save_failure:
        yield Problem(
            facts.path,
            f"the measurement could not be kept: {facts.save_failure}",
            "make the user's cache directory writable, or set XDG_CACHE_HOME",
        )


def _of_place(facts: DirectoryFacts) -> Iterator[Problem]:
    room_nbytes = facts.free_nbytes - facts.reserve_nbytes
    if facts.mount.file_system == "overlay":
        yield Problem(
            facts.path,
            "it is in a container's own layer (overlay): what is spilled counts against the image's space",
            "mount a directory of the SSD into the container and name that",
        )
    if facts.mount.file_system != "unknown" and room_nbytes < _LEAST_ROOM_NBYTES:
        yield Problem(
            facts.path,
            f"only {format_nbytes(max(0, room_nbytes))} can be used beyond the reserve of "
            f"{format_nbytes(facts.reserve_nbytes)}; a disk that is nearly full is slow as well",
            "free some space, or name another disk",
        )
    for device in facts.devices:
        if device.rotational and device.kind not in _VIRTUAL:  # virtual disks claim to rotate
            yield Problem(facts.path, f"{device} is a rotating disk", "name a directory on an SSD")


def _of_speed(facts: DirectoryFacts) -> Iterator[Problem]:
    speed = facts.calibration
    if speed is None:
        return
    if speed.transport != "posix-direct":
        yield Problem(
            facts.path,
            f"no direct I/O: {speed.reason}. Bytes go through the page cache, at several times the processor time",
            "use ext4 or xfs on a local disk",
        )
    noise = max(speed.read_noise, speed.write_noise, speed.mixed_noise)
    if noise > _MOST_NOISE:
        yield Problem(
            facts.path,
            f"repeated measurements differ by {noise:.0%} of their median: something else used the disk or the cores",
            "measure again on a quiet machine, with more --seconds",
        )


def _of_wear(facts: DirectoryFacts) -> Iterator[Problem]:
    for wear, left in facts.days_left():
        if wear.percentage_used is not None and wear.percentage_used >= _WORN_PERCENTAGE:
            yield Problem(
                facts.path,
                f"{wear.device} has used {wear.percentage_used:.0f} % of its rated life",
                "plan its replacement, or spill to another disk",
            )
        elif left.days is not None and left.days < _FEW_DAYS:
            yield Problem(
                facts.path,
                f"at this rate {wear.device} reaches the end of its rated life in {left.days:.0f} days",
                "limit the writing with Config.max_write_tb_per_day, raise the budget, or spread it over more disks",
            )


def _shared_disks(directories: Sequence[DirectoryFacts]) -> Iterator[Problem]:
    """Directories that are meant to be one SSD each, and are not."""
    seen: dict[object, str] = {}
    for facts in directories:
        disks = tuple(device.name for device in facts.devices) or facts.mount.mount_point
        if disks in seen:
            yield Problem(
                facts.path,
                f"it is on the same disk as {seen[disks]}: both together are no faster than one",
                "name one directory for each SSD",
            )
        seen.setdefault(disks, facts.path)


def _of_machine(machine: MachineFacts) -> Iterator[Problem]:
    if machine.huge_pages == "never":
        yield Problem(
            "machine",
            "huge pages are off: reads are slower and cost several times the processor time",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )
    elif not machine.torch_huge_pages:
        yield Problem(
            "machine",
            "THP_MEM_ALLOC_ENABLE is not set: tensors on the CPU that torch allocates before teraio is imported lie on "
            "small pages, unaligned, and are copied once more on their way",
            "export THP_MEM_ALLOC_ENABLE=1 (matters for training on the CPU)",
        )
