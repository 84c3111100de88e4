"""The text the demo trains on: the source of the Python standard library of the running interpreter.

Covers reading it and cutting training batches out of it.
Does not tokenise: a token is a byte.
Must stay true: ``batch(step)`` depends on the text, the seed and the step alone, so every process of a demo sees the
same batches in the same order, whatever ran before.
"""

import os
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CommandError, UsageError

TEXT_NBYTES = 4_000_000
"""How much text is read: far more than a short run sees, and read in some ten milliseconds."""

_FOREIGN = frozenset({"site-packages", "dist-packages", "__pycache__"})
"""Folders below the standard library's that do not belong to it."""


def standard_library_source(limit_nbytes: int = TEXT_NBYTES) -> bytes:
    """The standard library's ``.py`` files in sorted order, one after another, cut at ``limit_nbytes`` bytes.

    Raises:
        CommandError: The interpreter comes without source files.
    """
    root = sysconfig.get_paths()["stdlib"]
    text = bytearray()
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in _FOREIGN)
        for name in sorted(names):
            if name.endswith(".py"):
                text += Path(folder, name).read_bytes()
                if len(text) >= limit_nbytes:
                    return bytes(text[:limit_nbytes])
    if not text:
        raise CommandError(f"found no Python source to train on under {root}: this interpreter comes without it")
    return bytes(text)


class TextBatches:
    """Training batches cut from a text at random places.

    Thread safety: none needed; ``batch`` changes nothing.
    Invariants: equal arguments give equal batches, in any process and any order.
    """

    def __init__(self, text: bytes, *, batch: int, sequence: int, seed: int, device: str = "cpu") -> None:
        """Keep ``text`` as a tensor of bytes.

        Args:
            text: At least ``sequence + 2`` bytes.
            batch: Sequences per batch.
            sequence: Tokens per sequence.
            seed: Chooses the places, together with the step.
            device: Where the batches are wanted.

        Raises:
            UsageError: The text is too short for one sequence.
        """
        if len(text) < sequence + 2:
            raise UsageError(
                f"a sequence of {sequence} tokens needs {sequence + 2} bytes of text, there are {len(text)}"
            )
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)  # [len(text)]
        self._offsets = torch.arange(sequence + 1)
        self._batch = batch
        self._seed = seed
        self._device = device

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The inputs and targets of one step, int64, each ``[batch, sequence]``, on the device."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        num_starts = len(self._text) - len(self._offsets) + 1
        starts = torch.randint(num_starts, (self._batch, 1), generator=generator)
        window = self._text[starts + self._offsets].long().to(self._device)  # [batch, sequence + 1]
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()
