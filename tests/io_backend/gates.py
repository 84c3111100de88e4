"""Holding workers back, so that tests decide what is queued and in which order it starts."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from io_backend import Priority

if TYPE_CHECKING:
    from io_backend import Store

TIMEOUT_S = 20.0


def wait_for(event: threading.Event) -> None:
    """Wait, not endlessly. No assert: ``python -O`` would leave the wait out of a module that is no test."""
    if not event.wait(TIMEOUT_S):
        raise AssertionError(f"nothing happened for {TIMEOUT_S:g} s")


class Gate:
    """An ``after`` that stops its worker until opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        wait_for(self.opened)


def block_workers(store: Store, num_workers: int) -> list[Gate]:
    """Occupy that many workers with urgent writes until their gates open."""
    gates = []
    for _ in range(num_workers):
        gate = Gate()
        store.write(np.zeros(8, np.uint8), store.allocate(8), priority=Priority.URGENT, after=gate)
        wait_for(gate.reached)
        gates.append(gate)
    return gates
