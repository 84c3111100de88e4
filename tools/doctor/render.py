"""What ``teraio doctor`` shows to people: one table a directory, one for the machine, and the problems.

Covers every word a person sees, except the problems' own.
Does not compute a number beyond bringing it into a unit.
Must stay true: it needs the facts alone.
"""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from io_backend import DeviceCalibration
from io_backend.wear import DaysLeft, Wear

from ..sizes import format_nbytes, format_seconds
from .directory import DirectoryFacts
from .machine import MachineFacts
from .problems import Problem

_TFLOPS = 100  # the size of one data-centre GPU in bf16, for an example


def render(
    directories: Sequence[DirectoryFacts],
    machine: MachineFacts,
    problems: Sequence[Problem],
    console: Console | None = None,
) -> None:
    """Print everything; on stdout unless told where."""
    # File names and kernel files hold brackets: nothing here is markup.
    console = console or Console(markup=False, highlight=False)
    for facts in directories:
        console.print(_table(facts.path, directory_rows(facts)))
        if facts.calibration is not None:
            console.print(sentence(facts.calibration), soft_wrap=True)
    console.print(_table("machine", machine_rows(machine)))
    for problem in problems:
        console.print(f"warning: {problem.where}: {problem.what}\n  remedy: {problem.remedy}", soft_wrap=True)
    unusable = [facts.path for facts in directories if facts.failure]
    if unusable:
        console.print(f"cannot be used: {', '.join(unusable)}", soft_wrap=True)
    else:
        console.print("all directories can be used" if len(directories) > 1 else "the directory can be used")


def sentence(speed: DeviceCalibration) -> str:
    """What the speed means for a training step."""
    rate = speed.round_trip_bytes_per_s
    per_tflop = format_nbytes(round(rate / _TFLOPS))
    return (
        f"In a training step of 1 s, up to {format_nbytes(round(rate))} can leave and come back without being noticed; "
        f"at {_TFLOPS} TFLOP/s that is {per_tflop} for each TFLOP of compute."
    )


def directory_rows(facts: DirectoryFacts) -> list[tuple[str, str]]:
    """One directory, line by line."""
    devices = ", ".join(
        f"{device}, {format_nbytes(device.size_nbytes)}" if device.size_nbytes else str(device)
        for device in facts.devices
    )
    room = max(0, facts.free_nbytes - facts.reserve_nbytes)
    rows = [
        ("file system", f"{facts.mount.file_system} at {facts.mount.mount_point}"),
        ("device", devices or "unknown"),
        (
            "space",
            f"{format_nbytes(facts.free_nbytes)} free of {format_nbytes(facts.total_nbytes)}; {format_nbytes(room)} "
            f"usable, {format_nbytes(facts.reserve_nbytes)} kept free",
        ),
        ("quota", facts.quota),
    ]
    if facts.failure:
        rows.append(("cannot be used", facts.failure))
    if facts.calibration is not None:
        rows += _speed_rows(facts.calibration)
    rows.append(("GPUDirect Storage", f"not here: {facts.gds}" if facts.gds else "the file system is fit for it"))
    rows += [(f"wear of {wear.device}", _wear(wear, left, facts.bytes_per_day)) for wear, left in facts.days_left()]
    rows.append(("written by teraio", _ledger(facts)))
    return rows


def _speed_rows(speed: DeviceCalibration) -> list[tuple[str, str]]:
    direct = speed.transport == "posix-direct"
    mixed = speed.mixed_read_bytes_per_s + speed.mixed_write_bytes_per_s
    duplex = "half duplex" if speed.mixed_factor < 0.65 else "full duplex" if speed.mixed_factor > 0.9 else "in between"
    alignment = f"blocks of {speed.block_nbytes} B, memory at multiples of {speed.memory_alignment_nbytes} B"
    return [
        ("direct I/O", f"{'yes' if direct else 'no'}: {speed.reason}"),
        ("alignment", alignment if direct else "none needed"),
        ("read", _rate(speed.read_bytes_per_s, speed.read_noise)),
        ("write", _rate(speed.write_bytes_per_s, speed.write_noise)),
        ("both at once", f"{_rate(mixed, speed.mixed_noise)} together: {duplex} ({speed.mixed_factor:.2f})"),
        ("latency of 4 KiB", format_seconds(speed.latency_s)),
        ("processor time", f"{speed.read_cpu_s_per_gb:.3f} s/GB read, {speed.write_cpu_s_per_gb:.3f} s/GB written"),
        ("best call size", f"{format_nbytes(speed.chunk_nbytes)}, {speed.num_threads} at once"),
    ]


def _rate(bytes_per_s: float, noise: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s (noise {noise:.0%})"


def _wear(wear: Wear, left: DaysLeft, bytes_per_day: float | None) -> str:
    if wear.reason:
        text = f"unknown: {wear.reason}"
    else:
        used = "" if wear.percentage_used is None else f"{wear.percentage_used:.0f} % of its rated life used"
        written = "" if wear.written_nbytes is None else f"{wear.written_nbytes / 1e12:.1f} TB written in all"
        text = f"{', '.join(filter(None, (used, written)))} ({wear.source})"
    if left.days is not None and bytes_per_day is not None:
        return f"{text}; {left.days:.0f} days left at {bytes_per_day / 1e12:.3g} TB a day ({left.reason})"
    return text if wear.reason else f"{text}; days left unknown: {left.reason}"


def machine_rows(machine: MachineFacts) -> list[tuple[str, str]]:
    """The machine, line by line."""
    container = machine.container_free_nbytes
    locked = machine.locked_nbytes
    return [
        ("kernel, cores", f"{machine.kernel}, {machine.num_cores}"),
        ("host memory", f"{format_nbytes(machine.free_nbytes)} may be taken: {machine.free_reason}"),
        ("container's limit", "none" if container is None else f"{format_nbytes(container)} left"),
        ("locked memory", "no limit" if locked is None else f"at most {format_nbytes(locked)} (`ulimit -l`)"),
        ("huge pages", machine.huge_pages or "unknown"),
        ("THP_MEM_ALLOC_ENABLE", "set" if machine.torch_huge_pages else "not set"),
        ("KvikIO", machine.kvikio or "can be used"),
        (
            "nvidia-fs module",
            machine.nvidia_fs or "not loaded (GPUDirect Storage needs it, unless the driver has PCI peer-to-peer)",
        ),
    ]


def _ledger(facts: DirectoryFacts) -> str:
    ledger = facts.ledger
    if ledger.note:
        return "unknown"
    if not ledger.since:
        return "nothing yet"
    return (
        f"{format_nbytes(ledger.written_nbytes)} written, {format_nbytes(ledger.read_nbytes)} read in "
        f"{ledger.sessions} sessions since {ledger.since}"
    )


def _table(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(title=title, show_header=False, title_style="bold", title_justify="left")
    table.add_column("")
    table.add_column("", overflow="fold")
    for name, text in rows:
        table.add_row(name, text)
    return table
