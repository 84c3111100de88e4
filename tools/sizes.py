"""Sizes and times as people read them.

Covers printing: bytes in binary units, seconds with a sensible number of digits.
Does not parse what a person typed: ``teraio.parse_nbytes`` does.
Must stay true: code and JSON keep plain bytes and seconds; these strings are for tables and sentences alone.
"""

_UNITS = ("KiB", "MiB", "GiB", "TiB")


def format_nbytes(nbytes: int) -> str:
    """``nbytes`` bytes in the largest binary unit that leaves at least 1, with three significant digits or more."""
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    power = min((abs(nbytes).bit_length() - 1) // 10, len(_UNITS))
    value = nbytes / 1024**power
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f} {_UNITS[power - 1]}"


def format_seconds(duration_s: float) -> str:
    """``duration_s`` seconds, in milliseconds below one second."""
    if abs(duration_s) < 1:
        return f"{duration_s * 1000:.1f} ms"
    return f"{duration_s:.2f} s"
