"""Loads the compiled libraries. Importing never fails and touches no device: what cannot load leaves its reason here."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).parents[1]
#: The name of a backend's library of ops.
LIBRARIES = {"cpu": "cpu", "cuda": "cuda", "emulate": "emulated"}
#: The command that builds what is missing.
BUILD = "pip install --no-build-isolation -v ."
_absent: dict[str, str] = {}


@functools.cache
def build_info() -> dict[str, Any]:
    """The record of the build: state of each library, architectures, compilers, torch. Empty if never built."""
    path = PACKAGE / "_build_info.json"
    return json.loads(path.read_text()) if path.exists() else {}


def absent() -> dict[str, str]:
    """The libraries that are not there (``"cpu"``, ``"cuda"``, ``"triton"``, ``"emulate"``, ``"nodes"``), each with the reason."""
    return _absent


def cuda_archs() -> tuple[str, ...]:
    """The architectures the CUDA library was built for, as in ``TORCH_CUDA_ARCH_LIST``."""
    return tuple(build_info().get("cuda_archs", ()))


@functools.cache
def has_triton() -> bool:
    if importlib.util.find_spec("triton") is None:
        _absent["triton"] = "the package triton is not installed"
        return False
    return True


def has_function(module: str, name: str) -> bool:
    """True if ``amp_kernels/<module>.py`` defines ``name``; read as text, so that nothing is imported."""
    path = PACKAGE / f"{module}.py"
    return path.exists() and re.search(rf"^(def )?{name}\b", path.read_text(), re.MULTILINE) is not None


def build_reason(library: str) -> str:
    """Why the build has no ``library``, in the build's own words."""
    info = build_info()
    if not info:
        return f"the package in {PACKAGE} was never built ({BUILD}); one that is installed is imported from any other folder"
    entry = info.get("libraries", {}).get(library, {})
    return entry.get("reason") or f"lib {library} is missing from {PACKAGE} although it was built"


def other_cuda(info: dict[str, Any], cuda: str) -> str | None:
    """Why a library built with one major version of CUDA does not serve a torch of another, whose driver may be older; or None."""
    nvcc = info.get("nvcc")
    if nvcc is None or nvcc.split(".")[0] == cuda.split(".")[0]:
        return None
    return f"it was built with CUDA {nvcc}, torch with CUDA {cuda}: the major versions must agree; to build it again: {BUILD}"


def load() -> None:
    """Load the libraries of ops that were built; that of CUDA only under a CUDA build of torch."""
    for backend, library in LIBRARIES.items():
        path = PACKAGE / f"libamp_kernels_{library}.so"
        if backend == "cuda" and torch.version.cuda is None:
            _absent["cuda"] = "the installed torch is a CPU build"
        elif not path.exists():
            _absent[backend] = build_reason(library)
        elif backend == "cuda" and (other := other_cuda(build_info(), torch.version.cuda)):
            _absent["cuda"] = other
        else:
            try:
                torch.ops.load_library(str(path))
            except OSError as error:
                _absent[backend] = f"{path.name} does not load: {error}"
