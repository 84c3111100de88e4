"""What tests look at in a spill root."""

from __future__ import annotations

from pathlib import Path

LEDGER_PREFIX = "teraio-ledger-"


def without_ledgers(paths: list[Path]) -> list[Path]:
    """The paths but for ledgers, which are to stay when sessions end."""
    return [path for path in paths if not path.name.startswith(LEDGER_PREFIX)]


def sessions(root: Path) -> list[Path]:
    """What is in the root but for ledgers."""
    return without_ledgers(list(root.iterdir()))
