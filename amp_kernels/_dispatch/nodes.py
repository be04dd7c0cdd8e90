"""The module ``_nodes`` (csrc/autograd): ``linear``, ``matmul``, norms, cross-entropy and ``cast_`` in C++ for plain calls,
autograd nodes included, and the loops of a cached step over its parameters.

The module is compiled against torch's C++ interface, which changes between versions, so only the torch that it was built
for loads it. Without it the Python functions, its specification, serve every call.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from . import load, walks
from .batch_invariant import SETTING, is_batch_invariant

#: Python backwards of the nodes, by the name of the function: ``(grads, saved, needs_input_grad, *options)`` to a
#: gradient or ``None`` for each input. For a product the options are the names of the input dtypes, the shape of a, the name
#: of the compute dtype and the activation; ``grads`` belong to the result, the pre-activation and the 16-bit copies of a and
#: b; ``saved`` are these copies, the pre-activation and the weight. The others are described in amp_kernels/ops.
FORMULAS: dict[str, Callable[..., tuple[torch.Tensor | None, ...]]] = {}

_module = None
# The functions of the module (csrc/autograd/functions.h). They return None, having done nothing, if a call is not plain.
linear: Callable[..., torch.Tensor | None]
matmul: Callable[..., torch.Tensor | None]
norm: Callable[..., torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None]
cross_entropy: Callable[..., torch.Tensor | None]
cast_lists: Callable[..., bool | None]


def load_module() -> None:
    """Load the module if it was built for the torch that runs; else leave the reason with the other libraries'."""
    global _module, linear, matmul, norm, cross_entropy, cast_lists
    reason = _why_not(load.build_info(), torch.__version__)
    if reason is None:
        try:
            _module = importlib.import_module(f"{load.PACKAGE.name}._nodes")
        except ImportError as error:
            reason = f"it does not load: {error}"
    if _module is None:
        load.absent()["nodes"] = reason
        return
    for name, formula in FORMULAS.items():
        _module.bind(name, formula)
    linear, matmul = _module.linear, _module.matmul
    norm, cross_entropy, cast_lists = _module.norm, _module.cross_entropy, _module.cast_lists
    walks.take_from(_module)


def step_walk() -> Any:
    """The module, for the walk over the parameters of a cached step (csrc/autograd/gradient_table.cpp); ``None`` if there is none."""
    return _module


def _why_not(info: dict, version: str) -> str | None:
    if not info.get("libraries", {}).get("nodes", {}).get("built"):
        return load.build_reason("nodes")
    if "cpu" in load.absent():
        return f"it needs the CPU kernels: {load.absent()['cpu']}"
    if (
        info.get("torch", "").partition("+")[0] != version.partition("+")[0]
    ):  # its CPU and CUDA builds have one C++ interface
        return f"it was built for torch {info.get('torch')}, this is {version}; to build it again: {load.BUILD}"
    return None


def may_serve() -> bool:
    """True if the module may serve a call. It checks the remaining conditions itself.

    Every small layer calls it, so it reads variables only. Dynamo is the one compiler that it checks: the others run under a mode,
    which the module sees.
    """
    return (
        not is_dynamo_compiling()
        and _module is not None
        and (SETTING.newest is None or not is_batch_invariant())
        and forward_ad._current_level < 0
    )


def serve_gpu(index: int) -> None:
    """Products of this CUDA device may be plain: the policy gives them to the CUDA kernels."""
    if _module is not None:
        _module.serve_gpu(index)


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """While a block is open in any thread, the Python functions serve every call and every backward."""
    if _module is None:
        yield
        return
    _module.refuse(1)
    try:
        yield
    finally:
        _module.refuse(-1)
