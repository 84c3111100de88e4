"""Sizes and times as they are printed."""

from __future__ import annotations

import pytest

from tools.sizes import format_nbytes, format_seconds

MIB = 1 << 20


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (MIB - 1, "1024 KiB"),
        (600 * MIB, "600 MiB"),
        (12 * MIB + MIB // 2, "12.5 MiB"),
        (1536 * MIB, "1.50 GiB"),
        (-3 * MIB, "-3.00 MiB"),
        (5000 << 40, "5000 TiB"),
    ],
)
def test_bytes(nbytes: int, text: str) -> None:
    assert format_nbytes(nbytes) == text


@pytest.mark.parametrize(
    ("duration_s", "text"), [(0.0, "0.0 ms"), (0.0123, "12.3 ms"), (1.0, "1.00 s"), (75.5, "75.50 s")]
)
def test_seconds(duration_s: float, text: str) -> None:
    assert format_seconds(duration_s) == text
