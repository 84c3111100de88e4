"""Imports go down only: reads every import of the four packages and checks the rules of the design.

Covers what one module says it imports, wherever it says so: at the top, in a function, for type checking only, or by
``importlib.import_module("a name")``. Does not cover names computed at run time. The rule that must stay true: each
rule here is also shown to fail on a small bad tree, so that a silent checker cannot pass for a clean tree.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("teraio", "lifetime", "io_backend", "tools")
OPTIONAL = frozenset({"kvikio", "cupy", "matplotlib", "transformers", "lightning"})

MAY_IMPORT = {
    "tools": {"tools", "teraio", "lifetime", "io_backend"},
    "teraio": {"teraio", "lifetime", "io_backend"},
    "lifetime": {"lifetime"},
    "io_backend": {"io_backend"},
}
"""Which of our packages each of our packages may import."""

PLANNER = "teraio.planner"
RUNTIME = "teraio.runtime"
MEETING_POINT = "teraio.planner.plan"
NOT_IN_PLANNER = frozenset({"torch", "threading", "_thread", "concurrent", "multiprocessing", "io_backend"})
"""The planner is a pure function over numpy arrays: no tensors, no threads, no I/O."""


# ---------------------------------------------------------------------------------------------------------------------
# Reading


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported name as a full dotted path: ``from a.b import c`` imports ``a.b.c``."""

    importer: str
    """The importing module; a package stands for its ``__init__``."""
    in_init: bool
    target: str
    line: int
    lazy: bool
    """Not run when the importer is: in a function, or for type checking only."""
    relative: bool

    def __str__(self) -> str:
        """Where the import stands and what it imports."""
        return f"{self.importer} line {self.line} imports {self.target}"


Tree = Mapping[str, list[Import]]
"""All imports, by the importing module."""


def within(name: str, package: str) -> bool:
    """Whether a dotted name is a package or lies in it."""
    return name == package or name.startswith(package + ".")


def read_imports(source: str, importer: str, *, in_init: bool = False) -> Iterator[Import]:
    """Yield every import in a module's source."""
    package = importer if in_init else importer.rpartition(".")[0]

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for target, relative in imported_names(node, package):
            yield Import(
                importer=importer, in_init=in_init, target=target, line=node.lineno, lazy=lazy, relative=relative
            )
        lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            for_types = isinstance(node, ast.If) and is_type_checking(node.test) and child in node.body
            yield from walk(child, lazy or for_types)

    yield from walk(ast.parse(source), False)


