"""The timed cases, by family of ops. ``CASES`` of a family's file has its benchmarks: functions of a scope, named as in ``--op``."""

import importlib
import pkgutil
from collections.abc import Callable, Iterator

from ..harness.case import Case, Scope

_FILES = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
_CASES = {cases.__name__: cases for file in _FILES for cases in getattr(file, "CASES", ())}
OPS: dict[str, Callable[[Scope], Iterator[Case]]] = {
    name: _CASES[name] for name in sorted(_CASES, key=lambda name: (name == "step", name))
}
