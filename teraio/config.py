"""Settings beside the arguments of `teraio.offload`.

Covers the record, its checks, and reading it from a TOML file. It is passed explicitly; nothing else reads it from the
environment. A constructed `Config` is valid.
"""

import dataclasses
import tomllib
from pathlib import Path

from teraio.errors import ConfigError
from teraio.sizes import parse_nbytes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """How teraio works where its arguments do not say.

    Raises:
        ConfigError: A value is out of its range.
    """

    min_nbytes: int = 1 << 20
    """Saved tensors whose storage is smaller stay resident. A transfer costs about as much CPU below 1 MiB as at it."""

    max_spill_nbytes: int | None = None
    """Most bytes the spill files may take on disk together; None for what the file systems allow."""

    io_timeout_s: float = 120.0
    """Seconds after which a transfer that has not ended is an error. Far above any healthy transfer."""

    allow_unsafe_spill: bool = False
    """Accept a spill directory in RAM or on a network file system."""

    pin: tuple[str, ...] = ()
    """Names of modules, ``*`` allowed, inside which saved tensors stay resident: ``("head", "blocks.0.*")``."""

    require_gds: bool = False
    """Fail at entry unless bytes go by GPUDirect Storage."""

    recycle_memory: bool = True
    """Hand the memory of dead tensors to new ones, as far as the budget leaves it free and 32 MiB beyond, instead of to
    the system. It takes a C++ compiler, once; without one training works and is slower."""

    strict_plan: bool = False
    """Raise `PlanMismatchError` where a plan does not fit what runs, instead of falling back."""

    optimizer_chunk_nbytes: int = 16 << 20
    """Bytes of parameters that the optimizer steps at a time: its temporaries are one to two times that."""

    max_write_tb_per_day: float | None = None
    """Say so in the report when more than this many terabytes a day would be written; None for no limit."""

    def __post_init__(self) -> None:
        for name in ("min_nbytes", "max_spill_nbytes", "optimizer_chunk_nbytes"):
            value = getattr(self, name)
            if (value is not None or name != "max_spill_nbytes") and (
                isinstance(value, bool) or not isinstance(value, int) or value < 0
            ):
                raise ConfigError(f"Config.{name} must be a number of bytes of at least 0, got {value!r}")
        for name in ("io_timeout_s", "max_write_tb_per_day"):
            value = getattr(self, name)
            if value is None and name == "max_write_tb_per_day":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ConfigError(f"Config.{name} must be a number above 0, got {value!r}")
        if not isinstance(self.pin, tuple) or not all(isinstance(pattern, str) for pattern in self.pin):
            raise ConfigError(f"Config.pin must be a tuple of module names, got {self.pin!r}")
        for name in ("allow_unsafe_spill", "require_gds", "recycle_memory", "strict_plan"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"Config.{name} must be True or False, got {getattr(self, name)!r}")

    @classmethod
    def load(cls, path: str | Path) -> "Config":
        """Read a TOML file with fields of this class at its top level; sizes may be texts like ``"1MiB"``.

        Raises:
            ConfigError: The file cannot be read, or holds an unknown or wrong field.
        """
        try:
            content = tomllib.loads(Path(path).read_text())
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"the configuration file {path} cannot be read: {error}") from error
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(content) - known)
        if unknown:
            raise ConfigError(f"{path} has unknown fields {unknown}; known are {sorted(known)}")
        for name in content:
            if name.endswith("_nbytes"):
                content[name] = parse_nbytes(content[name], name=name)
        if isinstance(content.get("pin"), list):
            content["pin"] = tuple(content["pin"])
        try:
            return cls(**content)
        except TypeError as error:
            raise ConfigError(f"{path} holds a value of the wrong type: {error}") from error