def imported_names(node: ast.AST, package: str) -> Iterator[tuple[str, bool]]:
    """Yield (dotted name, whether it was written relative) for each name that a node imports."""
    match node:
        case ast.Import(names=names):
            yield from ((alias.name, False) for alias in names)
        case ast.ImportFrom(module=module, names=names, level=level):
            parents = package.split(".")
            start = parents[: len(parents) - level + 1] if level else []
            base = ".".join([*start, *([module] if module else [])])
            yield from ((f"{base}.{alias.name}", level > 0) for alias in names)
        case ast.Call(
            func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            yield (name, False)


def is_type_checking(test: ast.expr) -> bool:
    """Whether a condition is ``TYPE_CHECKING`` or ``typing.TYPE_CHECKING``."""
    return ast.unparse(test).rpartition(".")[2] == "TYPE_CHECKING"


def read_tree(files: Mapping[str, str]) -> Tree:
    """Read the imports of many modules, from their sources by path (``"teraio/planner/plan.py"``)."""
    tree = {}
    for path, source in files.items():
        parts = path.removesuffix(".py").split("/")
        in_init = parts[-1] == "__init__"
        importer = ".".join(parts[:-1] if in_init else parts)
        tree[importer] = list(read_imports(source, importer, in_init=in_init))
    return tree


# ---------------------------------------------------------------------------------------------------------------------
# Rules: each takes a tree and yields what breaks it.


def breaks_direction(tree: Tree) -> Iterator[str]:
    """tools -> teraio -> {lifetime, io_backend}; nobody imports tools, which imports itself by relative imports."""
    for imported in flatten(tree):
        target = imported.target.partition(".")[0]
        if target == "teraio_tools":
            yield f"{imported}: that name exists in an installation only; inside tools, import relatively"
        elif target == "tools" and within(imported.importer, "tools") and not imported.relative:
            yield f"{imported}: inside tools, import relatively (an installation renames the package)"
        elif target in MAY_IMPORT and target not in MAY_IMPORT[imported.importer.partition(".")[0]]:
            yield f"{imported}: imports go down only"


def breaks_purity(tree: Tree) -> Iterator[str]:
    """The planner imports no torch, no threads and no I/O."""
    for imported in flatten(tree):
        if within(imported.importer, PLANNER) and imported.target.partition(".")[0] in NOT_IN_PLANNER:
            yield f"{imported}: the planner is pure"


def breaks_rooms(tree: Tree) -> Iterator[str]:
    """Planner and runtime meet in ``teraio.planner.plan`` alone, also by way of a third module of teraio."""
    for room, other in ((PLANNER, RUNTIME), (RUNTIME, PLANNER)):
        for imported in flatten(tree):
            if within(imported.importer, room):
                yield from (f"{imported}{way}" for way in ways_into(imported, other, room, tree))


def ways_into(imported: Import, other: str, room: str, tree: Tree) -> Iterator[str]:
    """Yield how an import leads into the other room, through modules of teraio that are in neither."""
    seen: set[str] = set()
    pending = [(imported.target, "")]
    while pending:
        target, way = pending.pop()
        if within(target, other) and not within(target, MEETING_POINT):
            yield f"{way}: {room} and {other} share only {MEETING_POINT}"
        module = module_of(target, tree)
        if module is None or module in seen or not within(module, "teraio"):
            continue
        seen.add(module)
        if not within(module, room) and not within(module, other):
            pending += [(step.target, f"{way}, and so {step.target}") for step in tree[module]]


def breaks_rich(tree: Tree) -> Iterator[str]:
    """Only tools draws."""
    for imported in flatten(tree):
        if within(imported.target, "rich") and not within(imported.importer, "tools"):
            yield f"{imported}: only tools may import rich"


def breaks_optional(tree: Tree) -> Iterator[str]:
    """Each optional package has one module that imports it, which no package loads on its own import."""
    users = defaultdict(set)
    for imported in flatten(tree):
        package = imported.target.partition(".")[0]
        if package in OPTIONAL:
            users[package].add(imported.importer)
    for package, modules in sorted(users.items()):
        if len(modules) > 1:
            yield f"{package} is imported in {', '.join(sorted(modules))}: one module may know it"
    for module, imports in tree.items():
        if any(imported.in_init for imported in imports):
            yield from loads_optional(module, tree)


def loads_optional(package: str, tree: Tree) -> Iterator[str]:
    """Yield each import of an optional package that runs when one of our packages is imported."""
    seen = {package}
    pending = [package]
    while pending:
        for imported in tree[pending.pop()]:
            if imported.lazy:
                continue
            if imported.target.partition(".")[0] in OPTIONAL:
                yield f"{imported}, which importing {package} runs: import it when it is chosen"
            module = module_of(imported.target, tree)
            if module is not None and module not in seen:
                seen.add(module)
                pending.append(module)


def flatten(tree: Tree) -> Iterator[Import]:
    """Yield all imports of a tree."""
    for imports in tree.values():
        yield from imports


def module_of(target: str, tree: Tree) -> str | None:
    """Return the module of the tree that holds an imported name, or None for others' names."""
    while target and target not in tree:
        target = target.rpartition(".")[0]
    return target or None


RULES: tuple[Callable[[Tree], Iterable[str]], ...] = (
    breaks_direction,
    breaks_purity,
    breaks_rooms,
    breaks_rich,
    breaks_optional,
)


# ---------------------------------------------------------------------------------------------------------------------
# The tree


@pytest.fixture(scope="module")
def tree() -> Tree:
    """Read the project's own imports."""
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return read_tree({path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths})


@pytest.mark.parametrize("package", PACKAGES)
def test_package_is_read(tree: Tree, package: str) -> None:
    assert any(tree[module] for module in tree if within(module, package)), f"no import was read in {package}"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(tree: Tree, rule: Callable[[Tree], Iterable[str]]) -> None:
    assert list(rule(tree)) == []


# ---------------------------------------------------------------------------------------------------------------------
# The checker


@pytest.mark.parametrize(
    ("source", "target", "lazy"),
    [
        ("import a.b", "a.b", False),
        ("import a as b", "a", False),
        ("from a.b import c", "a.b.c", False),
        ("from . import c", "teraio.planner.c", False),
        ("from .c import d", "teraio.planner.c.d", False),
        ("from ..runtime import d", "teraio.runtime.d", False),
        ("from .. import d", "teraio.d", False),
        ("def f():\n    import a", "a", True),
        ("async def f():\n    import a", "a", True),
        ("class C:\n    import a", "a", False),
        ("class C:\n    def f(self):\n        import a", "a", True),
        ("try:\n    import a\nexcept ImportError:\n    pass", "a", False),
        ("try:\n    pass\nexcept ImportError:\n    import a", "a", False),
        ("if TYPE_CHECKING:\n    import a", "a", True),
        ("if typing.TYPE_CHECKING:\n    import a", "a", True),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    import a", "a", False),
        ("if x:\n    import a", "a", False),
        ("m = importlib.import_module('a.b')", "a.b", False),
        ("def f():\n    return import_module('a')", "a", True),
        ("m = __import__('a')", "a", False),
    ],
)
def test_reads_import(source: str, target: str, lazy: bool) -> None:
    found = list(read_imports(source, "teraio.planner.module"))
    assert [(imported.target, imported.lazy) for imported in found] == [(target, lazy)]


def test_reads_relative_import_of_init() -> None:
    (imported,) = read_imports("from .plan import Plan", "teraio.planner", in_init=True)
    assert imported.target == "teraio.planner.plan.Plan"


BAD_TREES = [
    (breaks_direction, {"lifetime/a.py": "import io_backend"}),
    (breaks_direction, {"lifetime/a.py": "from teraio.planner import plan"}),
    (breaks_direction, {"io_backend/a.py": "from lifetime import Trace"}),
    (breaks_direction, {"io_backend/a.py": "def f():\n    import teraio"}),
    (breaks_direction, {"io_backend/a.py": "import tools.cli"}),
    (breaks_direction, {"teraio/a.py": "from tools import cli"}),
    (breaks_direction, {"teraio/a.py": "import teraio_tools"}),
    (breaks_direction, {"tools/a.py": "import teraio_tools.cli"}),
    (breaks_direction, {"tools/a.py": "from tools.cli import main"}),
    (breaks_direction, {"tools/a.py": "from tools import cli"}),
    (breaks_purity, {"teraio/planner/a.py": "import torch"}),
    (breaks_purity, {"teraio/planner/a.py": "from torch.nn import Module"}),
    (breaks_purity, {"teraio/planner/policies/a.py": "def f():\n    from threading import Lock"}),
    (breaks_purity, {"teraio/planner/a.py": "import concurrent.futures"}),
    (breaks_purity, {"teraio/planner/a.py": "from io_backend import Store"}),
    (breaks_rooms, {"teraio/planner/a.py": "from teraio.runtime.engine import Engine"}),
    (breaks_rooms, {"teraio/planner/a.py": "from ..runtime import engine"}),
    (breaks_rooms, {"teraio/planner/a.py": "from .. import runtime"}),
    (breaks_rooms, {"teraio/runtime/a.py": "import teraio.planner"}),
    (breaks_rooms, {"teraio/runtime/a.py": "from teraio.planner import Plan"}),
    (breaks_rooms, {"teraio/runtime/a.py": "from teraio.planner.simulator import simulate"}),
    (breaks_rooms, {"teraio/runtime/a.py": "from teraio.planner.plans import Plan"}),
    (
        breaks_rooms,
        {
            "teraio/planner/a.py": "from teraio.session import Session",
            "teraio/session.py": "from teraio.third import x",
            "teraio/third.py": "from teraio.runtime.engine import Engine",
        },
    ),
    (
        breaks_rooms,
        {"teraio/planner/a.py": "import teraio", "teraio/__init__.py": "from teraio.runtime.engine import Engine"},
    ),
    (breaks_rich, {"teraio/a.py": "def f():\n    from rich.table import Table"}),
    (breaks_rich, {"lifetime/a.py": "import rich"}),
    (breaks_optional, {"io_backend/a.py": "import kvikio", "io_backend/b.py": "def f():\n    import kvikio"}),
    (breaks_optional, {"io_backend/a.py": "import cupy", "tools/b.py": "m = importlib.import_module('cupy')"}),
    (breaks_optional, {"io_backend/__init__.py": "import kvikio"}),
    (breaks_optional, {"tools/__init__.py": "try:\n    import matplotlib\nexcept ImportError:\n    pass"}),
    (
        breaks_optional,
        {"io_backend/__init__.py": "from .gds import Gds", "io_backend/gds.py": "from kvikio import CuFile"},
    ),
]


@pytest.mark.parametrize(("rule", "files"), BAD_TREES)
def test_rule_finds(rule: Callable[[Tree], Iterable[str]], files: dict[str, str]) -> None:
    tree = read_tree(files)
    assert len(list(rule(tree))) == 1
    assert [other.__name__ for other in RULES if list(other(tree))] == [rule.__name__]


def test_rules_allow_what_the_design_allows() -> None:
    tree = read_tree(
        {
            "teraio/__init__.py": "from teraio.session import Session",
            "teraio/session.py": "from teraio.planner import policies\nfrom .runtime import engine\nimport lifetime",
            "teraio/errors.py": "class TeraioError(Exception): ...",
            "teraio/planner/__init__.py": "from .plan import Plan",
            "teraio/planner/plan.py": "import numpy\nfrom lifetime import Trace\nfrom teraio.errors import TeraioError",
            "teraio/planner/policies/__init__.py": "from ..plan import Plan",
            "teraio/runtime/engine.py": (
                "import threading\nimport torch\nfrom io_backend import Store\n"
                "from teraio.planner.plan import Plan\nfrom ..planner import plan\nfrom ..errors import TeraioError"
            ),
            "io_backend/__init__.py": "from .choose import choose",
            "io_backend/choose.py": "def choose():\n    from .gds import Gds",
            "io_backend/gds.py": "import torch\nimport kvikio",
            "tools/cli.py": "import rich, teraio, lifetime, io_backend\nfrom . import a\nfrom .a import b",
        }
    )
    assert [broken for rule in RULES for broken in rule(tree)] == []
