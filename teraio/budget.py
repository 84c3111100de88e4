"""How much memory there is to budget, when the user does not say.

Covers the machine's and the container's free bytes and the number of local ranks. On a CPU machine the container's
limit is what kills, so the lesser of the two counts.
"""

import os

from io_backend import free_nbytes
from teraio.errors import ConfigError

_SHARE = 0.9


def default_budget_nbytes(held_nbytes: int) -> int:
    """0.9 of what is free plus what model and optimizer already hold, divided by the ranks on this machine."""
    return int(_SHARE * (free_nbytes() + held_nbytes)) // local_ranks()


def local_ranks() -> int:
    """Number of ranks on this machine as the launcher says, at least 1.

    Raises:
        ConfigError: The launcher's variable is not a number.
    """
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"LOCAL_WORLD_SIZE must be a number of ranks of at least 1, got {text!r}")
    return int(text)
