"""Names and options that were removed: each raises an error that names its replacement."""

import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

from amp_kernels import _removed

PAGE = (Path(__file__).parents[2] / "CHANGELOG.md").read_text()


def test_a_module_names_the_replacement(monkeypatch):
    monkeypatch.setitem(_removed.NAMES, "somewhere.old", "somewhere.new")
    missing = _removed.attributes_of("somewhere")
    with pytest.raises(AttributeError, match=r"'somewhere' has no attribute 'old': .*use somewhere\.new$"):
        missing("old")
    with pytest.raises(AttributeError, match=r"'somewhere' has no attribute 'odd'$"):
        missing("odd")


def test_a_function_names_the_replacement(monkeypatch):
    monkeypatch.setitem(_removed.OPTIONS, ("op", "old"), "new=")
    _removed.refuse("op", {})
    with pytest.raises(TypeError, match=r"op\(\) got an unexpected keyword argument 'old': .*use new=$"):
        _removed.refuse("op", {"old": 1})
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'odd'$"):
        _removed.refuse("op", {"odd": 1})


@pytest.mark.parametrize("name", _removed.NAMES)
def test_each_name(name):
    owner, _, attribute = name.rpartition(".")
    with pytest.raises(AttributeError) as error:
        pkgutil.resolve_name(owner).__getattr__(attribute)
    assert _removed.NAMES[name] in str(error.value)
    assert f"`{name.replace('amp_kernels.', 'ak.')}`" in PAGE


@pytest.mark.parametrize(("function", "option"), _removed.OPTIONS)
def test_each_option(function, option):
    """``function`` is a name in ``amp_kernels``, such as ``nn.LayerNorm``."""
    called = importlib.import_module("amp_kernels")
    for part in function.split("."):
        called = getattr(called, part)
    required = {
        name: None
        for name, parameter in inspect.signature(called).parameters.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }
    with pytest.raises(TypeError) as error:
        called(**required, **{option: 0.1})
    assert _removed.OPTIONS[function, option] in str(error.value)
    assert f"`{option}=`" in PAGE
