"""What the demo found out, in the form in which ``--json`` writes it.

Covers the names of the numbers and their units, and the verdict that the exit code follows.
Does not compute them (``comparison`` does) or lay them out (``render`` does).
Must stay true: everything shown to people is in here, so the file alone can be rendered again.
"""

from typing import TypedDict


class ModeResult(TypedDict):
    """One mode, over its segments."""

    step_s: float
    """Median seconds per step, learning steps left out."""
    peak_nbytes: int
    """Peak of live tensor bytes, by the same recorder in both modes."""
    rss_baseline_nbytes: int
    """Anonymous memory of the process before the model, the least of the segments."""
    rss_peak_nbytes: int
    """Peak of anonymous memory while training, the most of the segments."""
    step_times_s: list[list[float]]
    """Every timed step, by segment."""
    losses: list[list[str]]
    """Loss of every timed step as a hexadecimal float, by segment."""
    weights_sha256: list[str]
    """Hash of the final weights, by segment."""


class Machine(TypedDict):
    """Where it ran, and what."""

    cpu: str
    """Processor name."""
    cores: int
    """Cores the process may use."""
    torch: str
    """Version of torch."""
    threads: int
    """Threads torch computes with."""
    device: str
    """Training device."""
    layers: int
    """Transformer blocks."""
    width: int
    """Width of the residual stream."""
    batch: int
    """Sequences per step."""
    sequence: int
    """Tokens per sequence."""


class DemoResult(TypedDict):
    """The whole demo."""

    budget_nbytes: int
    """Budget of the teraio segments."""
    within_budget: bool
    """Neither the recorder nor the session saw more than the budget."""
    bit_identical: bool
    """All losses and all final weights are equal, bit for bit, in all segments."""
    losses_equal: bool
    """All losses are."""
    weights_equal: bool
    """All final weights are."""
    plain_repeats: bool
    """The plain segments equal each other: without this, teraio cannot equal both."""
    fraction_of_ideal: float
    """Plain's step time over teraio's: 1 is no slowdown."""
    noisy: bool
    """Plain's own segments differ by more than 5 %."""
    rss_baseline_nbytes: int
    """The same as ``teraio["rss_baseline_nbytes"]``."""
    unseen_nbytes: int
    """What kernels take beside tensors, measured on a plain run."""
    plain: ModeResult
    """Without offload."""
    teraio: ModeResult
    """With it."""
    session_peak_nbytes: int
    """The peak by the session's own account, over all its steps."""
    written_nbytes: int
    """Bytes written in all timed steps of all teraio segments."""
    read_nbytes: int
    """Bytes read in them."""
    stall_s: float
    """Seconds compute waited for I/O in them."""
    written_nbytes_per_step: int
    """``written_nbytes`` over the number of steps."""
    read_nbytes_per_step: int
    """``read_nbytes`` over the number of steps."""
    stall_s_per_step: float
    """``stall_s`` over the number of steps."""
    paths: dict[str, int]
    """Bytes by the way they took."""
    events: list[str]
    """What the sessions had to say: fallbacks, warnings, advice."""
    machine: Machine
    """Where it ran."""


def has_succeeded(result: DemoResult) -> bool:
    """Whether teraio kept both its promises: the budget, and the bits."""
    return result["bit_identical"] and result["within_budget"]
