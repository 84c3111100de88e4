"""The course of the demo: which segments run in which order, and what their records add up to.

Covers the measuring process, the budget that follows from it, the four timed segments and the numbers drawn from them.
Does not run a process (``worker_process`` does) or print anything (``render`` does).
Must stay true: a number of one mode is computed exactly as the same number of the other.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from .process_facts import cpu_model, num_cores
from .result import DemoResult, Machine, ModeResult
from .spec import LEARNING_STEPS, MEASURING_STEPS, Mode, SegmentSpec
from .worker_process import OnStep, SegmentRecord, run_worker

BUDGET_SHARE = 0.58
"""Default budget, as a share of plain's peak tensor bytes."""

ORDER: tuple[Mode, ...] = ("plain", "teraio", "plain", "teraio")
"""Alternating, because a machine's speed drifts: only neighbours compare."""

NOISY_SHARE = 0.05
"""Plain segments that differ by more than this share say that the machine was not quiet."""

_EXACT_STEPS = 2
"""Steps of the measuring process: the optimizer's state is there from the second on."""

_MIB = 1 << 20

RunSegment = Callable[[SegmentSpec, OnStep], SegmentRecord]


def measuring_spec(spec: SegmentSpec) -> SegmentSpec:
    """The segment that measures plain memory: a few untimed steps with exact malloc."""
    return replace(spec, mode="plain", steps=_EXACT_STEPS, measuring_steps=MEASURING_STEPS, exact_malloc=True)


def timed_specs(spec: SegmentSpec) -> list[SegmentSpec]:
    """The timed segments, in order; the plain peak is known by then."""
    return [replace(spec, mode=mode, measuring_steps=MEASURING_STEPS if mode == "teraio" else 0) for mode in ORDER]


def num_steps(spec: SegmentSpec) -> int:
    """Steps of the whole demo, for a progress bar."""
    return sum(each.steps + each.measuring_steps for each in [measuring_spec(spec), *timed_specs(spec)])


def compare(spec: SegmentSpec, on_step: OnStep, *, run: RunSegment = run_worker) -> DemoResult:
    """Run the whole demo. Blocks for minutes.

    Args:
        spec: Steps, sizes, device, spill directory and policy; its budget may be ``None`` for the default. Its mode and
            measuring steps do not matter.
        on_step: Called after each step of each segment.
        run: Runs one segment; replaced by tests.

    Returns:
        Everything the demo found out.

    Raises:
        CommandError: A segment failed. Those before it are lost.
    """
    measured = run(measuring_spec(spec), on_step)
    budget_nbytes = measured.budget_nbytes or default_budget_nbytes(_known(measured.peak_nbytes))
    records = [run(each, on_step) for each in timed_specs(replace(spec, budget=budget_nbytes))]
    return summarise(measured, records, budget_nbytes=budget_nbytes)


