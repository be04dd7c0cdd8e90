"""Every public name has an example that runs as it stands, a place in the reference, and no argument that does not exist."""

import doctest
import functools
import inspect
import io
import re
import types
from pathlib import Path

import pytest
import torch

import amp_kernels as ak

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
MODULES = (ak, ak.nn, ak.optim, ak.amp, ak.checkpoint, ak.distributed, ak.numerics)
# By its shortest path, each once.
PUBLIC = {}
for module in MODULES:
    for name in module.__all__:
        if name != "__version__" and not any(getattr(module, name) is known for known in PUBLIC.values()):
            PUBLIC[f"{module.__name__}.{name}"] = getattr(module, name)
EVERY_NAME = pytest.mark.parametrize("name", PUBLIC)


@EVERY_NAME
def test_examples_run(name, tmp_path, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)  # for files
    thing = PUBLIC[name]
    finder = doctest.DocTestFinder(recurse=inspect.isclass(thing))  # methods may have examples, too
    tests = finder.find(thing, name, globs={"torch": torch, "ak": ak})
    assert any(test.name == name and test.examples for test in tests), f"{name} has no example in its docstring"
    report = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
    for test in tests:
        runner.run(test, out=report.write)
    assert runner.failures == 0, report.getvalue()


@functools.cache
def _on_pages():
    paths = re.findall(r"^::: amp_kernels\.(\S+)", "\n".join(page.read_text() for page in REFERENCE.glob("*.md")), re.M)
    return {path: functools.reduce(getattr, path.split("."), ak) for path in paths}


@EVERY_NAME
def test_is_on_a_reference_page(name):
    places = [path for path, thing in _on_pages().items() if thing is PUBLIC[name]]
    assert len(places) == 1, f"{name} is {len(places)} times in docs/reference; accepted: one line '::: {name}'"


def test_pages_show_nothing_private():
    private = [path for path, thing in _on_pages().items() if not any(thing is known for known in PUBLIC.values())]
    assert not private
    assert "`amp_kernels.__version__`" in (REFERENCE / "tools.md").read_text()


@EVERY_NAME
def test_documented_arguments_exist(name):
    thing = PUBLIC[name]
    if isinstance(thing, types.ModuleType):
        return
    section = re.search(r"^Args:\n((?:    .*\n|\n)+)", inspect.getdoc(thing) + "\n", re.M)
    documented = re.findall(r"^    (\w[\w, ]*):", section[1], re.M) if section else []
    if thing is ak.optim.MixedPrecision:
        assert documented == list(thing.__annotations__)
    elif documented:
        accepted = {*inspect.signature(thing).parameters, "options"}
        unknown = {argument for names in documented for argument in names.split(", ")} - accepted
        assert not unknown
