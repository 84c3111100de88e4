"""Traces survive the disk; files that are not sound traces are refused with a reason."""

import contextlib
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lifetime import Recorder, Trace, TraceError, TraceFormatError
from lifetime.events import EventKind, Phase, StorageKind
from lifetime.trace import EventColumns, OpColumns, StorageColumns, UseColumns
from lifetime.trace_file import VERSION

MakeTrace = Callable[..., Trace]
GROUPS = ("op_columns", "storage_columns", "use_columns", "event_columns")


def assert_same(a: Trace, b: Trace) -> None:
    for group in GROUPS:
        for f in fields(getattr(a, group)):
            left, right = getattr(getattr(a, group), f.name), getattr(getattr(b, group), f.name)
            assert left.dtype == right.dtype == np.int64
            assert np.array_equal(left, right), f"{group}.{f.name}"
    assert (a.strings, a.meta, a.signature) == (b.strings, b.meta, b.signature)


@pytest.fixture(scope="module")
def recorded() -> Trace:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
    optimizer = torch.optim.Adam(model.parameters())
    with Recorder(model=model, optimizer=optimizer) as recorder:
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    return recorder.trace


@pytest.fixture
def file(recorded: Trace, tmp_path: Path) -> Path:
    path = tmp_path / "step.trace"
    recorded.save(path)
    return path


# --- round trips -----------------------------------------------------------------------------------------------------


def test_round_trip(recorded: Trace, file: Path, tmp_path: Path) -> None:
    loaded = Trace.load(file)
    assert_same(loaded, recorded)
    assert loaded.ops == recorded.ops
    assert loaded.storages == recorded.storages
    assert loaded.events == recorded.events
    assert [p.name for p in tmp_path.iterdir()] == ["step.trace"]
    loaded.op_columns.flops[0] = 7  # columns may be filled in after loading


def test_path_may_be_a_text(recorded: Trace, tmp_path: Path) -> None:
    recorded.save(str(tmp_path / "t"))
    assert_same(Trace.load(str(tmp_path / "t")), recorded)


def test_equal_traces_make_equal_files(recorded: Trace, file: Path, tmp_path: Path) -> None:
    Trace.load(file).save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == file.read_bytes()


