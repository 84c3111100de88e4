"""One segment of the demo, in the process that trains it.

Covers the training loop, its clock, the hash of the final weights, and the peak of live tensor bytes.
Does not choose what to run (``comparison`` does) nor watch the process's memory (``worker_process`` does, from
outside).
Must stay true: both modes go through the same lines here. Plain mode loads no teraio, and nothing but the loop itself
runs between the first timed step and the last. This module imports torch and teraio inside functions, teraio first:
see ``worker``.
"""

import hashlib
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

from ..errors import UsageError
from .process_facts import own_anonymous_nbytes
from .spec import SegmentSpec

if TYPE_CHECKING:
    from torch import nn

    import teraio

LEARNING_RATE = 3e-4


class Emit(Protocol):
    """Reports one event of the segment to the parent process; ``spec`` lists them."""

    def __call__(self, event: str, **values: object) -> None: ...


class Trainer:
    """The model, its optimizer and its batches, and one step of training.

    Thread safety: one thread.
    Invariants: step ``i`` always sees batch ``i``, whatever was trained before.
    """

    def __init__(self, spec: SegmentSpec) -> None:
        import torch

        from .model import Gpt
        from .text import TextBatches, standard_library_source

        torch.manual_seed(spec.seed)
        self.model = Gpt(spec.shape).to(spec.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self._batches = TextBatches(
            standard_library_source(), batch=spec.batch, sequence=spec.sequence, seed=spec.seed, device=spec.device
        )
        self._is_cuda = spec.device == "cuda"
        self.while_loading: Callable[[], AbstractContextManager[object]] = nullcontext
        """What batches are made under: a recorder of the training's memory looks away, the text is not part of it."""

    def step(self, index: int) -> tuple[float, float]:
        """Train on batch ``index``.

        Returns:
            The loss, and the time in seconds of forward, backward, optimizer step and clearing of the gradients.
        """
        with self.while_loading():
            tokens, targets = self._batches.batch(index)
        self._synchronize()
        started_s = time.perf_counter()
        loss = self.model(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._synchronize()
        elapsed_s = time.perf_counter() - started_s
        return loss.item(), elapsed_s

    def _synchronize(self) -> None:
        """Wait until the device has done what it was given, so that the clock sees it."""
        if self._is_cuda:
            import torch

            torch.cuda.synchronize()


def run_segment(spec: SegmentSpec, emit: Emit) -> None:
    """Train one segment from the seed and report every step.

    The order matters: baseline, timed steps, the hash of the weights, and only then the steps under the recorder, which
    slow training down and change the weights.

    Args:
        spec: What to run.
        emit: Called with each event, in this thread.

    Raises:
        UsageError: The device is not there.
        teraio.TeraioError: From the session, in teraio mode. (Its budget is parsed here in the measuring segment too.)
    """
    budget_nbytes = _load_offload(spec)
    _warm_up(spec)
    import torch

    emit(
        "baseline",
        rss_nbytes=own_anonymous_nbytes(),
        budget_nbytes=budget_nbytes,
        torch=torch.__version__,
        threads=torch.get_num_threads(),
    )
    trainer = Trainer(spec)
    with _offloaded(spec, trainer, budget_nbytes) as session:
        for index in range(spec.steps):
            loss, step_s = trainer.step(index)
            emit("step", step=index, loss=loss.hex(), step_s=step_s, measuring=False)
        device_peak_nbytes = torch.cuda.max_memory_allocated() if spec.device == "cuda" else None
        emit("trained", device_peak_nbytes=device_peak_nbytes)
        report = session.report().to_dict() if session else None
        with session.materialize() if session else nullcontext():
            weights_sha256 = hash_weights(trainer.model)
        peak_nbytes = _measure_peak(spec, trainer, emit)
        session_peak_nbytes = session.report().peak_nbytes if session else None
    emit(
        "done",
        weights_sha256=weights_sha256,
        peak_nbytes=peak_nbytes,
        session_peak_nbytes=session_peak_nbytes,
        report=report,
    )


def hash_weights(model: "nn.Module") -> str:
    """The sha256 of every parameter's bytes, in the order of the names, as hexadecimal digits."""
    import torch

    digest = hashlib.sha256()
    for _, parameter in sorted(model.named_parameters()):
        values = parameter.detach().cpu().contiguous().flatten()
        digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _load_offload(spec: SegmentSpec) -> int | None:
    """Load teraio where the segment uses it, and return its budget in bytes (``None``: not used, or the default).

    The measuring segment is the first: it refuses here what the later ones could not use.
    """
    if spec.mode == "plain" and not spec.exact_malloc:
        return None
    import teraio

    if spec.exact_malloc:
        from io_backend import SpillDirectory
        from teraio.arguments import resolve_policy, spill_directories
        from teraio.runtime.process_memory import use_exact_malloc

        resolve_policy(spec.policy)
        for directory in spill_directories(spec.spill):
            SpillDirectory.create(directory).close()
        use_exact_malloc()
    return teraio.parse_nbytes(spec.budget) if isinstance(spec.budget, str) else spec.budget


def _warm_up(spec: SegmentSpec) -> None:
    """Make the process allocate what every training process has: kernels' threads and an optimizer's imports.

    Raises:
        UsageError: The device is not there.
    """
    if spec.device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first use of cuBLAS
    import torch

    if spec.device == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(f"--device cuda: torch {torch.__version__} finds no CUDA device here (use --device cpu)")
        torch.use_deterministic_algorithms(True, warn_only=True)
    square = torch.ones(512, 512, device=spec.device)
    torch.mm(square, square)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1, device=spec.device))])


def _offloaded(
    spec: SegmentSpec, trainer: Trainer, budget_nbytes: int | None
) -> "AbstractContextManager[teraio.Session | None]":
    """The offload session of teraio mode; nothing in plain mode."""
    if spec.mode == "plain":
        return nullcontext()
    import teraio

    return teraio.offload(trainer.model, trainer.optimizer, budget=budget_nbytes, spill=spec.spill, policy=spec.policy)


def _measure_peak(spec: SegmentSpec, trainer: Trainer, emit: Emit) -> int | None:
    """Peak of live tensor bytes over the measuring steps; ``None`` if there are none."""
    if not spec.measuring_steps:
        return None
    import lifetime

    with lifetime.Recorder(model=trainer.model, optimizer=trainer.optimizer) as recorder:
        trainer.while_loading = recorder.pause
        for index in range(spec.steps, spec.steps + spec.measuring_steps):
            loss, step_s = trainer.step(index)
            emit("step", step=index, loss=loss.hex(), step_s=step_s, measuring=True)
    return int(recorder.peak_nbytes)
