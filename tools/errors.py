"""The errors a subcommand ends with on purpose.

Covers the two ways a command can fail: the thing asked for failed (exit code 1), or it was asked for wrongly (2).
Does not cover bugs: any other exception is one, and keeps its traceback.
Must stay true: the message is one line, complete enough to act on without a traceback.
"""


class CommandError(Exception):
    """The thing asked for failed; ``str()`` is the line to show, ``exit_code`` the code to end with."""

    exit_code = 1


class UsageError(CommandError):
    """It was asked for wrongly: an option's value cannot be used here."""

    exit_code = 2
