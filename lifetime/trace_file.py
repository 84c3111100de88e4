"""Trace files: one zip of a JSON header and plain column arrays.

Covers writing and reading. It knows the columns by name only; what they mean is in ``trace``. Nothing is ever
unpickled, every count is checked before memory is allocated for it, and a file that does not hold together is refused
with a reason.
"""

import errno
import json
import os
import struct
import zipfile
import zlib
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from lifetime.errors import TraceError, TraceFormatError
from lifetime.trace import EventColumns, Int64Array, OpColumns, StorageColumns, Trace, UseColumns

FORMAT = "teraio-trace"
VERSION = 1
_HEADER = "header.json"
_GROUPS: dict[str, type[OpColumns] | type[StorageColumns] | type[UseColumns] | type[EventColumns]] = {
    "op": OpColumns,
    "storage": StorageColumns,
    "use": UseColumns,
    "event": EventColumns,
}
_MAX_HEADER_NBYTES = 64 << 20
_MAX_COLUMNS_NBYTES = 2 << 30
"""Bytes that all columns may have together, far more than any iteration needs."""
_REFUSALS_OF_ZIPFILE = (NotImplementedError, RuntimeError, ValueError, RecursionError)
"""Unknown compression, encryption, impossible offsets; headers that are no JSON or nest too deep."""
_DATE = (1980, 1, 1, 0, 0, 0)
"""Every member's date: equal traces make equal files."""


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write `trace`; the file appears whole or not at all.

    Raises:
        TraceError: The trace does not hold together, or its `meta` is not JSON; nothing was written.
        OSError: The file cannot be written; one that was there before still is.
    """
    trace.validate()
    target = Path(path)
    scratch = target.with_name(f"{target.name}.{os.getpid()}.part")
    counts = {
        f"{group}.{f.name}": len(getattr(columns, f.name)) for group, columns in _groups(trace) for f in fields(columns)
    }
    header = {"format": FORMAT, "version": VERSION, "columns": counts, "strings": trace.strings, "meta": trace.meta}
    try:
        text = json.dumps(header, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise TraceError(f"Trace.meta must hold plain JSON values: {error}") from error
    try:
        with zipfile.ZipFile(scratch, "w", zipfile.ZIP_DEFLATED, compresslevel=4) as archive:
            _write_member(archive, _HEADER, text.encode())
            for group, columns in _groups(trace):
                for f in fields(columns):
                    column = np.ascontiguousarray(getattr(columns, f.name), dtype="<i8")
                    _write_member(archive, f"{group}.{f.name}", column.tobytes())
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)


def _write_member(archive: zipfile.ZipFile, name: str, raw: bytes) -> None:
    member = zipfile.ZipInfo(name, _DATE)
    member.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(member, raw)


def load_trace(path: str | Path) -> Trace:
    """Read a trace.

    Raises:
        TraceFormatError: The file is damaged, foreign, or newer than this version.
        OSError: The file cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            header = _read_header(archive)
            counts = _read_counts(header)
            groups = {name: _read_group(archive, name, cls, counts) for name, cls in _GROUPS.items()}
            columns = (groups["op"], groups["storage"], groups["use"], groups["event"])
            trace = Trace(*columns, header["strings"], header["meta"])
            trace.validate()
            return trace
    except TraceFormatError as error:
        raise TraceFormatError(f"{path}: {error}") from error
    except TraceError as error:
        raise TraceFormatError(f"{path} does not hold together: {error}; record it again") from error
    except OSError as error:
        if error.errno != errno.EINVAL:  # which answers an offset that only a damaged directory can ask for
            raise
        raise TraceFormatError(f"{path} is not a readable trace file ({error}); record it again") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, struct.error, *_REFUSALS_OF_ZIPFILE) as error:
        raise TraceFormatError(f"{path} is not a readable trace file ({error}); record it again") from error


def _groups(trace: Trace) -> list[tuple[str, OpColumns | StorageColumns | UseColumns | EventColumns]]:
    return [
        ("op", trace.op_columns),
        ("storage", trace.storage_columns),
        ("use", trace.use_columns),
        ("event", trace.event_columns),
    ]


def _read_header(archive: zipfile.ZipFile) -> dict[str, Any]:
    if _HEADER not in archive.namelist():
        raise TraceFormatError(f"a zip file without {_HEADER}, not a trace written by teraio")
    header = json.loads(_read_member(archive, _HEADER, _MAX_HEADER_NBYTES))
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise TraceFormatError(f"its header does not say '{FORMAT}', so it is no trace written by teraio")
    version = header.get("version")
    if version != VERSION or isinstance(version, bool):
        raise TraceFormatError(
            f"it has trace format version {version!r}, this teraio reads version {VERSION}; "
            "use the teraio that wrote it, or record again"
        )
    strings = header.get("strings")
    if not isinstance(strings, list) or not all(isinstance(s, str) for s in strings):
        raise TraceFormatError("'strings' in its header is not a list of strings")
    for name in ("meta", "columns"):
        if not isinstance(header.get(name), dict):
            raise TraceFormatError(f"its header has no '{name}'")
    return header


def _read_counts(header: dict[str, Any]) -> dict[str, int]:
    """Rows that the header promises for each column, checked before anything is allocated for them."""
    counts: dict[str, int] = {}
    for group, cls in _GROUPS.items():
        for f in fields(cls):
            name = f"{group}.{f.name}"
            count = header["columns"].get(name)
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise TraceFormatError(f"column '{name}' should have a number of rows, its header says {count!r}")
            counts[name] = count
    if sum(counts.values()) * 8 > _MAX_COLUMNS_NBYTES:
        raise TraceFormatError(f"it claims {sum(counts.values())} rows, at most {_MAX_COLUMNS_NBYTES // 8} are allowed")
    return counts


def _read_group(archive: zipfile.ZipFile, group: str, cls: type[Any], counts: dict[str, int]) -> Any:
    columns: dict[str, Int64Array] = {}
    for f in fields(cls):
        name = f"{group}.{f.name}"
        nbytes = counts[name] * 8
        raw = _read_member(archive, name, nbytes)
        if len(raw) != nbytes:
            raise TraceFormatError(f"column '{name}' holds {len(raw)} bytes, its header promises {nbytes}")
        columns[f.name] = np.frombuffer(raw, dtype="<i8").astype(np.int64)
    return cls(**columns)


def _read_member(archive: zipfile.ZipFile, name: str, max_nbytes: int) -> bytes:
    """Read at most `max_nbytes`, whatever the directory of the zip claims: a bomb stops here."""
    try:
        member = archive.getinfo(name)
    except KeyError:
        raise TraceFormatError(f"its column '{name}' is missing") from None
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise TraceFormatError(
            f"'{name}' is compressed in a way that no trace uses (zip method {member.compress_type})"
        )
    if member.file_size > max_nbytes:
        raise TraceFormatError(f"'{name}' holds {member.file_size} bytes, expected at most {max_nbytes}")
    with archive.open(member) as stream:
        raw = stream.read(max_nbytes + 1)
    if len(raw) > max_nbytes:
        raise TraceFormatError(f"'{name}' is longer than its directory entry says")
    return raw
