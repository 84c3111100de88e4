"""Where teraio keeps things of the user's when nothing else is said."""

import os
from pathlib import Path


def user_cache_directory() -> Path:
    """``$XDG_CACHE_HOME``, else ``~/.cache``; it need not exist."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return Path(cache) if cache else Path.home() / ".cache"
