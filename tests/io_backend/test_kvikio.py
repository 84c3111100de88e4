"""The KvikIO store, with the real KvikIO on a driver that only poses as CUDA's, in a process of its own.

Covers the contract suite and the path of device memory there, and what happens without a driver here. GPUDirect Storage
itself needs a GPU. The rule: the stand-in is never loaded into this process.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from io_backend import BackendUnavailableError, open_store

HERE = Path(__file__).parent


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """The stand-in driver, compiled."""
    if importlib.util.find_spec("kvikio") is None:
        pytest.skip("KvikIO is not installed")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library = tmp_path / "libcuda.so.1"
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", "-o", str(library)]
    subprocess.run([*command, str(HERE / "stand_in_driver.c")], check=True, timeout=120)
    return library


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["test_store_contract.py", "test_kvikio_device.py"])
def test_on_a_stand_in_driver(driver: Path, suite: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / suite)]
    environment = {**os.environ, "TERAIO_STAND_IN_DRIVER": str(driver)}
    done = subprocess.run(
        command, cwd=HERE.parent.parent, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_without_a_driver_nothing_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("io_backend.kvikio_store._DRIVER", "libno_such_driver.so.1")
    loaded = "kvikio" in sys.modules
    with pytest.raises(BackendUnavailableError, match=r"cannot be used here: .*(no CUDA driver|not installed)"):
        open_store(tmp_path, backend="kvikio")
    assert ("kvikio" in sys.modules) == loaded
    assert not list(tmp_path.iterdir())
    with open_store(tmp_path) as store:  # type: ignore[attr-defined]
        assert "posix" in store.describe()


def test_a_driver_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("kvikio") is None:
        pytest.skip("KvikIO is not installed")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source, library = tmp_path / "mute.c", tmp_path / "libmute.so"
    source.write_text("int cuDriverGetVersion(int *version) { *version = 0; return 34; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=120)
    monkeypatch.setattr("io_backend.kvikio_store._DRIVER", str(library))
    with pytest.raises(BackendUnavailableError, match=r"does not answer \(cuDriverGetVersion gave 34"):
        open_store(tmp_path / "spill", backend="kvikio")