def test_it_is_a_zip_that_anyone_can_read(file: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
        header = json.loads(archive.read("header.json"))
        assert (header["format"], header["version"]) == ("teraio-trace", VERSION)
        assert len(archive.read("op.name")) == 8 * header["columns"]["op.name"]


ints = st.integers(min_value=0, max_value=2**40)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Any trace that holds together."""
    strings = ["", *draw(st.lists(st.text(max_size=5), max_size=4))]
    text = st.integers(0, len(strings) - 1)
    num_ops, num_storages, num_events = (draw(st.integers(0, 6)) for _ in range(3))

    def many(element: st.SearchStrategy[int], count: int) -> Any:
        return np.array(draw(st.lists(element, min_size=count, max_size=count)), dtype=np.int64)

    ops = OpColumns(
        name=many(text, num_ops),
        phase=many(st.sampled_from(Phase), num_ops),
        module=many(text, num_ops),
        start_ns=many(st.integers(-(2**60), 2**60), num_ops),
        duration_ns=many(ints, num_ops),
        nbytes=many(ints, num_ops),
        flops=many(ints, num_ops),
    )
    birth = many(st.integers(-1, num_ops), num_storages)
    shape_sizes = many(st.integers(0, 3), num_storages)
    storages = StorageColumns(
        name=many(text, num_storages),
        kind=many(st.sampled_from(StorageKind), num_storages),
        nbytes=many(ints, num_storages),
        dtype=many(text, num_storages),
        birth_op=birth,
        death_op=np.maximum(birth, many(st.integers(0, num_ops), num_storages)),
        freeable_event=many(st.integers(-1, num_events), num_storages),
        shape_end=np.cumsum(shape_sizes),
        shape=many(ints, int(shape_sizes.sum())),
    )
    num_uses = draw(st.integers(0, 8)) if num_ops and num_storages else 0
    uses = UseColumns(
        np.sort(many(st.integers(0, max(0, num_ops - 1)), num_uses)),
        many(st.integers(0, max(0, num_storages - 1)), num_uses),
        many(st.integers(0, 1), num_uses),
    )
    events = EventColumns(
        kind=many(st.sampled_from(EventKind), num_events),
        phase=many(st.sampled_from(Phase), num_events),
        micro_batch=many(ints, num_events),
        ordinal=many(ints, num_events),
        op=np.sort(many(st.integers(0, num_ops), num_events)),
        storage=many(st.integers(-1, num_storages - 1), num_events),
        nbytes=many(st.integers(-(2**63), 2**63 - 1), num_events),
        dtype=many(text, num_events),
    )
    meta = draw(
        st.dictionaries(st.text(max_size=3), st.none() | st.booleans() | ints | st.text(max_size=3), max_size=3)
    )
    return Trace(ops, storages, uses, events, strings, meta)


@settings(max_examples=50)
@given(trace=traces())
def test_any_trace_survives(trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> None:
    trace.validate()
    path = tmp_path_factory.getbasetemp() / "any.trace"
    trace.save(path)
    loaded = Trace.load(path)
    assert_same(loaded, trace)
    assert loaded.ops == trace.ops
    assert loaded.storages == trace.storages
    assert loaded.events == trace.events
    path.unlink()


@settings(max_examples=50)
@given(trace=traces())
def test_what_is_read_off_any_trace_holds(trace: Trace) -> None:
    lives = trace.storages
    curve = [sum(s.nbytes for s in lives if s.birth_op <= i < s.death_op) for i in range(trace.num_ops)]
    assert trace.memory_curve().tolist() == curve
    used: dict[int, set[int]] = {}
    for op, storage in zip(trace.use_columns.op.tolist(), trace.use_columns.storage.tolist(), strict=True):
        used.setdefault(storage, set()).add(op)
    total = int(trace.op_columns.duration_ns.sum())
    for period in trace.inactive_periods():
        wraps = period.end_op < period.start_op
        idle = [*range(period.start_op, trace.num_ops), *range(period.end_op)]
        if not wraps:
            idle = list(range(period.start_op, period.end_op))
        assert idle
        assert not used[period.storage] & set(idle)
        assert period.end_op in used[period.storage]
        assert (period.start_op - 1) in used[period.storage]
        assert period.duration_ns == sum(trace.ops[i].duration_ns for i in idle) <= total


# --- files that are refused ------------------------------------------------------------------------------------------


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def rewrite(path: Path, change: Callable[[dict[str, bytes]], None]) -> None:
    contents = members(path)
    change(contents)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, raw in contents.items():
            archive.writestr(name, raw)


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    def in_members(contents: dict[str, bytes]) -> None:
        header = json.loads(contents["header.json"])
        change(header)
        contents["header.json"] = json.dumps(header).encode()

    rewrite(path, in_members)


def test_missing_file_and_directory_stay_os_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Trace.load(tmp_path / "none")
    with pytest.raises(IsADirectoryError):
        Trace.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"PK", b"hello", b"\x80\x04N.", b"\0" * 4096, pickle.dumps({"a": 1})])
def test_foreign_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "foreign"
    path.write_bytes(content)
    with pytest.raises(TraceFormatError, match="foreign is not a readable trace file"):
        Trace.load(path)


def test_foreign_zip(tmp_path: Path) -> None:
    path = tmp_path / "model.zip"
    torch.save({"a": torch.ones(3)}, path)
    with pytest.raises(TraceFormatError, match=r"without header\.json, not a trace written by teraio"):
        Trace.load(path)


def test_truncated_anywhere(file: Path) -> None:
    raw = file.read_bytes()
    for length in range(0, len(raw) - 1, max(1, len(raw) // 60)):
        file.write_bytes(raw[:length])
        with pytest.raises(TraceFormatError):
            Trace.load(file)


def test_damaged_anywhere_is_refused_or_harmless(recorded: Trace, file: Path) -> None:
    raw = file.read_bytes()
    refused = 0
    for position in range(0, len(raw), 37):
        file.write_bytes(raw[:position] + bytes([raw[position] ^ 0x5A]) + raw[position + 1 :])
        try:
            loaded = Trace.load(file)
        except TraceFormatError:
            refused += 1
        else:
            assert_same(loaded, recorded)  # a byte that nobody reads: a date, an attribute
    assert refused > len(raw) // 37 // 2


@given(position=st.integers(0, 2**20), garbage=st.binary(min_size=1, max_size=40))
def test_garbage_never_escapes(
    position: int, garbage: bytes, tmp_path_factory: pytest.TempPathFactory, recorded: Trace
) -> None:
    path = tmp_path_factory.getbasetemp() / "garbage.trace"
    recorded.save(path)
    raw = path.read_bytes()
    at = position % len(raw)
    path.write_bytes(raw[:at] + garbage + raw[at + len(garbage) :])
    with contextlib.suppress(TraceFormatError):
        Trace.load(path).validate()
    path.unlink()


def test_newer_version_is_named(file: Path) -> None:
    rewrite_header(file, lambda header: header.update(version=VERSION + 1))
    with pytest.raises(TraceFormatError, match=f"version {VERSION + 1}, this teraio reads version {VERSION}"):
        Trace.load(file)


@pytest.mark.parametrize("version", [None, "1", True, 0, -1, 1.5])
def test_impossible_version(file: Path, version: Any) -> None:
    rewrite_header(file, lambda header: header.update(version=version))
    with pytest.raises(TraceFormatError, match="version"):
        Trace.load(file)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b"1",
        b'"teraio-trace"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"format": "other"}',
        b"NaN",
        b"9" * 9999,
    ],
)
def test_header_that_is_none(file: Path, header: bytes) -> None:
    rewrite(file, lambda contents: contents.update({"header.json": header}))
    with pytest.raises(TraceFormatError):
        Trace.load(file)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("strings", None),
        ("strings", "abc"),
        ("strings", ["a", 1]),
        ("strings", []),
        ("meta", None),
        ("meta", [1]),
        ("columns", None),
        ("columns", {}),
        ("columns", [1, 2]),
    ],
)
def test_header_with_other_contents(file: Path, field: str, value: Any) -> None:
    rewrite_header(file, lambda header: header.update({field: value}))
    with pytest.raises(TraceFormatError):
        Trace.load(file)


@pytest.mark.parametrize(
    "count", [None, "12", 1.5, float("nan"), float("inf"), True, -1, 2**63, 2**40, 10**30, [3], {"a": 1}]
)
def test_absurd_counts_are_refused_before_anything_is_allocated(file: Path, count: Any) -> None:
    rewrite_header(file, lambda header: header["columns"].update({"use.op": count}))
    with pytest.raises(TraceFormatError, match=r"use\.op|rows"):
        Trace.load(file)


@pytest.mark.parametrize("change", [-1, 1, 1000])
def test_column_of_another_length_than_promised(file: Path, change: int) -> None:
    rewrite_header(file, lambda header: header["columns"].update({"op.name": header["columns"]["op.name"] + change}))
    with pytest.raises(TraceFormatError, match=r"op\.name"):
        Trace.load(file)


def test_columns_of_unequal_length(file: Path) -> None:
    def shorten(contents: dict[str, bytes]) -> None:
        header = json.loads(contents["header.json"])
        header["columns"]["op.flops"] -= 1
        contents["header.json"] = json.dumps(header).encode()
        contents["op.flops"] = contents["op.flops"][:-8]

    rewrite(file, shorten)
    with pytest.raises(TraceFormatError, match="differ in length"):
        Trace.load(file)


def test_missing_column(file: Path) -> None:
    rewrite(file, lambda contents: contents.pop("storage.birth_op"))
    with pytest.raises(TraceFormatError, match=r"storage\.birth_op' is missing"):
        Trace.load(file)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("storage.nbytes", -1),
        ("storage.nbytes", 2**63 - 1),
        ("storage.birth_op", -7),
        ("storage.death_op", 2**40),
        ("use.storage", -1),
        ("use.op", 2**31),
        ("op.name", 10**6),
        ("event.kind", 99),
        ("storage.kind", -1),
        ("op.duration_ns", -(2**63)),
        ("storage.shape_end", 2**62),
    ],
)
def test_numbers_out_of_range(file: Path, name: str, value: int) -> None:
    rewrite(file, lambda contents: contents.update({name: struct.pack("<q", value) + contents[name][8:]}))
    with pytest.raises(TraceFormatError, match=f"does not hold together.*{name.replace('.', ' ')}"):
        Trace.load(file)


def test_member_larger_than_promised_is_not_unpacked(file: Path) -> None:
    """64 MiB of zeros in 64 KiB; the header still promises the real number of rows."""
    rewrite(file, lambda contents: contents.update({"op.flops": bytes(64 << 20)}))
    assert file.stat().st_size < 1 << 20
    with pytest.raises(TraceFormatError, match=r"'op.flops' holds 67108864 bytes, expected at most"):
        Trace.load(file)


def test_member_whose_directory_entry_lies_about_its_size(file: Path) -> None:
    rewrite(file, lambda contents: contents.update({"op.flops": bytes(64 << 20)}))
    raw = file.read_bytes()
    lie, truth = struct.pack("<L", 8), struct.pack("<L", 64 << 20)
    assert truth in raw
    file.write_bytes(raw.replace(truth, lie))
    with pytest.raises(TraceFormatError):
        Trace.load(file)


def test_encrypted_member(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    for marker, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = raw.find(marker)
        raw[at + offset] |= 1
    file.write_bytes(raw)
    with pytest.raises(TraceFormatError, match="encrypted"):
        Trace.load(file)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA, 99])
def test_other_compression(file: Path, method: int) -> None:
    contents = members(file)
    with zipfile.ZipFile(file, "w") as archive:
        for name, raw in contents.items():
            archive.writestr(name, raw, compress_type=method if method != 99 else zipfile.ZIP_STORED)
    if method == 99:
        raw = file.read_bytes()
        at = raw.rfind(b"PK\x01\x02")
        file.write_bytes(raw[: at + 10] + struct.pack("<H", 99) + raw[at + 12 :])
    with pytest.raises(TraceFormatError, match="compressed in a way"):
        Trace.load(file)


# --- saving ----------------------------------------------------------------------------------------------------------


def test_failed_save_leaves_the_old_file_and_no_scratch(recorded: Trace, file: Path, tmp_path: Path) -> None:
    before = file.read_bytes()
    bad = Trace.load(file)
    bad.meta["what"] = object()
    with pytest.raises(TraceError, match="meta"):
        bad.save(file)
    bad = Trace.load(file)
    bad.storage_columns.nbytes[0] = -1
    with pytest.raises(TraceError, match="storage nbytes"):
        bad.save(file)
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == ["step.trace"]
    with pytest.raises(FileNotFoundError):
        recorded.save(tmp_path / "no" / "such" / "folder")


def test_save_to_a_directory_is_an_os_error(recorded: Trace, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        recorded.save(tmp_path / "folder")
    assert os.listdir(tmp_path) == ["folder"]
