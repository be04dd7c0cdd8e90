"""Imports point down, and every file is in its room: read from the sources, so that an import within a function or for
typing counts as much as one that runs."""

import ast
from pathlib import Path

import pytest

import amp_kernels

PACKAGE = Path(amp_kernels.__file__).parent

#: Each room, and the rooms that it may import from besides itself. A backend reads the contract that it implements.
ROOMS = {
    "": {"_dispatch", "_raw", "_updates", "amp", "checkpoint", "cli", "distributed", "integrations", "nn", "numerics", "ops", "optim"},
    "cli": {"_checks", "_dispatch", "amp", "nn", "numerics"},
    "integrations": {"amp", "numerics", "optim"},
    "checkpoint": {"_checks", "_dispatch", "_raw", "amp", "optim"},
    "numerics": {"_checks", "_dispatch", "_raw", "_sharding", "amp", "optim"},
    "amp": {"_checks", "_dispatch", "_raw", "_sharding", "optim"},
    "optim": {"_checks", "_dispatch", "_raw", "_sharding", "_updates", "ops"},
    "distributed": {"_checks", "_dispatch", "_raw", "_sharding", "_updates", "ops"},
    "nn": {"_checks", "_dispatch", "_raw", "_sharding", "ops"},
    "ops": {"_checks", "_dispatch", "_raw", "_sharding"},
    "_triton": {"_checks", "_raw", "_updates"},
    "_aten": {"_checks", "_dispatch", "_raw"},
    "_updates": {"_checks", "_dispatch", "_raw"},
    "_raw": {"_checks", "_dispatch", "_sharding"},
    "_sharding": {"_dispatch"},
    "_checks": set(),
    "_dispatch": {"_checks"},
}  # fmt: skip
ROOT = {
    "__init__.py",
    "__main__.py",
    "_functional.py",
    "_removed.py",
    "_requirements.py",
    "_version.py",
    "py.typed",
    "_build_info.json",
}
COMPILED = {".so", ".pyi"}


def sources(package):
    """Every module of the package by its dotted name, without the package's: ``""``, ``"ops"``, ``"ops.linear"``; of a
    compiled one its stub."""
    for path in sorted(package.rglob("*.py*")):
        parts = path.relative_to(package).with_suffix("").parts
        if path.suffix in (".py", ".pyi") and parts[0] != "bench":
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(name, path, modules):
    """The modules of the package that module ``name`` imports anywhere in its file."""
    base = name.split(".") if name else []
    inside = base if path.name == "__init__.py" else base[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found = [alias.name.split(".") for alias in node.names]
            yield from (".".join(parts[1:]) for parts in found if parts[0] == "amp_kernels")
        elif isinstance(node, ast.ImportFrom):
            parts = node.module.split(".") if node.module else []
            if node.level:
                parts = inside[: len(inside) - node.level + 1] + parts
            elif parts[0] == "amp_kernels":
                parts = parts[1:]
            else:
                continue
            for alias in node.names:
                whole = ".".join([*parts, alias.name])
                yield whole if whole in modules else ".".join(parts)


def graph(package):
    """For each module those it imports."""
    modules = dict(sources(package))
    return {name: {m for m in imports(name, path, modules) if m in modules} for name, path in modules.items()}


def room(module):
    first = module.split(".")[0]
    return first if first in ROOMS else ""


def upward(edges):
    """Imports of modules above. A module without imports, such as the version, may stand in the root for all."""
    return {
        f"{name or 'amp_kernels'} imports {other or 'amp_kernels'}"
        for name, others in edges.items()
        for other in others
        if room(other) not in {room(name), *ROOMS[room(name)]} and (room(other) or edges[other])
    }


def circle(edges):
    """The modules of one circle, ``[]`` if there is none."""
    finished, path = set(), []

    def visit(name):
        if name in path:
            return path[path.index(name) :]
        if name in finished:
            return []
        path.append(name)
        found = next(filter(None, map(visit, sorted(edges[name]))), [])
        path.pop()
        finished.add(name)
        return found

    return next(filter(None, map(visit, sorted(edges))), [])


def imported(line, name, folder):
    """The imports of module ``name`` of the package by this line, which alone is read: the package may have faults of its own."""
    path, modules = folder / "module.py", dict(sources(PACKAGE))
    path.write_text(line)
    return {*imports(name, path, modules)} & modules.keys()


def test_every_file_is_in_a_room():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    files = {path.name for path in PACKAGE.iterdir() if path.is_file() and path.suffix not in COMPILED}
    assert folders - {"__pycache__", "bench"} <= ROOMS.keys()  # an installed package has the benchmarks, too
    assert files <= ROOT
    assert not [path for name in folders & ROOMS.keys() for path in (PACKAGE / name).glob("*/*.py")]


def test_imports_point_down():
    assert not upward(graph(PACKAGE))


def test_no_circle_of_imports():
    assert not circle(graph(PACKAGE))


@pytest.mark.parametrize(
    "line",
    [
        "from ..optim import refresh_shadows",
        "from ..optim import _state",
        "from .. import optim",
        "import amp_kernels.optim",
        "from amp_kernels.nn.linear import Linear",
        "def late():\n    from ..nn import Linear",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..amp import GradScaler",
        "from ..cli import info",
        "from .. import GradScaler",
        "import amp_kernels as ak",
        "from .._triton import gemm",
    ],
)
def test_an_upward_import_is_found(line, tmp_path):
    (found,) = upward({"": {"ops"}, "ops.linear": imported(line, "ops.linear", tmp_path)})
    assert found.startswith("ops.linear imports")


@pytest.mark.parametrize("line", ["from . import matmul", "if 0:\n    from .matmul import matmul"])
def test_a_circle_is_found(line, tmp_path):
    edges = {"ops": set(), "ops.matmul": {"ops._products"}, "ops._products": imported(line, "ops._products", tmp_path)}
    assert {"ops.matmul", "ops._products"} <= {*circle(edges)}
