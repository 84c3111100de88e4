"""What `offload` and `Config` accept, and what they say about the rest. Nothing is started here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import teraio
from io_backend.user_cache import default_spill_directory


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(4, 4)


_SGD = torch.optim.SGD(nn.Linear(1, 1).parameters())
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("model", {"model": "net"}, "model must be"),
    ("models", {"model": [nn.Linear(1, 1), 3]}, "model must be"),
    ("optimizer", {"optimizer": nn.Linear(1, 1)}, "optimizer must be"),
    ("optimizer twice", {"model": None, "optimizer": [_SGD, _SGD]}, "optimizer names the same object twice"),
    ("TorchScript", {"model": torch.jit.script(nn.Linear(1, 1))}, "model is a TorchScript module"),
    ("budget text", {"budget": "plenty"}, "budget"),
    ("budget unit", {"budget": "6 parsecs"}, "budget"),
    ("budget negative", {"budget": -1}, "budget"),
    ("budget negative text", {"budget": "-1GiB"}, "budget"),
    ("budget zero", {"budget": 0}, "budget"),
    ("budget bool", {"budget": True}, "budget"),
    ("budget float", {"budget": 0.9}, "budget must be a whole number .* got 0.9 .a share"),
    ("budget list", {"budget": ["1GiB"]}, "budget"),
    ("budget device", {"budget": {"tpu": "1GiB"}}, "budget"),
    ("budget no device", {"budget": {}}, "budget"),
    ("budget device size", {"budget": {"cpu": "much"}}, "budget"),
    ("budget device zero", {"budget": {"cpu": 0}}, "budget"),
    ("spill number", {"spill": 5}, "spill"),
    ("spill empty", {"spill": []}, "spill"),
    ("spill mixed", {"spill": ["/tmp", 5]}, "spill"),
    ("spill nothing", {"spill": ""}, "spill names '', which is no directory"),
    ("spill not mounted", {"spill": "/not/mounted"}, "spill names '/not/mounted', which does not exist: mount"),
    ("spill with a null", {"spill": "/tmp/\0"}, "which is no directory"),
    ("spill a file", {"spill": __file__}, "which is no directory"),
    ("spill twice", {"spill": ["/tmp", "/tmp/../tmp"]}, "twice"),
    ("trace_to a directory", {"trace_to": "/tmp"}, "trace_to is '/tmp', which is a directory"),
    ("trace_to nowhere", {"trace_to": "/not/there/run.trace"}, "trace_to is '/not/there/run.trace', which lies in"),
    ("kinds unknown", {"kinds": {"weights"}}, "kinds"),
    ("kinds text", {"kinds": "activations"}, "kinds"),
    ("kinds number", {"kinds": 5}, "kinds"),
    ("kinds nested", {"kinds": [["activation"]]}, "kinds"),
    ("kinds none", {"kinds": ()}, "kinds"),
    ("policy unknown", {"policy": "magic"}, "policy"),
    ("policy number", {"policy": 5}, "policy"),
    ("policy none", {"policy": None}, "policy"),
    ("policy list", {"policy": ["planned"]}, "policy"),
    ("host budget", {"host_budget": "some"}, "host_budget"),
    ("backend", {"backend": "nfs"}, "backend"),
    ("backend list", {"backend": ["posix"]}, "backend"),
    ("trace_to", {"trace_to": 5}, "trace_to"),
    ("config number", {"config": 5}, "config"),
    ("config dict", {"config": {"min_nbytes": 1}}, "config"),
    ("config missing file", {"config": "/nowhere/teraio.toml"}, "teraio.toml"),
]


@pytest.mark.parametrize(("arguments", "name"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_wrong_arguments(model: nn.Module, arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(teraio.ConfigError, match=name):
        teraio.offload(**{"model": model, "budget": "1GiB", **arguments})


def test_a_model_elsewhere() -> None:
    with pytest.raises(teraio.ConfigError, match=r"weight is on meta"):
        teraio.offload(nn.Linear(4, 4, device="meta"), budget="1GiB")


def test_sequences(model: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    other = nn.Linear(2, 2)
    optimizers = (torch.optim.SGD(model.parameters()), torch.optim.SGD(other.parameters()))
    session = teraio.offload([model, other], optimizers, budget="1GiB", spill=[str(tmp_path / "a"), tmp_path / "b"])
    assert session.last_step is None


def test_kinds(model: nn.Module) -> None:
    for kinds in ("auto", {"activation"}, ["activation"], "activation", ("optimizer", "activation")):
        teraio.offload(model, budget="1GiB", kinds=kinds)


def test_errors_are_also_pythons_own() -> None:
    assert issubclass(teraio.ConfigError, ValueError)
    assert issubclass(teraio.InfeasibleBudgetError, MemoryError)
    assert issubclass(teraio.OffloadTimeout, TimeoutError)
    assert issubclass(teraio.OffloadTimeout, teraio.OffloadError)
    assert issubclass(teraio.PlanFormatError, ValueError)
    for error in (
        teraio.ConfigError, teraio.InfeasibleBudgetError, teraio.OffloadError, teraio.PlanMismatchError,
        teraio.PlanFormatError, teraio.InternalError,
    ):  # fmt: skip
        assert issubclass(error, teraio.TeraioError)


def test_a_plan_file_that_is_none(model: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"format": "something else"}')
    with pytest.raises(teraio.PlanFormatError):
        teraio.offload(model, budget="1GiB", policy=tmp_path / "plan.json")


def test_the_default_spill_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TERAIO_SPILL", str(tmp_path / "a"))
    assert default_spill_directory() == tmp_path / "a"
    monkeypatch.delenv("TERAIO_SPILL")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert default_spill_directory() == tmp_path / "b" / "teraio"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "c"))
    assert default_spill_directory() == tmp_path / "c" / ".cache" / "teraio"


# --- Config -----------------------------------------------------------------------------------------------------------


def test_config_has_the_fields_of_the_contract() -> None:
    names = set(teraio.Config.__dataclass_fields__)
    assert names >= {
        "max_spill_nbytes", "require_gds", "io_timeout_s", "allow_unsafe_spill", "pin", "min_nbytes",
        "max_write_tb_per_day", "strict_plan",
    }  # fmt: skip


@pytest.mark.parametrize(
    "values",
    [
        {"min_nbytes": -1},
        {"min_nbytes": 1.5},
        {"min_nbytes": True},
        {"min_nbytes": None},
        {"max_spill_nbytes": -1},
        {"max_spill_nbytes": "1GiB"},
        {"io_timeout_s": 0},
        {"io_timeout_s": -1.0},
        {"io_timeout_s": float("nan")},
        {"io_timeout_s": "soon"},
        {"io_timeout_s": None},
        {"max_write_tb_per_day": 0},
        {"strict_plan": "no"},
        {"allow_unsafe_spill": 1},
        {"optimizer_chunk_nbytes": -5},
    ],
    ids=repr,
)
def test_wrong_settings(values: dict[str, Any]) -> None:
    with pytest.raises(teraio.ConfigError, match=next(iter(values))):
        teraio.Config(**values)


def test_config_is_frozen() -> None:
    with pytest.raises(AttributeError):
        teraio.Config().min_nbytes = 1  # type: ignore[misc]


def test_config_from_a_file(tmp_path: Path, model: nn.Module) -> None:
    path = tmp_path / "teraio.toml"
    path.write_text('min_nbytes = "64KiB"\nio_timeout_s = 5.0\nstrict_plan = true\n')
    assert teraio.Config.load(path) == teraio.Config(min_nbytes=65536, io_timeout_s=5.0, strict_plan=True)
    teraio.offload(model, budget="1GiB", config=path)
    teraio.offload(model, budget="1GiB", config=str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("min_nbyte = 5\n", "unknown fields"),
        ("min_nbytes = [\n", "cannot be read"),
        ('min_nbytes = "many"\n', "min_nbytes"),
        ("min_nbytes = -5\n", "min_nbytes"),
        ('io_timeout_s = "soon"\n', "io_timeout_s"),
        ("[teraio]\nmin_nbytes = 5\n", "unknown fields"),
    ],
)
def test_wrong_files(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "teraio.toml"
    path.write_text(content)
    with pytest.raises(teraio.ConfigError, match=message):
        teraio.Config.load(path)


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (0, 0), (17, 17), ("17", 17), ("17B", 17), ("1KB", 1000), ("1 KiB", 1024), ("2MB", 2 * 10**6),
        ("2mib", 2 << 20),        ("6GiB", 6 << 30), (" 1.5 GiB ", 3 << 29), ("0.5TB", 5 * 10**11), ("3TiB", 3 << 40),
        ("9007199254740993", 2**53 + 1),
    ],
)  # fmt: skip
def test_sizes(text: int | str, nbytes: int) -> None:
    assert teraio.parse_nbytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "1 G", "1.2.3MB", "1e9", "0x10", "1GiB/s", "--1", None, 1.0, True, b"1"])
def test_wrong_sizes(text: Any) -> None:
    with pytest.raises(teraio.ConfigError, match="limit"):
        teraio.parse_nbytes(text, name="limit")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3 << 29, "1.50 GiB"),
        (600 << 20, "600.0 MiB"),
        (5 << 40, "5.00 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_sizes_as_text(nbytes: int, text: str) -> None:
    assert teraio.format_nbytes(nbytes) == text
    if nbytes >= 0:
        assert teraio.parse_nbytes(text) == nbytes
