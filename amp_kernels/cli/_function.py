"""A training function named on the command line, and the types of its arguments."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import torch

Number = TypeVar("Number", int, float)

CONTRACT = (
    "module:function or path.py:function. The function takes an amp_kernels.numerics.Run and returns the metric to compare. It "
    "builds model and data from the seeded generators, puts both on run.device, uses run.autocast() for the forward and the loss, "
    "and uses run.scaler (scale, step, update) for the backward and the step."
)


def load(name: str) -> Callable:
    """Import the function ``name``. Modules are also searched in the current folder; a file may be anywhere.

    Raises:
        argparse.ArgumentTypeError: there is no such module, file or function. Other exceptions of the import pass through.
    """
    source, colon, function_name = name.rpartition(":")
    if not colon or not function_name:
        raise argparse.ArgumentTypeError(f"{name!r} is not of the form module:function")
    module = _from_file(Path(source)) if source.endswith(".py") else _from_path(source)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise argparse.ArgumentTypeError(f"module {source!r} has no function {function_name!r}")
    return function


def device(name: str) -> torch.device:
    """The device ``name``, after allocating a tensor on it.

    Raises:
        argparse.ArgumentTypeError: torch does not know the device or cannot use it.
    """
    try:
        return torch.empty(0, device=name).device
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise argparse.ArgumentTypeError(f"{name!r} cannot be used: {str(error).splitlines()[0]}") from None


_KINDS = {int: "whole number", float: "number"}


def at_least(low: Number, kind: Callable[[str], Number]) -> Callable[[str], Number]:
    """An argument type: numbers not below ``low``, without NaN."""

    def number(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not value >= low:
            raise argparse.ArgumentTypeError(f"{text!r} is no {_KINDS[kind]} from {low} on")
        return value

    return number


def _from_path(name: str) -> ModuleType:
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise  # a module that this one imports is missing
        raise argparse.ArgumentTypeError(f"there is no module {name!r} here or on the path") from None


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {str(path)!r}")
    sys.path.insert(0, str(path.parent.absolute()))  # as for a script, which may import its siblings
    # Registered under its plain name, so that subprocesses can import it.
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    known = sys.modules.get(path.stem)
    if known is None or getattr(known, "__file__", None) == module.__file__:  # do not replace another module
        sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
