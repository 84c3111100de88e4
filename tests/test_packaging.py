"""What an installation gets: the wheel's contents, that it imports, and that its requirements are pinned for tests.

The rule that must stay true: a package that exists in the tree is in the wheel, under the name it is imported by.
"""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("teraio", "lifetime", "io_backend", "tools")
INSTALLED = ("teraio", "lifetime", "io_backend", "teraio_tools")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def installed_name(folder: str) -> str:
    """Return the import name, once installed, of a folder of the tree."""
    return re.sub(r"^tools\b", "teraio_tools", folder.replace("/", "."))


def test_every_package_of_the_tree_is_listed() -> None:
    inits = (init for folder in FOLDERS for init in (ROOT / folder).rglob("__init__.py"))
    found = {installed_name(init.parent.relative_to(ROOT).as_posix()) for init in inits}
    setuptools = PYPROJECT["tool"]["setuptools"]
    assert sorted(setuptools["packages"]) == sorted(found)
    for name in found:
        folder = setuptools["package-dir"].get(name, name.replace(".", "/"))
        assert installed_name(folder) == name, f"package-dir sends {name} to {folder}"


def requirements() -> Iterator[Requirement]:
    """Yield what ``.[dev]`` installs by our own request: runtime, the extras that dev names, and dev itself."""
    extras = PYPROJECT["project"]["optional-dependencies"]
    pending = [*PYPROJECT["project"]["dependencies"], *extras["dev"]]
    while pending:
        requirement = Requirement(pending.pop())
        if requirement.name == PYPROJECT["project"]["name"]:
            pending += [line for extra in requirement.extras for line in extras[extra]]
        else:
            yield requirement


def test_constraints_pin_every_direct_dependency() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {pin.name: pin for pin in map(Requirement, filter(None, (line.partition("#")[0].strip() for line in lines)))}
    wanted = {requirement.name: requirement for requirement in requirements()}
    assert pins.keys() == wanted.keys()
    for name, pin in pins.items():
        (exact,) = pin.specifier
        assert exact.operator == "=="
        assert wanted[name].specifier.contains(exact.version), f"{pin} is outside {wanted[name]}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the sources, so that no old build directory can add to it."""
    source = tmp_path_factory.mktemp("source")
    for folder in (*FOLDERS, "tests"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.mark.slow
def test_wheel_holds_the_four_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == set(INSTALLED)
    for package in INSTALLED:
        assert f"{package}/py.typed" in names
    expected = {
        installed_name(path.parent.relative_to(ROOT).as_posix()).replace(".", "/") + "/" + path.name
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == expected
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_wheel_names_its_command_and_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (info,) = {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        points = configparser.ConfigParser()
        points.read_string(archive.read(f"{info}/entry_points.txt").decode())
        metadata = archive.read(f"{info}/METADATA").decode()
    assert dict(points["console_scripts"]) == {"teraio": "teraio_tools.cli:main"}
    assert "License-Expression: Apache-2.0\n" in metadata
    assert "Requires-Python: >=3.11\n" in metadata


@pytest.mark.slow
def test_wheel_imports_without_the_tree(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    # First on the path, before an editable installation of the tree; isolated, so without the working directory.
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        f"import {', '.join(INSTALLED)}, teraio_tools.cli\n"
        f"for module in ({', '.join(INSTALLED)}): print(module.__file__)\n"
        "assert callable(teraio_tools.cli.main)\n"
    )
    ran = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == [str(tmp_path / package / "__init__.py") for package in INSTALLED]
