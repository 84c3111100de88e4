"""Saved tensors of pinned modules stay resident."""

from pathlib import Path

import pytest
import torch

import teraio


def _train(spill: Path, pin: tuple[str, ...]) -> teraio.Report:
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU()) for _ in range(3)])
    for i in (1, 2):
        model[i][0] = torch.nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = teraio.Config(min_nbytes=1024, pin=pin)
    with teraio.offload(model, optimizer, budget="4MiB", spill=spill, policy="evict_all", config=config) as session:
        for _ in range(3):
            model(torch.randn(128, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return session.report()


def test_pinned_modules_keep_what_they_save(tmp_path: Path) -> None:
    free = _train(tmp_path, ())
    pinned = _train(tmp_path, ("0", "1.*"))
    assert free.skipped.get("pinned", 0) == 0
    assert pinned.skipped["pinned"] > 0
    assert 0 < pinned.written_nbytes < free.written_nbytes


def test_pattern_without_a_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(teraio.ConfigError, match="no module has such a name"):
        _train(tmp_path, ("nothing.*",))
