"""The benchmark's result as tables, on a terminal and as Markdown.

Covers everything a person sees of it, and the progress line.
Does not compute a number: ``result`` does.
Must stay true: both forms show the same cells, and a contender without numbers shows why.
"""

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..sizes import format_nbytes
from .result import BenchResult, CaseResult, Row

HEADINGS = ("contender", "GB/s", "min – max", "CPU s/GB", "of best fio")
NOTE = (
    "GB are 10^9 bytes. CPU: user and system seconds of the measuring process; for fio those of its I/O thread as it "
    "reports them. Medians over {num_rounds} rounds; in each round every contender ran once, in turns."
)


class ProgressLine:
    """A progress bar on stderr, if that is a terminal; shown while the block runs."""

    def __init__(self) -> None:
        """Nothing is shown yet."""
        console = Console(stderr=True)
        columns = (TextColumn("{task.description:<60}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("starting", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, text: str) -> None:
        """Say what is going on."""
        self._progress.update(self._task, description=text)

    def expect(self, num_measurements: int) -> None:
        """Say how many measurements there will be."""
        self._progress.update(self._task, total=num_measurements)

    def count(self, text: str) -> None:
        """Count a measurement, and say which."""
        self._progress.update(self._task, advance=1, description=text)


def render_result(result: BenchResult, console: Console | None = None) -> None:
    """Print the machine, the contenders, a table per case and the summary; on stdout unless told where."""
    console = console or Console()
    for title, headings, rows in _tables(result):
        table = Table(title=title, title_style="", title_justify="left")
        for number, heading in enumerate(headings):
            table.add_column(heading, justify="left" if number == 0 or len(headings) == 2 else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table, markup=False)
    console.print(NOTE.format(num_rounds=result.num_rounds), markup=False, soft_wrap=True)


def to_markdown(result: BenchResult) -> str:
    """The same as Markdown."""
    parts = []
    for title, headings, rows in _tables(result):
        alignment = [":--"] + [":--" if len(headings) == 2 else "--:"] * (len(headings) - 1)
        lines = [headings, alignment, *rows]
        parts.append(f"### {title}\n\n" + "\n".join(_markdown_line(line) for line in lines) + "\n")
    return "\n".join([*parts, NOTE.format(num_rounds=result.num_rounds) + "\n"])


_TextTable = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""Title, headings and rows."""


def _tables(result: BenchResult) -> Iterator[_TextTable]:
    """Every table of the result."""
    yield "Machine", ("", ""), list(result.machine.items())
    missing = [(each.name, f"missing: {each.reason}") for each in result.missing]
    yield "Contenders", ("contender", "what it is"), [*result.contenders.items(), *missing]
    for case in result.cases:
        yield _title(case), HEADINGS, [_cells(case, row) for row in case.rows]
    yield _summary(result)


def _summary(result: BenchResult) -> _TextTable:
    """teraio's share of the best of fio's throughput, by case."""
    names = [row.name for row in result.cases[0].rows if row.family == "teraio"] if result.cases else []
    rows = []
    for case in result.cases:
        shares = [_share(case, row) for row in case.rows if row.family == "teraio"]
        best = case.best_fio
        rows.append((_title(case), *shares, "–" if best is None else best.name))
    return "Throughput as a share of the best of fio's", ("case", *names, "best of fio"), rows


def _title(case: CaseResult) -> str:
    """A case in words."""
    each = case.case
    depth = f"{each.depth} in flight" if each.depth > 1 else "one at a time"
    return f"{each.workload}, {format_buffer(each.buffer_nbytes)}, {depth}, {format_nbytes(each.total_nbytes)}"


def format_buffer(nbytes: int) -> str:
    """The size of a buffer, whole MiB where it is one."""
    return f"{nbytes >> 20} MiB" if nbytes % (1 << 20) == 0 else format_nbytes(nbytes)


def _cells(case: CaseResult, row: Row) -> Sequence[str]:
    """A row of a case's table."""
    if not row.succeeded:
        return (f"{row.name}: failed ({row.failure or 'no rounds'})", "–", "–", "–", "–")
    speed = case.gb_per_s(row)
    return (
        row.name,
        f"{speed.median:.2f}",
        f"{speed.least:.2f} – {speed.most:.2f}",
        f"{case.cpu_s_per_gb(row).median:.3f}",
        _share(case, row),
    )


def _share(case: CaseResult, row: Row) -> str:
    """A row's throughput as a share of the best of fio's."""
    ratio = case.ratio_to_best_fio(row)
    return "–" if ratio is None else f"{ratio:.2f}"


def _markdown_line(cells: Sequence[str]) -> str:
    """One line of a table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
