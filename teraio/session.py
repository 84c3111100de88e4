"""The context manager: what users open, ask, and close.

Covers arguments, the order of starting and stopping, and the report. Recording and planning are wired in
``iterations``; moving is the engine's. The rules: `offload` activates nothing before ``__enter__``; leaving takes every
hook away; the store lives until the last tensor that was saved inside has died, so that a backward pass after the block
works.
"""

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch

from io_backend import BackendConfig, Store, machine_nbytes, open_store
from lifetime import Trace
from lifetime.optimizer_steps import settle_hooks
from teraio.arguments import (
    Budget,
    as_list_of,
    check_device,
    check_kinds,
    check_state_fits,
    check_trace_file,
    resolve_budget_nbytes,
    resolve_policy,
    spill_directories,
)
from teraio.config import Config
from teraio.errors import ConfigError, TeraioError
from teraio.iterations import Iterations, StepRecord
from teraio.pins import Pins, pinned_modules
from teraio.planner.plan import Limits, Plan
from teraio.report import Report
from teraio.runtime import process_memory
from teraio.runtime.buffers import RecycledMemory, SlabPool
from teraio.runtime.engine import Engine
from teraio.runtime.events import EventLog
from teraio.runtime.hooks import SavedTensorHooks
from teraio.runtime.optimizer_state import OptimizerState
from teraio.runtime.optimizer_step import ChunkedStep, can_be_chunked
from teraio.runtime.recycler import RecyclerLease, RecyclerUnavailableError, lease_recycler
from teraio.runtime.swap import can_exchange
from teraio.sizes import format_nbytes, parse_nbytes
from teraio.state_size import state_nbytes

_SPARE_NBYTES = 32 << 20
"""Idle memory that the recycler may hold beyond the budget. Its blocks lie on whole pages, so that transfers need no
staging; what staging would take serves here, and where the budget is full it saves half of all page faults."""

_KEEP_ALL = 1 << 62
"""Least size that may leave under the policy ``keep``: nothing is that large."""

_in_session: weakref.WeakSet[Any] = weakref.WeakSet()
"""Models and optimizers of the sessions that are open: each belongs to one."""


def offload(
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    budget: Budget = None,
    spill: str | Path | Sequence[str | Path] | None = None,
    kinds: str | Iterable[str] = "auto",
    policy: str | Path | Plan = "planned",
    host_budget: int | str = 0,
    backend: str = "auto",
    trace_to: str | Path | None = None,
    verify: bool = False,
    config: Config | str | Path | None = None,
) -> "Session":
    """Train within a memory budget: a context to put round the training loop.

    Nothing is activated before the ``with``. Inside, tensors that autograd saves leave for the SSD while they are idle
    and come back before they are used; losses, gradients and weights stay what they were, bit for bit.

    Args:
        model: The module that is trained, or several. Without one, iterations run from one optimizer step to the next.
        optimizer: Its optimizer, or several; known ones are stepped in chunks.
        budget: Bytes of tensor storage on the training device at any time, model and optimizer included: a number, a
            text like ``"6GiB"``, or one per device. Default: 0.9 of what is free and already held, over local ranks.
        spill: Directory on the SSD, or one for each SSD. Default: ``$TERAIO_SPILL``, else the user's cache directory.
        kinds: What may leave: ``{"activation"}``, ``{"activation", "optimizer"}``, or ``"auto"``: activations, and
            optimizer state between steps only when they do not suffice.
        policy: ``"planned"``, ``"evict_all"``, ``"keep"``, a `Plan`, or the path of a plan file.
        host_budget: Bytes of the host tier; must be 0 in this version.
        backend: ``"auto"`` or ``"posix"``; ``"kvikio"`` needs the extra and a GPU.
        trace_to: File to write the trace to, after the second completed iteration.
        verify: Check every byte that comes back against a checksum. Slower.
        config: Further settings, or the path of a TOML file with them.

    Raises:
        ConfigError: An argument is wrong.
        InfeasibleBudgetError: The state of model and optimizer alone exceeds the budget.

    Example:
        >>> with teraio.offload(model, optimizer, budget="6GiB", spill="/mnt/nvme0") as session:
        ...     for batch in loader:
        ...         model(batch).loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> print(session.report())
    """
    models, optimizers = (
        as_list_of(model, torch.nn.Module, "model"),
        as_list_of(optimizer, torch.optim.Optimizer, "optimizer"),
    )
    if not isinstance(config, (Config, str, os.PathLike, type(None))):
        raise ConfigError(f"config must be a teraio.Config or the path of a TOML file, got {config!r}")
    settings = config if isinstance(config, Config) else Config() if config is None else Config.load(config)
    trace_file = check_trace_file(trace_to)
    move_states = check_kinds(kinds)
    if parse_nbytes(host_budget, name="host_budget") != 0:
        raise ConfigError(
            f"host_budget must be 0 bytes in this version (there is no host tier yet), got {host_budget!r}"
        )
    if backend not in ("auto", "posix", "kvikio"):
        raise ConfigError(f"backend must be 'auto', 'posix' or 'kvikio', got {backend!r}")
    check_device(models)
    budget_nbytes = resolve_budget_nbytes(budget, state_nbytes(models, optimizers))
    check_state_fits(models, optimizers if move_states is False else [], budget_nbytes)
    return Session(
        models,
        optimizers,
        budget_nbytes=budget_nbytes,
        spill=spill_directories(spill),
        policy=resolve_policy(policy),
        backend=backend,
        trace_to=trace_file,
        verify=verify,
        move_states=move_states,
        config=settings,
    )


