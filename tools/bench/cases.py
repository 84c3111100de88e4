"""The cases of the I/O benchmark.

Covers which workloads and buffer sizes are measured, and with how many transfers in flight.
Does not say what a case is: ``workers.case`` does, which workers read too.
Must stay true: the total of a case is a whole number of buffers for each direction of a mixed one.
"""

from .workers.case import Case, Workload

MIB = 1 << 20
WORKLOADS: tuple[Workload, ...] = ("read", "write", "mixed")

DEPTHS = {1 * MIB: 8, 16 * MIB: 4, 64 * MIB: 2}
"""Transfers in flight by buffer size: fewer of the larger, whose parts the kernel already has in flight at once."""

TOTAL_NBYTES = 1024 * MIB
QUICK_TOTAL_NBYTES = 256 * MIB


def all_cases(*, quick: bool) -> list[Case]:
    """Every workload at every buffer size; a quarter of the bytes when ``quick``."""
    total_nbytes = QUICK_TOTAL_NBYTES if quick else TOTAL_NBYTES
    return [
        Case(workload=workload, buffer_nbytes=buffer_nbytes, depth=depth, total_nbytes=total_nbytes)
        for workload in WORKLOADS
        for buffer_nbytes, depth in DEPTHS.items()
    ]
