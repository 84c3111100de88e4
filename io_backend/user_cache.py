"""Where teraio keeps things of the user's when nothing else is said.

Covers the two default places. It creates nothing.
"""

import os
from pathlib import Path


def user_cache_directory() -> Path:
    """``$XDG_CACHE_HOME``, else ``~/.cache``; it need not exist."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return Path(cache) if cache else Path.home() / ".cache"


def default_spill_directory() -> Path:
    """Where spill files go when nothing is said: ``$TERAIO_SPILL``, else ``teraio`` in the user's cache directory."""
    given = os.environ.get("TERAIO_SPILL")
    if given:
        return Path(given)
    return user_cache_directory() / "teraio"
