"""The plan: which storages leave the device, when, and when they must be back.

Covers the record, its limits and its file. Policies make plans, the simulator judges them, the runtime carries them
out; this module is all that they share. A plan names events of the clock and storages of the trace it was made from,
and carries that trace's signature.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from teraio.errors import PlanFormatError

FORMAT = "teraio-plan"
VERSION = 1


class MoveKind(StrEnum):
    """What is done with a storage."""

    OFFLOAD = "offload"
    """Write it to the SSD, then give its memory back."""
    RELOAD = "reload"
    """Read it back."""
    DROP = "drop"
    """Give its memory back without a write: a valid copy is already on the SSD."""


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """One decision."""

    kind: MoveKind
    storage: int
    """Number of the storage in the trace."""
    nbytes: int
    trigger: int
    """Event at which the move may start."""
    deadline: int
    """Event by which it must have ended: the memory gone for an offload or a drop, the bytes back for a reload."""
    why: str = ""
    """Reason, for people."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What a plan must respect."""

    budget_nbytes: int
    """Bytes of tensor storage on the device at any time."""
    min_nbytes: int = 1 << 20
    """Storages below this many bytes stay."""
    host_nbytes: int = 0
    """Bytes of the host tier between device and SSD."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulator expects of a plan."""

    step_s: float = 0.0
    stall_s: float = 0.0
    peak_nbytes: int = 0
    written_nbytes: int = 0
    read_nbytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Moves in order of their trigger, with the signature of the trace that they were made for."""

    policy: str
    signature: str
    budget_nbytes: int
    moves: tuple[Move, ...]
    predicted: Prediction = Prediction()

    @property
    def offloaded_nbytes(self) -> int:
        """Bytes written in one iteration."""
        return sum(move.nbytes for move in self.moves if move.kind is MoveKind.OFFLOAD)

    def save(self, path: str | Path) -> None:
        """Write the plan as sorted JSON, one move a line, so that two plans can be compared as text."""
        header: dict[str, Any] = {
            "budget_nbytes": self.budget_nbytes,
            "format": FORMAT,
            "policy": self.policy,
            "predicted": dataclasses.asdict(self.predicted),
            "signature": self.signature,
            "version": VERSION,
        }
        lines = [f"  {json.dumps(key)}: {json.dumps(value, sort_keys=True)}," for key, value in sorted(header.items())]
        moves = [json.dumps(dataclasses.asdict(move), sort_keys=True) for move in self.moves]
        body = ",\n    ".join(moves)
        text = "{\n" + "\n".join(lines) + '\n  "moves": [\n    ' + body + "\n  ]\n}\n"
        target = Path(path)
        scratch = target.with_name(target.name + ".part")
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(target)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a plan that `save` wrote.

        Raises:
            PlanFormatError: The file is damaged, foreign or newer than this version.
            OSError: The file cannot be read.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise PlanFormatError(f"{path} is not a plan file: {error}") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise PlanFormatError(f"{path} does not say '{FORMAT}': not a plan written by teraio")
        if content.get("version") != VERSION:
            raise PlanFormatError(
                f"{path} has plan format version {content.get('version')!r}, this teraio reads version {VERSION}; "
                "use the teraio that wrote it, or make the plan again"
            )
        try:
            return cls(
                policy=_text(content["policy"]),
                signature=_text(content["signature"]),
                budget_nbytes=_count(content["budget_nbytes"]),
                moves=tuple(_move(entry) for entry in content["moves"]),
                predicted=_prediction(content["predicted"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PlanFormatError(f"{path} does not hold together: {error!r}; make the plan again") from error


def sort_moves(moves: Sequence[Move]) -> tuple[Move, ...]:
    """Moves in the order in which a runtime meets them; among equals, what gives memory back comes first."""
    rank = {MoveKind.DROP: 0, MoveKind.OFFLOAD: 1, MoveKind.RELOAD: 2}
    return tuple(sorted(moves, key=lambda move: (move.trigger, rank[move.kind], move.deadline, move.storage)))


def _move(entry: dict[str, Any]) -> Move:
    storage, nbytes, trigger, deadline = (_count(entry[name]) for name in ("storage", "nbytes", "trigger", "deadline"))
    if trigger > deadline:
        raise ValueError(f"a move of storage {storage} starts at event {trigger}, after its deadline {deadline}")
    return Move(MoveKind(entry["kind"]), storage, nbytes, trigger, deadline, _text(entry["why"]))


def _prediction(entry: dict[str, Any]) -> Prediction:
    step_s, stall_s = (_seconds(entry[name]) for name in ("step_s", "stall_s"))
    peak, written, read = (_count(entry[name]) for name in ("peak_nbytes", "written_nbytes", "read_nbytes"))
    return Prediction(step_s, stall_s, peak, written, read)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected a text, found {value!r}")
    return value


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"expected a number of seconds, found {value!r}")
    return float(value)


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"expected a whole number of at least 0, found {value!r}")
    return value
