"""Sizes as people write them.

Covers ``"6GiB"`` to bytes and back. Inside the code sizes are plain integers of bytes.
"""

import re

from teraio.errors import ConfigError

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def parse_nbytes(size: int | str, *, name: str = "size") -> int:
    """Bytes of ``"6GiB"``, ``"500MB"``, ``"1.5 GiB"`` or a plain number of bytes.

    Args:
        size: What a person wrote.
        name: How the message calls it.

    Raises:
        ConfigError: Not a size, or negative.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        hint = " (a share of the memory is not accepted)" if isinstance(size, float) else ""
        raise ConfigError(f"{name} must be a whole number of bytes or a text like '6GiB', got {size!r}{hint}")
    if isinstance(size, int):
        if size < 0:
            raise ConfigError(f"{name} must not be negative, got {size} bytes")
        return size
    match = _PATTERN.fullmatch(size)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{name} must be a number with a unit B, KB, MB, GB, TB, KiB, MiB, GiB or TiB, got {size!r}")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def format_nbytes(nbytes: float) -> str:
    """``nbytes`` with a binary unit, three or four digits: ``1.50 GiB``."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}" if value >= 100 else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"
