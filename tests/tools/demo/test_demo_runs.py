"""The demo for real, with a model of a few kilobytes: one plain segment, and the whole comparison."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tools import cli

TINY = ["--layers", "1", "--width", "64", "--batch", "2", "--sequence", "64"]


def test_one_plain_segment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "segment.json"
    runs = []
    for _ in range(2):
        assert cli.main(["demo", "--mode", "plain", *TINY, "--steps", "2", "--json", str(file)]) == 0
        runs.append(json.loads(file.read_text(encoding="utf-8")))
    first, second = runs
    assert len(first["losses"]) == len(first["step_times_s"]) == 2
    assert first["losses"] == second["losses"]
    assert first["weights_sha256"] == second["weights_sha256"]
    assert first["rss_peak_nbytes"] >= first["rss_baseline_nbytes"] > 0
    assert first["weights_sha256"] in capsys.readouterr().out


def test_a_plain_segment_loads_no_teraio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A package of that name that cannot be imported, ahead of ours.
    for name in ("teraio", "lifetime", "io_backend"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('loaded in plain mode')\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo", "--mode", "plain", *TINY, "--steps", "1"]) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_cuda_device_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--mode", "plain", "--device", "cuda", *TINY]) == 2
    assert "--device cuda" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    size = ["--layers", "6", "--width", "256", "--batch", "4", "--sequence", "256", "--steps", "5"]
    code = cli.main(["demo", *size, "--spill", str(tmp_path), "--json", str(file)])
    shown = capsys.readouterr()
    assert code == 0, shown.out + shown.err
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["bit_identical"]
    assert result["teraio"]["peak_nbytes"] <= result["budget_nbytes"] < result["plain"]["peak_nbytes"]
    assert len(result["teraio"]["losses"]) == len(result["plain"]["losses"]) == 2
    assert result["written_nbytes"] > 0
    assert result["read_nbytes"] > 0
    assert sum(result["paths"].values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["lots", "-1MiB"])
def test_a_budget_that_is_no_size_is_wrong_usage(budget: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", *TINY, f"--budget={budget}"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert budget in err
