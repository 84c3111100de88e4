"""Trace files: one zip of a JSON header and plain column arrays.

Covers writing and reading. It knows the columns by name only; what they mean is in ``trace``. Nothing is ever
unpickled, every count is checked before memory is allocated for it, and a file that does not hold together is refused
with a reason.
"""

import json
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
_MAX_HEADER_NBYTES = 256 << 20
_MAX_COLUMN_NBYTES = 4 << 30


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write `trace`; the file appears whole or not at all."""
    target = Path(path)
    scratch = target.with_name(target.name + ".part")
    counts = {
        f"{group}.{f.name}": len(getattr(columns, f.name)) for group, columns in _groups(trace) for f in fields(columns)
    }
    header = {"format": FORMAT, "version": VERSION, "columns": counts, "strings": trace.strings, "meta": trace.meta}
    try:
        with zipfile.ZipFile(scratch, "w", zipfile.ZIP_DEFLATED, compresslevel=4) as archive:
            archive.writestr(_HEADER, json.dumps(header, sort_keys=True))
            for group, columns in _groups(trace):
                for f in fields(columns):
                    column = np.ascontiguousarray(getattr(columns, f.name), dtype="<i8")
                    archive.writestr(f"{group}.{f.name}", column.tobytes())
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)


def load_trace(path: str | Path) -> Trace:
    """Read a trace.

    Raises:
        TraceFormatError: The file is damaged, foreign, or newer than this version.
        OSError: The file cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            header = _read_header(archive, path)
            counts = header["columns"]
            groups = {name: _read_group(archive, name, cls, counts) for name, cls in _GROUPS.items()}
            trace = Trace(groups["op"], groups["storage"], groups["use"], groups["event"], header["strings"], header["meta"])
            trace.validate()
            return trace
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise TraceFormatError(f"{path} is not a readable trace file ({error}); record it again") from error
    except TraceFormatError:
        raise
    except (TraceError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise TraceFormatError(f"{path} does not hold together: {error}; record it again") from error


def _groups(trace: Trace) -> list[tuple[str, OpColumns | StorageColumns | UseColumns | EventColumns]]:
    return [
        ("op", trace.op_columns),
        ("storage", trace.storage_columns),
        ("use", trace.use_columns),
        ("event", trace.event_columns),
    ]


def _read_header(archive: zipfile.ZipFile, path: str | Path) -> dict[str, Any]:
    try:
        member = archive.getinfo(_HEADER)
    except KeyError:
        raise TraceFormatError(f"{path} is a zip file without {_HEADER}: not a trace written by teraio") from None
    header = json.loads(_read_member(archive, member, _MAX_HEADER_NBYTES))
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise TraceFormatError(f"{path} does not say '{FORMAT}' in its header: not a trace written by teraio")
    if header.get("version") != VERSION:
        raise TraceFormatError(
            f"{path} has trace format version {header.get('version')!r}, this teraio reads version {VERSION}; "
            "use the teraio that wrote it, or record again"
        )
    strings, meta = header.get("strings"), header.get("meta")
    if not isinstance(strings, list) or not all(isinstance(s, str) for s in strings):
        raise TraceFormatError(f"{path} has a header whose 'strings' is not a list of strings")
    if not isinstance(meta, dict) or not isinstance(header.get("columns"), dict):
        raise TraceFormatError(f"{path} has a header without 'meta' or 'columns'")
    return header


def _read_group(archive: zipfile.ZipFile, group: str, cls: type[Any], counts: dict[str, Any]) -> Any:
    columns: dict[str, Int64Array] = {}
    for f in fields(cls):
        name = f"{group}.{f.name}"
        count = counts[name]
        if not isinstance(count, int) or not 0 <= count * 8 <= _MAX_COLUMN_NBYTES:
            raise TraceFormatError(f"column '{name}' claims {count!r} rows, at most {_MAX_COLUMN_NBYTES // 8} are allowed")
        raw = _read_member(archive, archive.getinfo(name), count * 8)
        if len(raw) != count * 8:
            raise TraceFormatError(f"column '{name}' holds {len(raw)} bytes, its header promises {count * 8}")
        columns[f.name] = np.frombuffer(raw, dtype="<i8").astype(np.int64)
    return cls(**columns)


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, max_nbytes: int) -> bytes:
    """Read at most `max_nbytes`, whatever the directory of the zip claims: a bomb stops here."""
    if member.file_size > max_nbytes:
        raise TraceFormatError(f"member '{member.filename}' holds {member.file_size} bytes, expected at most {max_nbytes}")
    with archive.open(member) as stream:
        raw = stream.read(max_nbytes + 1)
    if len(raw) > max_nbytes:
        raise TraceFormatError(f"member '{member.filename}' is longer than its directory entry says")
    return raw
