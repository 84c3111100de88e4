"""The store on KvikIO, on machines without a GPU: the real library on a stand-in for the CUDA driver.

Covers the contract suite on it, its device memory (`kvikio_device`), and refusing where there is no driver. Does not
cover GPUDirect Storage. The rule: the stand-in never enters this process, which may have a driver of its own.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from io_backend import BackendUnavailableError, kvikio_store, open_store

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
CONTRACT = tuple(sorted(HERE.glob("test_contract_*.py")))
TIMEOUT_S = 280.0


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in, compiled."""
    if importlib.util.find_spec("kvikio") is None:
        pytest.skip("KvikIO is not installed")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler for the stand-in driver")
    library = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    source = HERE / "stand_in_driver.c"
    options = ("-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library))
    subprocess.run([compiler, *options, str(source)], check=True, timeout=60)
    return library


def run_inside(driver: Path, tmp_path: Path, *files: Path) -> int:
    """Run tests in a process with the stand-in; how many passed."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'inside'}"]
        + [str(file) for file in files],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, "TERAIO_TEST_STAND_IN_DRIVER": str(driver)},
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    counted = re.search(r"(\d+) passed", done.stdout)
    assert counted is not None, done.stdout
    return int(counted[1])


def test_the_contract(driver: Path, tmp_path: Path) -> None:
    assert len(CONTRACT) >= 3
    assert run_inside(driver, tmp_path, *CONTRACT) > 40


def test_device_memory(driver: Path, tmp_path: Path) -> None:
    assert run_inside(driver, tmp_path, HERE / "kvikio_device.py") >= 5


WITHOUT_A_DRIVER = """
import sys
from io_backend import BackendUnavailableError, open_store
try:
    open_store(sys.argv[1], backend="kvikio")
except BackendUnavailableError as error:
    print(error)
assert "kvikio" not in sys.modules, "KvikIO was touched"
store = open_store(sys.argv[1])
print(store.describe())
store.close()
"""


def test_without_a_driver_kvikio_is_not_touched(tmp_path: Path) -> None:
    if kvikio_store.unavailable_reason() is None:
        pytest.skip("this machine has a CUDA driver")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_A_DRIVER, str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    refusal, description = done.stdout.splitlines()
    assert str(kvikio_store.unavailable_reason()) in refusal
    assert description.startswith("posix-")
    assert list(tmp_path.iterdir()) == []


def test_a_driver_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        def cuDriverGetVersion(self, version: object) -> int:  # noqa: N802
            return 100

    monkeypatch.setattr(kvikio_store.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(kvikio_store.ctypes, "CDLL", lambda name: Silent())
    with pytest.raises(BackendUnavailableError, match=r"does not answer .*gave 100"):
        open_store(tmp_path, backend="kvikio")
    assert list(tmp_path.iterdir()) == []
