"""A run killed in the middle of a step holds no disk space, and the next one starts by itself."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from io_backend.ledger import ledger_name

ROOT = Path(__file__).parents[2]
TRAIN = textwrap.dedent(
    """
    import sys
    import teraio
    import torch

    steps = int(sys.argv[2])
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(),
                                                      torch.nn.Linear(1024, 256)) for _ in range(6)])
    optimizer = torch.optim.AdamW(model.parameters())
    with teraio.offload(model, optimizer, budget="90MiB", spill=sys.argv[1], policy="evict_all") as session:
        session.on_step(lambda step: print("step", step.written_nbytes, flush=True))
        for _ in range(steps):
            model(torch.randn(1024, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    """
)


def _disk_nbytes(directory: Path) -> int:
    """Blocks that the files below `directory` take."""
    return sum(path.lstat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def _start(spill: Path, steps: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", TRAIN, str(spill), str(steps)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("after_steps", [1, 4])  # while learning, and while planned
def test_killed_run_holds_no_space_and_the_next_starts(tmp_path: Path, after_steps: int) -> None:
    spill = tmp_path / "spill"
    spill.mkdir()
    with _start(spill, 10_000) as process:
        assert process.stdout is not None
        for _ in range(after_steps):
            line = process.stdout.readline()
            assert line.startswith("step"), line
            assert int(line.split()[1]) > 0, line
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert _disk_nbytes(spill) < 64 << 10
    # Nothing of the dead process is open any more, so an unlinked file has given its blocks back.
    assert not Path(f"/proc/{process.pid}/fd").exists()

    with _start(spill, 2) as process:
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert out.count("step") == 2
    left = [path.name for path in spill.iterdir()]
    assert left == [ledger_name()], "the session directory of the killed run is reclaimed, the ledger stays"
