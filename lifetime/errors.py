"""Errors of the lifetime package.

Covers what can be wrong with a trace or a trace file. Errors of moving bytes are ``io_backend``'s, errors of running
a plan are ``teraio``'s. Every message says what was expected, what was found, and what to do.
"""


class TraceError(ValueError):
    """A trace does not hold together, or was asked for something that it does not contain."""


class TraceFormatError(TraceError):
    """A file is not a trace that this version can read: damaged, foreign, or written by a newer version."""