class Session:
    """What `offload` gives: a context manager, and a view on what goes on inside.

    Thread safety: use it from the training thread. It can be entered once.
    """

    def __init__(
        self,
        models: list[torch.nn.Module],
        optimizers: list[torch.optim.Optimizer],
        *,
        budget_nbytes: int,
        spill: list[Path],
        policy: str | Plan,
        backend: str,
        trace_to: Path | None,
        verify: bool,
        move_states: bool | None,
        config: Config,
    ) -> None:
        self._models = models
        self._optimizers = optimizers
        self._budget_nbytes = budget_nbytes
        self._spill = spill
        self._policy = policy
        self._backend = backend
        self._trace_to = trace_to
        self._verify = verify
        self._move_states = move_states
        self._config = config
        self._log = EventLog()
        self._callbacks: list[Callable[[StepRecord], object]] = []
        self._chunked: list[ChunkedStep] = []
        self._states: list[OptimizerState] = []
        self._entered = False
        self._open = False
        self._closed = False
        self._final: Report | None = None
        self._base_rss_nbytes = 0
        self._begin_state_nbytes = 0
        self._recycler: RecyclerLease | None = None
        self._malloc_is_exact = False
        self._unseen_nbytes = 0

    # --- entering and leaving ----------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Open the store and take up the hooks.

        Raises:
            SpillDirectoryError: The spill directory cannot be used; nothing was started.
            BackendUnavailableError: The backend asked for is not there; nothing was started.
        """
        if self._entered:
            raise ConfigError("this session was entered before: call teraio.offload again for another one")
        if any(each in _in_session for each in (*self._models, *self._optimizers)):
            raise ConfigError("this model or optimizer is in another teraio session: leave that one first")
        store = self._open_store()
        self._entered = True
        try:
            self._start(store)
        except BaseException:
            self._take_hooks_away()
            self._stop_recycling()
            self._states = []
            self._closed = True
            self._leave_malloc()
            store.close()
            raise
        _in_session.update([*self._models, *self._optimizers])
        return self

    def _start(self, store: Store) -> None:
        self._begin_state_nbytes = state_nbytes(self._models, self._optimizers)
        total_nbytes = machine_nbytes()
        if self._budget_nbytes > total_nbytes:
            self._log.add(
                f"the budget of {format_nbytes(self._budget_nbytes)} is more than this machine's memory, "
                f"{format_nbytes(total_nbytes)}: it protects nothing",
                level=30,
            )
        self._start_recycling()
        if not process_memory.huge_pages_work():
            self._log.add(
                "large CPU tensors do not lie on huge pages, which makes transfers copy and memory slow: import teraio "
                "before the first tensor is made, or set THP_MEM_ALLOC_ENABLE=1"
            )
        self._malloc_is_exact = True
        if not process_memory.use_exact_malloc():
            self._log.add("this C library has no mallopt: freed memory may stay with the process for a while")
        min_nbytes = _KEEP_ALL if self._policy == "keep" else self._config.min_nbytes
        self._engine = Engine(
            store,
            self._budget_nbytes,
            self._log,
            io_timeout_s=self._config.io_timeout_s,
            memory=RecycledMemory(self._recycler.library) if self._recycler is not None else SlabPool(),
        )
        self._hooks = SavedTensorHooks(self._engine, min_nbytes=min_nbytes, device=torch.device("cpu"))
        self._chunk_steps()
        self._iterations = Iterations(
            self._engine,
            self._hooks,
            self._models,
            self._optimizers,
            policy=self._policy,
            limits=Limits(self._budget_nbytes, min_nbytes),
            strict_plan=self._config.strict_plan,
            on_step=self._stepped,
            grown_nbytes=self._grown_nbytes,
            states=self._states,
            move_states=self._move_states,
        )
        self._base_rss_nbytes = process_memory.anon_rss_nbytes() - self._idle_nbytes() - self._begin_state_nbytes
        self._pins = Pins(self._hooks, pinned_modules(self._models, self._config.pin))
        self._hooks.install()
        self._iterations.install()
        self._open = True

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except (TeraioError, OSError) as late:
            if error is None:
                raise
            error.add_note(f"leaving the teraio block failed too: {late}")

    def close(self) -> None:
        """Take all hooks away and release the store, at once or when the last saved tensor dies. Idempotent.

        Raises:
            OffloadTimeout: A write has not ended. The hooks are gone; call it again to release the store.
            TimeoutError: The store cannot be closed yet; as above.
        """
        if not self._entered or self._closed:
            return
        self._open = False
        _in_session.difference_update([*self._models, *self._optimizers])
        self._take_hooks_away()
        engine = self._engine
        if state_nbytes(self._models, self._optimizers) <= self._budget_nbytes:
            for state in self._states:
                state.stop()
        # Else the state stays where it is, usable through its mapping, until the program lets go of it.
        self._states = []
        with engine.lock:
            while engine.wait_for_one_offload():
                pass
            engine.tidy()
            engine.pool.trim(engine.pool.idle_nbytes)
        self._final = self.report()
        if engine.num_records == 0:
            engine.store.close()
        # Else saved tensors hold their records, records hold the engine, and the engine the store, until they die: then
        # nothing else may hold the engine, not this session either.
        self._closed = True
        self._iterations.let_go()
        self._chunked = []
        del self._engine, self._hooks, self._pins
        self._stop_recycling()
        self._leave_malloc()

    def _take_hooks_away(self) -> None:
        """As far as they were installed; may be called again."""
        if hasattr(self, "_hooks"):
            self._hooks.uninstall()
        if hasattr(self, "_pins"):
            self._pins.uninstall()
        if hasattr(self, "_iterations"):
            self._iterations.uninstall()
        for chunked in self._chunked:
            chunked.uninstall()
        settle_hooks()

    def _open_store(self) -> Store:
        if self._config.require_gds and self._backend != "kvikio":
            raise ConfigError(
                f"Config.require_gds asks for GPUDirect Storage, but backend {self._backend!r} goes through system "
                "calls in this version: leave require_gds off, or ask for backend='kvikio'"
            )
        config = BackendConfig(
            max_spill_nbytes=self._config.max_spill_nbytes,
            allow_unsafe_spill=self._config.allow_unsafe_spill,
            io_timeout_s=self._config.io_timeout_s,
            verify=self._verify,
        )
        return open_store(self._spill, config=config, backend=self._backend, on_event=self._log.add)

    def _chunk_steps(self) -> None:
        for optimizer in self._optimizers:
            if can_be_chunked(optimizer):
                state = OptimizerState(optimizer, self._engine, self._hooks, min_nbytes=self._config.min_nbytes)
                chunked = ChunkedStep(optimizer, state, self._config.optimizer_chunk_nbytes)
                if can_exchange():
                    self._states.append(state)
                chunked.install()
                self._chunked.append(chunked)
            else:
                self._log.add(
                    f"{type(optimizer).__name__} is not known to update each parameter alone: its step is left whole"
                )

    def _grown_nbytes(self) -> int:
        """What the process has grown beyond the interpreter and its libraries: an upper estimate of tensor bytes."""
        return process_memory.anon_rss_nbytes() - self._idle_nbytes() - self._base_rss_nbytes

    def _stepped(self) -> None:
        grown = self._grown_nbytes()
        state = state_nbytes(self._models, self._optimizers)
        self._unseen_nbytes = max(self._unseen_nbytes, grown - state - self._engine.pool.total_nbytes)
        if self._trace_to is not None and self._iterations.completed >= 2 and self.trace is not None:
            try:
                self.trace.save(self._trace_to)
            except OSError as error:  # a full disk is no reason to end training
                self._log.add(f"the trace could not be written to {self._trace_to}: {error}", level=30)
            self._trace_to = None
        self._check_wear()
        for callback in self._callbacks:
            callback(self._iterations.steps[-1])

    def _check_wear(self) -> None:
        limit = self._config.max_write_tb_per_day
        step = self._iterations.steps[-1]
        if limit is not None and step.planned and step.step_s > 0:
            tb_per_day = step.written_nbytes / step.step_s * 86400 / 1e12
            if tb_per_day > limit:
                self._log.add(f"writes go above max_write_tb_per_day = {limit:g}: raise the budget to write less")

    # --- memory of dead tensors --------------------------------------------------------------------------------------

    def _start_recycling(self) -> None:
        if not self._config.recycle_memory:
            return
        try:
            self._recycler = lease_recycler(self._recycler_room_nbytes())
        except RecyclerUnavailableError as error:
            self._log.add(f"freed memory goes to the system and comes back as page faults, which costs time: {error}")

    def _recycler_room_nbytes(self) -> int:
        return self._budget_nbytes - self._begin_state_nbytes + _SPARE_NBYTES

    def _stop_recycling(self) -> None:
        if self._recycler is not None:
            self._recycler.release()
            self._recycler = None

    def _leave_malloc(self) -> None:
        if self._malloc_is_exact:
            self._malloc_is_exact = False
            process_memory.use_default_malloc()

    def _idle_nbytes(self) -> int:
        return self._recycler.statistics().idle_nbytes if self._recycler is not None else 0

    # --- while running -----------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Say that an iteration ends here; once used, nothing else ends one."""
        self._require_open("step")
        self._iterations.manual_boundary()

    def on_step(self, callback: Callable[[StepRecord], object]) -> None:
        """Call ``callback(step)`` after each completed iteration, on the training thread."""
        self._callbacks.append(callback)

    @property
    def last_step(self) -> StepRecord | None:
        """Figures of the last completed iteration, None before the first."""
        steps = self._iterations.steps if self._entered else ()
        return steps[-1] if steps else None

    @property
    def trace(self) -> Trace | None:
        """The last recorded iteration, None before the first."""
        return self._iterations.trace if self._entered else None

    @property
    def plan(self) -> Plan | None:
        """The plan in force, None while iterations are still being learnt."""
        return self._iterations.plan if self._entered else None

    def set_budget(self, budget: Budget) -> None:
        """Another budget from the next iteration on.

        Raises:
            ConfigError: Not a size.
            InfeasibleBudgetError: The state alone exceeds it; the old budget stays.
        """
        self._require_open("set_budget")
        budget_nbytes = resolve_budget_nbytes(budget, state_nbytes(self._models, self._optimizers))
        check_state_fits(self._models, self._optimizers if self._move_states is False else [], budget_nbytes)
        self._budget_nbytes = budget_nbytes
        if self._recycler is not None:
            self._recycler.set_room(self._recycler_room_nbytes())
        self._iterations.set_budget(budget_nbytes)

    @contextmanager
    def materialize(self) -> Iterator[None]:
        """A context in which all state of model and optimizer is resident, whatever the budget."""
        if self._open:
            for state in self._states:
                state.materialize()
        yield

    def save(self, path: str | Path) -> None:
        """Write the state of models and optimizers with ``torch.save``: lists under ``"model"`` and ``"optimizer"``."""
        state = {
            "model": [model.state_dict() for model in self._models],
            "optimizer": [optimizer.state_dict() for optimizer in self._optimizers],
        }
        torch.save(state, path)  # what is on the SSD is read through its mapping

    def report(self) -> Report:
        """What happened so far; after the block, what happened inside.

        Raises:
            ConfigError: The session was never entered.
        """
        if self._final is not None:
            return self._final
        if not self._entered:
            raise ConfigError("the session has not been entered yet: there is nothing to report")
        engine, iterations = self._engine, self._iterations
        totals = engine.store.statistics()
        step_s, stall_s = iterations.median("step_s"), iterations.median("stall_s")
        predicted = iterations.plan.predicted if iterations.plan is not None else None
        if iterations.completed and self._hooks.num_packed == 0:
            self._log.add("no tensor was saved inside the block: hooks see only the thread that entered it")
        return Report(
            iterations=iterations.completed,
            budget_nbytes=self._budget_nbytes,
            peak_nbytes=engine.peak_nbytes,
            unlimited_peak_nbytes=iterations.unlimited_peak_nbytes,
            unseen_nbytes=max(0, self._unseen_nbytes),
            written_nbytes=totals.written_nbytes,
            read_nbytes=totals.read_nbytes,
            stall_s=engine.stall_s,
            written_nbytes_per_step=int(iterations.median("written_nbytes")),
            read_nbytes_per_step=int(iterations.median("read_nbytes")),
            stall_s_per_step=stall_s,
            step_s=step_s,
            step_times_s=tuple(step.step_s for step in iterations.steps),
            fraction_of_ideal=max(0.0, 1 - stall_s / step_s) if step_s > 0 else 1.0,
            predicted_step_s=predicted.step_s if predicted else 0.0,
            predicted_peak_nbytes=predicted.peak_nbytes if predicted else 0,
            paths=dict(totals.paths),
            skipped=dict(self._hooks.skipped_nbytes),
            events=tuple(self._log.texts()),
        )

    def _require_open(self, what: str) -> None:
        if not self._open:
            raise ConfigError(f"session.{what}() works only inside the with block")
