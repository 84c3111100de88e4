"""The options of ``teraio demo``, and what they make it do.

Covers argument parsing and the choice between the whole comparison and one segment alone.
Does not train, compare or lay out anything: ``comparison`` and ``render`` do.
Must stay true: this process imports neither torch nor teraio. Under a memory limit nearly all of it is the worker's,
and what only they can check (the budget's spelling, the device) is checked by the first worker.
"""

import argparse
from pathlib import Path

from ..errors import CommandError, UsageError
from ..json_output import check_json_file, write_json
from .comparison import compare, num_steps
from .process_facts import reads_proc
from .render import progress_line, render_result, render_segment
from .result import has_succeeded
from .shape import HEAD_WIDTH
from .spec import SegmentSpec
from .worker_process import run_worker

DESCRIPTION = """
Train a small byte-level GPT on the source of Python's standard library, in turn without and with offload under a memory
budget, and compare memory, speed, losses and final weights, bit by bit.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``demo`` and its options."""
    defaults = {field.name: field.default for field in SegmentSpec.__dataclass_fields__.values()}
    parser = subparsers.add_parser(
        "demo", help="train with and without a memory budget, and compare", description=DESCRIPTION
    )
    parser.add_argument(
        "--budget", metavar="SIZE", help='tensor bytes allowed, e.g. "600MiB" (default: 58%% of the plain peak)'
    )
    parser.add_argument("--spill", metavar="DIR", help="directory to offload to (default: teraio's own choice)")
    parser.add_argument("--policy", default=defaults["policy"], help="what decides the moves (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=defaults["device"], help="default: %(default)s")
    parser.add_argument(
        "--steps",
        type=_positive,
        default=defaults["steps"],
        help="timed steps a segment; the first 3 only learn (default: %(default)s)",
    )
    for name, text in (
        ("layers", "transformer blocks"),
        ("width", f"width of the model, a multiple of {HEAD_WIDTH}"),
        ("batch", "sequences a step"),
        ("sequence", "tokens a sequence"),
    ):
        parser.add_argument(f"--{name}", type=_positive, default=defaults[name], help=f"{text} (default: %(default)s)")
    parser.add_argument(
        "--mode", choices=("plain", "teraio"), help="run one segment alone and print its losses and weights' hash"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to FILE")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo, or one segment of it; returns 0, or 1 if the budget or the bits were not kept.

    Raises:
        UsageError: An option's value cannot be used here.
        CommandError: A segment failed.
    """
    spec = _spec(args)
    check_json_file(args.json)
    if not reads_proc():
        raise CommandError("the demo measures memory through /proc/<pid>/status, which this system does not have")
    return _run_segment(spec, args.json) if args.mode else _run_comparison(spec, args.json)


def _spec(args: argparse.Namespace) -> SegmentSpec:
    """The segment that the options describe.

    Raises:
        UsageError: They contradict each other or ask for a model that cannot be.
    """
    if args.mode == "plain" and args.budget is not None:
        raise UsageError("--budget has no meaning with --mode plain, which trains without a budget")
    spec = SegmentSpec(
        mode=args.mode or "teraio",
        steps=args.steps,
        layers=args.layers,
        width=args.width,
        batch=args.batch,
        sequence=args.sequence,
        device=args.device,
        budget=args.budget,
        spill=args.spill,
        policy=args.policy,
    )
    try:
        _ = spec.shape
    except ValueError as error:
        raise UsageError(str(error)) from error
    return spec


def _run_comparison(spec: SegmentSpec, json_file: Path | None) -> int:
    """The whole demo."""
    with progress_line(num_steps(spec)) as on_step:
        result = compare(spec, on_step)
    render_result(result)
    write_json(json_file, result)
    return 0 if has_succeeded(result) else 1


def _run_segment(spec: SegmentSpec, json_file: Path | None) -> int:
    """One segment alone, without the measuring steps, which cost memory of their own."""
    with progress_line(spec.steps) as on_step:
        record = run_worker(spec, on_step)
    render_segment(record)
    write_json(json_file, record.to_dict())
    return 0


def _positive(text: str) -> int:
    """An option's value as an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)