def default_budget_nbytes(plain_peak_nbytes: int) -> int:
    """``BUDGET_SHARE`` of plain's peak, whole MiB, at least one."""
    return max(int(plain_peak_nbytes * BUDGET_SHARE) // _MIB, 1) * _MIB


def unseen_nbytes(measured: SegmentRecord) -> int:
    """Memory that the kernels take beside tensors: the process's growth beyond its peak of tensor bytes, in bytes.

    On CUDA it is the caching allocator's peak beyond the same, since the process's memory is the host's there.
    """
    growth_nbytes = measured.device_peak_nbytes
    if growth_nbytes is None:
        growth_nbytes = measured.rss_peak_nbytes - measured.rss_baseline_nbytes
    return max(0, growth_nbytes - _known(measured.peak_nbytes))


def counted_times_s(record: SegmentRecord) -> list[float]:
    """A segment's step times without the learning steps; short segments keep at least their last step."""
    return record.step_times_s[min(LEARNING_STEPS, len(record.step_times_s) - 1) :]


def summarise(measured: SegmentRecord, records: Sequence[SegmentRecord], *, budget_nbytes: int) -> DemoResult:
    """The result of the demo from the records of its segments.

    Args:
        measured: The measuring process.
        records: The timed segments, in order.
        budget_nbytes: What the teraio segments were given.
    """
    plain_records = [record for record in records if record.spec.mode == "plain"]
    teraio_records = [record for record in records if record.spec.mode == "teraio"]
    plain = _summarise_mode(plain_records, peaks_of=[measured])
    teraio = _summarise_mode(teraio_records, peaks_of=teraio_records)
    reports = [record.report or {} for record in teraio_records]
    num_offload_steps = sum(record.spec.steps for record in teraio_records)
    plain_medians_s = [statistics.median(counted_times_s(record)) for record in plain_records]
    paths: dict[str, int] = {}
    for report in reports:
        for path, nbytes in report["paths"].items():
            paths[path] = paths.get(path, 0) + nbytes
    written_nbytes = sum(report["written_nbytes"] for report in reports)
    read_nbytes = sum(report["read_nbytes"] for report in reports)
    stall_s = sum(report["stall_s"] for report in reports)
    session_peak_nbytes = max(_known(record.session_peak_nbytes) for record in teraio_records)
    return DemoResult(
        budget_nbytes=budget_nbytes,
        within_budget=max(teraio["peak_nbytes"], session_peak_nbytes) <= budget_nbytes,
        bit_identical=_all_equal([*plain["weights_sha256"], *teraio["weights_sha256"]])
        and _all_equal([*plain["losses"], *teraio["losses"]]),
        losses_equal=_all_equal([*plain["losses"], *teraio["losses"]]),
        weights_equal=_all_equal([*plain["weights_sha256"], *teraio["weights_sha256"]]),
        plain_repeats=_all_equal(plain["weights_sha256"]) and _all_equal(plain["losses"]),
        fraction_of_ideal=plain["step_s"] / teraio["step_s"],
        noisy=max(plain_medians_s) > min(plain_medians_s) * (1 + NOISY_SHARE),
        rss_baseline_nbytes=teraio["rss_baseline_nbytes"],
        unseen_nbytes=unseen_nbytes(measured),
        plain=plain,
        teraio=teraio,
        session_peak_nbytes=session_peak_nbytes,
        written_nbytes=written_nbytes,
        read_nbytes=read_nbytes,
        stall_s=stall_s,
        written_nbytes_per_step=written_nbytes // num_offload_steps,
        read_nbytes_per_step=read_nbytes // num_offload_steps,
        stall_s_per_step=stall_s / num_offload_steps,
        paths=paths,
        events=sorted({str(event) for report in reports for event in report["events"]}),
        machine=_machine(measured),
    )


def _summarise_mode(records: Sequence[SegmentRecord], *, peaks_of: Sequence[SegmentRecord]) -> ModeResult:
    """What one mode's segments add up to: median over all counted steps, worst peaks."""
    return ModeResult(
        step_s=statistics.median(time_s for record in records for time_s in counted_times_s(record)),
        peak_nbytes=max(_known(record.peak_nbytes) for record in peaks_of),
        rss_baseline_nbytes=min(record.rss_baseline_nbytes for record in records),
        rss_peak_nbytes=max(record.rss_peak_nbytes for record in records),
        step_times_s=[record.step_times_s for record in records],
        losses=[record.losses for record in records],
        weights_sha256=[record.weights_sha256 for record in records],
    )


def _machine(record: SegmentRecord) -> Machine:
    """Where the demo ran, and how large the model was."""
    spec = record.spec
    return Machine(
        cpu=cpu_model(),
        cores=num_cores(),
        torch=record.torch,
        threads=record.threads,
        device=spec.device,
        layers=spec.layers,
        width=spec.width,
        batch=spec.batch,
        sequence=spec.sequence,
    )


def _all_equal(values: Sequence[object]) -> bool:
    """Whether all values are the same."""
    return all(value == values[0] for value in values)


def _known(nbytes: int | None) -> int:
    """A number that a segment of this kind always reports."""
    assert nbytes is not None
    return nbytes
