"""The demo's result as a table and a sentence, and its progress as one line.

Covers everything a person sees of a demo.
Does not compute a number: each comes out of the result as it is.
Must stay true: rendering needs the result alone, so a saved one can be shown again.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..sizes import format_nbytes, format_seconds
from .result import DemoResult, ModeResult
from .spec import SegmentSpec
from .worker_process import OnStep, SegmentRecord


@contextmanager
def progress_line(num_steps: int) -> Iterator[OnStep]:
    """A progress bar while the block runs, or a line for each segment where stderr is no terminal.

    Gives the function to call after each step.
    """
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=num_steps)

        def on_step(spec: SegmentSpec, num_done: int, step_s: float) -> None:
            if not console.is_terminal and num_done == 1:  # a log wants a line now and then
                console.print(f"training: {spec.name}", soft_wrap=True)
            progress.update(task, advance=1, description=f"{spec.name}: {format_seconds(step_s)} a step")

        yield on_step


def render_result(result: DemoResult, console: Console | None = None) -> None:
    """Print the comparison, what was moved, and the outcome in one sentence; on stdout unless told where."""
    console = console or Console()
    console.print(_comparison_table(result))
    console.print(_movement_table(result))
    for event in result["events"]:
        console.print(f"note: {event}", markup=False, soft_wrap=True)
    if result["noisy"]:
        console.print(
            "note: the plain runs differ by over 5 %: the machine was busy, the times are not exact", soft_wrap=True
        )
    console.print(outcome(result), markup=False, soft_wrap=True)


def render_segment(record: SegmentRecord, console: Console | None = None) -> None:
    """Print one segment run by itself: losses and step times, memory, and the hash of the weights."""
    console = console or Console()
    for step, (loss, step_s) in enumerate(zip(record.losses, record.step_times_s, strict=True), start=1):
        console.print(
            f"step {step}: loss {float.fromhex(loss):.6f} ({loss}), {format_seconds(step_s)}", highlight=False
        )
    growth_nbytes = record.rss_peak_nbytes - record.rss_baseline_nbytes
    console.print(
        f"memory: {format_nbytes(growth_nbytes)} above the baseline of {format_nbytes(record.rss_baseline_nbytes)}"
    )
    if record.session_peak_nbytes is not None:
        console.print(f"peak tensor bytes: {format_nbytes(record.session_peak_nbytes)}", highlight=False)
    console.print(f"weights sha256: {record.weights_sha256}", highlight=False, soft_wrap=True)


def outcome(result: DemoResult) -> str:
    """One plain sentence: what happened, or what went wrong."""
    if not result["plain_repeats"]:
        return "The comparison failed: two plain runs with the same seed ended with different bits on this machine."
    if not result["bit_identical"]:
        return "The comparison failed: teraio's losses or weights differ from the plain run's."
    peak = format_nbytes(max(result["teraio"]["peak_nbytes"], result["session_peak_nbytes"]))
    if not result["within_budget"]:
        budget = format_nbytes(result["budget_nbytes"])
        return f"The budget was not kept: tensors peaked at {peak}, over the budget of {budget}."
    plain_peak = format_nbytes(result["plain"]["peak_nbytes"])
    return (
        f"teraio trained the same model to the same bits with {peak} of tensors instead of {plain_peak}, "
        f"at {result['fraction_of_ideal']:.0%} of the plain speed."
    )


def _comparison_table(result: DemoResult) -> Table:
    """Plain beside teraio."""
    machine = result["machine"]
    plain, teraio = result["plain"], result["teraio"]
    size = (
        f"{machine['layers']} layers, width {machine['width']}, batch {machine['batch']} x {machine['sequence']} tokens"
    )
    table = Table(
        title=f"{size}\n{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}, {machine['device']}",
        title_style="",
    )
    table.add_column("")
    for mode in ("plain", "teraio"):
        table.add_column(mode, justify="right")
    table.add_row("peak tensor bytes", format_nbytes(plain["peak_nbytes"]), format_nbytes(teraio["peak_nbytes"]))
    table.add_row(
        "peak memory growth (RSS)", format_nbytes(_growth_nbytes(plain)), format_nbytes(_growth_nbytes(teraio))
    )
    table.add_row("median step time", format_seconds(plain["step_s"]), format_seconds(teraio["step_s"]))
    return table


def _movement_table(result: DemoResult) -> Table:
    """The budget, what was moved to keep it, and whether anything changed."""
    table = Table(show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("budget", format_nbytes(result["budget_nbytes"]))
    for name, total, per_step in (
        ("written", result["written_nbytes"], result["written_nbytes_per_step"]),
        ("read", result["read_nbytes"], result["read_nbytes_per_step"]),
    ):
        table.add_row(name, f"{format_nbytes(per_step)} a step, {format_nbytes(total)} in all")
    stall, total_stall = format_seconds(result["stall_s_per_step"]), format_seconds(result["stall_s"])
    table.add_row("stall", f"{stall} a step, {total_stall} in all")
    table.add_row("transport", ", ".join(f"{path} {format_nbytes(nbytes)}" for path, nbytes in _used(result["paths"])))
    table.add_row("fraction of ideal", f"{result['fraction_of_ideal']:.3f}")
    table.add_row("kernel scratch beside tensors", format_nbytes(result["unseen_nbytes"]))
    table.add_row("losses equal", _yes_no(result["losses_equal"]))
    table.add_row("final weights equal", f"{_yes_no(result['weights_equal'])} ({_hashes(result)})")
    if not result["plain_repeats"]:
        table.add_row("plain equals plain", "no")
    return table


def _growth_nbytes(mode: ModeResult) -> int:
    """How far a mode's process grew beyond its baseline."""
    return mode["rss_peak_nbytes"] - mode["rss_baseline_nbytes"]


def _used(paths: dict[str, int]) -> list[tuple[str, int]]:
    """The paths that carried something, the busiest first."""
    return sorted(((path, nbytes) for path, nbytes in paths.items() if nbytes), key=lambda item: -item[1])


def _hashes(result: DemoResult) -> str:
    """The distinct hashes of the final weights, shortened."""
    hashes = sorted({*result["plain"]["weights_sha256"], *result["teraio"]["weights_sha256"]})
    return "sha256 " + ", ".join(value[:12] for value in hashes)


def _yes_no(value: bool) -> str:
    """A truth value in a table."""
    return "yes" if value else "no"
