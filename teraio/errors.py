"""The errors teraio raises.

TeraioError
 +- ConfigError            an argument or a setting is wrong (also a ValueError)
 +- InfeasibleBudgetError  no plan fits the budget (also a MemoryError)
 +- OffloadError           moving bytes failed; wraps the backend's error
 |   +- OffloadTimeout     a transfer did not end in time (also a TimeoutError)
 +- PlanMismatchError      a plan does not fit what runs, and ``strict_plan`` is set
 +- PlanFormatError        a file is not a plan this version can read (also a ValueError)
 +- InternalError          a broken rule of our own: please report it

Errors of files and devices are ``io_backend.BackendError``, errors of trace files ``lifetime.TraceError``. The rule:
a message says what was tried, what was expected and found, with units, where the data is now, and what to do.
"""


class TeraioError(Exception):
    """Base of everything teraio raises on its own account."""


class ConfigError(TeraioError, ValueError):
    """An argument or a setting is wrong; nothing was started."""


class InfeasibleBudgetError(TeraioError, MemoryError):
    """The budget is below what one operation, or the state alone, needs. Nothing was lost; the model stays usable."""

    def __init__(self, message: str, *, floor_nbytes: int, op: str = "", storages: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.floor_nbytes = floor_nbytes
        """Smallest budget, in bytes, that would have let the program get past this point."""
        self.op = op
        """The operation that could not fit, empty when the state alone does not."""
        self.storages = storages
        """The largest storages resident at that point, described."""


class OffloadError(TeraioError):
    """Moving bytes failed. A failed write left the data in memory, a failed read left it on the SSD."""


class OffloadTimeout(OffloadError, TimeoutError):
    """A transfer did not end in time; the message names tensor, direction, bytes and the state of the queue."""


class PlanMismatchError(TeraioError):
    """What runs is not what the plan was made for, and ``strict_plan`` forbids falling back."""


class PlanFormatError(TeraioError, ValueError):
    """A file is not a plan that this version can read: damaged, foreign, or written by a newer version."""


class InternalError(TeraioError):
    """A rule of teraio's own was broken. Please report the message: it holds the history of the object concerned."""
