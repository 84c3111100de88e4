"""Holding workers back, so that tests decide what is queued and in which order it starts."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from io_backend import Priority

if TYPE_CHECKING:
    from io_backend import Store

TIMEOUT_S = 20.0


class Gate:
    """An ``after`` that stops its worker until opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.opened.wait(TIMEOUT_S)


def block_workers(store: Store, num_workers: int) -> list[Gate]:
    """Occupy that many workers with urgent writes until their gates open."""
    gates = []
    for _ in range(num_workers):
        gate = Gate()
        store.write(np.zeros(8, np.uint8), store.allocate(8), priority=Priority.URGENT, after=gate)
        assert gate.reached.wait(TIMEOUT_S)
        gates.append(gate)
    return gates
