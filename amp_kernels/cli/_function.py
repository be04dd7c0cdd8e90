"""A training function named on the command line."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable

CONTRACT = (
    "module:function, or path.py:function. The function takes an amp_kernels.numerics.Run and returns the metric that counts. "
    "It builds model and data from the seeded generators, puts both on run.device, enters run.autocast() for the forward and "
    "the loss, and goes through run.scaler (scale, step, update) for the backward and the step."
)


def load(name: str) -> Callable:
    """The function that ``name`` stands for. Its module is looked for in the current folder, too.

    Raises:
        argparse.ArgumentTypeError: there is no such module or function; what its import raises, otherwise.
    """
    module_name, colon, function_name = name.partition(":")
    if not colon or not function_name:
        raise argparse.ArgumentTypeError(f"{name!r} is not of the form module:function")
    module_name = module_name.removesuffix(".py").replace("/", ".").lstrip(".")
    sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise  # of something that the module imports
        raise argparse.ArgumentTypeError(f"there is no module {module_name!r} here or on the path") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise argparse.ArgumentTypeError(f"module {module_name!r} has no function {function_name!r}")
    return function
