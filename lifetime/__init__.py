"""lifetime: what tensors do over one training iteration.

Covers recording, trace files, inactive periods, the memory curve and hardware records. It moves no bytes and changes
no result.
"""

from lifetime.errors import TraceError, TraceFormatError
from lifetime.events import Event, EventKind, Phase, StorageKind
from lifetime.hardware import Hardware
from lifetime.recorder import Recorder
from lifetime.trace import InactivePeriod, Op, StorageLife, Trace

__all__ = [
    "Event",
    "EventKind",
    "Hardware",
    "InactivePeriod",
    "Op",
    "Phase",
    "Recorder",
    "StorageKind",
    "StorageLife",
    "Trace",
    "TraceError",
    "TraceFormatError",
]
