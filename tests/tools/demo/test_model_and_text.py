"""The demo's model has the size it claims, and its batches depend on nothing but text, seed and step."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from tools.demo.model import VOCABULARY, Gpt
from tools.demo.shape import GptShape
from tools.demo.spec import SegmentSpec
from tools.demo.text import TextBatches, standard_library_source
from tools.errors import UsageError

TEXT = bytes(range(256)) * 4


def num_parameters(layers: int, width: int, sequence: int) -> int:
    """Count by hand: attention 4 w², MLP 8 w², their biases 9 w, two norms 4 w; embeddings, final norm and head."""
    return layers * (12 * width**2 + 13 * width) + (2 * VOCABULARY + sequence + 2) * width


@pytest.mark.parametrize("shape", [GptShape(layers=2, width=64, sequence=32), SegmentSpec(mode="plain").shape])
def test_parameter_count(shape: GptShape) -> None:
    with torch.device("meta"):
        model = Gpt(shape)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert counted == num_parameters(shape.layers, shape.width, shape.sequence)


def test_the_default_model_has_about_29_million_parameters() -> None:
    shape = SegmentSpec(mode="plain").shape
    assert num_parameters(shape.layers, shape.width, shape.sequence) == pytest.approx(29e6, rel=0.05)


def test_an_untrained_model_is_as_good_as_guessing() -> None:
    model = Gpt(GptShape(layers=1, width=64, sequence=32))
    tokens, targets = TextBatches(TEXT, batch=4, sequence=32, seed=0).batch(0)
    assert model(tokens, targets).item() == pytest.approx(math.log(VOCABULARY), rel=0.02)


def test_attention_sees_only_the_past() -> None:
    model = Gpt(GptShape(layers=2, width=64, sequence=32)).eval()
    logits: list[torch.Tensor] = []
    model.head.register_forward_hook(lambda module, args, output: logits.append(output))
    tokens, targets = TextBatches(TEXT, batch=1, sequence=32, seed=0).batch(0)
    model(tokens, targets)
    tokens[0, -1] ^= 1
    model(tokens, targets)
    assert torch.allclose(logits[0][:, :-1], logits[1][:, :-1])
    assert not torch.allclose(logits[0][:, -1], logits[1][:, -1])


@pytest.mark.parametrize("shape", [{"layers": 0}, {"width": 0}, {"width": 96}, {"sequence": 0}])
def test_a_shape_that_cannot_be_is_refused(shape: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="got"):
        GptShape(**{"layers": 1, "width": 64, "sequence": 8, **shape})


def test_batches_depend_on_seed_and_step_alone() -> None:
    first = TextBatches(TEXT, batch=3, sequence=16, seed=5)
    late, early = first.batch(7), first.batch(0)
    torch.rand(10)
    again = TextBatches(TEXT, batch=3, sequence=16, seed=5)
    for step, expected in ((0, early), (7, late)):
        for got, wanted in zip(again.batch(step), expected, strict=True):
            assert torch.equal(got, wanted)
    assert not torch.equal(early[0], late[0])
    assert not torch.equal(early[0], TextBatches(TEXT, batch=3, sequence=16, seed=6).batch(0)[0])


def test_targets_are_the_next_bytes() -> None:
    tokens, targets = TextBatches(TEXT, batch=3, sequence=16, seed=0).batch(0)
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.shape == targets.shape == (3, 16)
    assert torch.equal((tokens + 1) % 256, targets)


def test_drawing_a_batch_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    TextBatches(TEXT, batch=3, sequence=16, seed=0).batch(0)
    assert torch.equal(before, torch.get_rng_state())


def test_a_text_too_short_is_refused() -> None:
    TextBatches(TEXT[:18], batch=1, sequence=16, seed=0).batch(0)
    with pytest.raises(UsageError, match="needs 18 bytes of text, there are 17"):
        TextBatches(TEXT[:17], batch=1, sequence=16, seed=0)


def test_the_text_is_python_source_and_the_same_in_another_process() -> None:
    text = standard_library_source(200_000)
    assert len(text) == 200_000
    assert b"\ndef " in text
    code = "import sys; from tools.demo.text import *; sys.stdout.buffer.write(standard_library_source(200_000))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=True).stdout == text
