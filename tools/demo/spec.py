"""What one segment of the demo is: a training run of so many steps, in one mode, in its own process.

Covers the record handed to a worker process, and the events a worker reports.
Does not run anything: ``worker`` does, and ``worker_process`` listens.
Must stay true: a segment is fully described by its record, which travels as JSON; two segments that differ only in
``mode`` train the same thing.

A worker reports one JSON object per line, each with an ``event``:

- ``baseline``: libraries are loaded, the model is not; ``rss_nbytes``, ``budget_nbytes``, ``torch``, ``threads``.
- ``step``: one step done; ``step`` (from 0), ``loss`` (hexadecimal float), ``step_s``, ``measuring``.
- ``trained``: the timed steps are over; ``device_peak_nbytes`` (peak of CUDA's allocator; null on CPU).
- ``done``: everything is; ``weights_sha256``, ``peak_nbytes``, and of the session ``report`` (over the timed steps)
  and ``session_peak_nbytes``, both null in plain mode.
- ``error``: it cannot go on; ``message``, ``usage`` (whether it was asked for wrongly).
"""

import json
from dataclasses import asdict, dataclass
from typing import Literal, Self

from .shape import GptShape

Mode = Literal["plain", "teraio"]

LEARNING_STEPS = 3
"""Steps at the start of a segment that do not count: teraio learns the iteration in them. Plain leaves them out too."""

MEASURING_STEPS = 3
"""Untimed steps under the recorder, after the timed ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentSpec:
    """One training run in one process."""

    mode: Mode
    """With or without offload."""
    steps: int = 12
    """Timed steps."""
    measuring_steps: int = 0
    """Further steps, untimed, under ``lifetime.Recorder``."""
    layers: int = 4
    """Transformer blocks."""
    width: int = 768
    """Width of the residual stream."""
    batch: int = 3
    """Sequences per step."""
    sequence: int = 448
    """Tokens per sequence."""
    seed: int = 0
    """Of the weights, the dropout and the batches."""
    device: str = "cpu"
    """Where to train: ``"cpu"`` or ``"cuda"``."""
    budget: str | int | None = None
    """Bytes, or what a person typed (``"600MiB"``); ``None`` is the session's own default."""
    spill: str | None = None
    """Directory to offload to; ``None`` is the session's own default."""
    policy: str = "planned"
    """Policy of the session."""
    exact_malloc: bool = False
    """Return freed memory to the kernel at once, so that resident memory is what is allocated. Slower; never timed."""

    @property
    def shape(self) -> GptShape:
        """The model's size; raises ``ValueError`` if there is no such model."""
        return GptShape(layers=self.layers, width=self.width, sequence=self.sequence)

    @property
    def name(self) -> str:
        """What to call the segment in a message."""
        return "measuring" if self.exact_malloc else self.mode

    def to_json(self) -> str:
        """This record as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The record that ``to_json`` wrote."""
        return cls(**json.loads(text))
