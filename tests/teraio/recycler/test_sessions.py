"""Sessions with and without the recycler.

Whether training under it keeps its bits is shown by every integration test, since sessions use it by default.
"""

from __future__ import annotations

import gc
import mmap
import os

import pytest
import torch

import teraio
from teraio.runtime.recycler import RecyclerUnavailableError, library

MIB = 1 << 20
PAGE = mmap.PAGESIZE


def _train(**config: object) -> tuple[list[torch.Tensor], teraio.Report]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 256) for _ in range(8)]
    model = torch.nn.Sequential(*[part for layer in layers for part in (layer, torch.nn.GELU())])
    optimizer = torch.optim.AdamW(model.parameters())
    settings = teraio.Config(allow_unsafe_spill=True, min_nbytes=64 << 10, **config)  # type: ignore[arg-type]
    with teraio.offload(model, optimizer, budget="14MiB", config=settings) as session:
        for _ in range(5):
            model(torch.ones(512, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()], session.report()


def test_a_session_with_and_without_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    with_it, report = _train()
    assert report.written_nbytes > 0
    assert not [event for event in report.events if "page faults" in event]
    switched_off, report_off = _train(recycle_memory=False)
    assert not [event for event in report_off.events if "page faults" in event]
    monkeypatch.setattr(library, "_loaded", [RecyclerUnavailableError("there is no C++ compiler")])
    without, report_without = _train()
    assert [event for event in report_without.events if "page faults" in event and "no C++ compiler" in event]
    for found in (switched_off, without):
        assert all(torch.equal(a, b) for a, b in zip(with_it, found, strict=True))
    assert report_without.written_nbytes > 0
    assert report.unlimited_peak_nbytes == report_off.unlimited_peak_nbytes == report_without.unlimited_peak_nbytes
    assert max(r.peak_nbytes for r in (report, report_off, report_without)) <= 14 * MIB


def test_a_session_that_cannot_start_leaves_torchs_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    before = library.load_library().statistics()
    monkeypatch.setattr("teraio.session.Engine", lambda *_, **__: (_ for _ in ()).throw(ValueError("stop")))
    with pytest.raises(ValueError, match="stop"), teraio.offload(budget="1GiB"):
        pass
    kept = torch.empty(MIB, dtype=torch.uint8)
    after = library.load_library().statistics()
    assert (after.live_nbytes, after.idle_nbytes) == (before.live_nbytes, 0)
    assert kept.nbytes == MIB


def test_config_says_what_is_wrong() -> None:
    with pytest.raises(teraio.ConfigError, match="recycle_memory"):
        teraio.Config(recycle_memory=1)  # type: ignore[arg-type]


def test_importing_teraio_asks_torch_for_huge_pages() -> None:
    assert os.environ.get("THP_MEM_ALLOC_ENABLE")


def test_moved_state_goes_when_it_dies_though_its_session_has_ended() -> None:
    before = library.load_library().statistics().live_nbytes
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters())
    settings = teraio.Config(allow_unsafe_spill=True, min_nbytes=64 << 10)
    with teraio.offload(model, optimizer, budget="64MiB", kinds=("activation", "optimizer"), config=settings):
        for _ in range(3):
            model(torch.ones(64, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    gc.collect()  # what the session had goes first
    assert library.load_library().statistics().live_nbytes > before
    del model, optimizer
    gc.collect()
    assert library.load_library().statistics().live_nbytes == before
