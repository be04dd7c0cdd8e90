"""Activation modules: which function one is, and classes that the fused layers of :mod:`.fused` know by their forward."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .._checks.activations import ACTIVATIONS, GATED
from ._probe import same, values


def relu(self, x: Tensor) -> Tensor:
    return F.relu(x, inplace=getattr(self, "inplace", False))


def gelu(self, x: Tensor) -> Tensor:
    return F.gelu(x)


def gelu_tanh(self, x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def silu(self, x: Tensor) -> Tensor:
    return F.silu(x, inplace=getattr(self, "inplace", False))


FORWARDS: dict[str, Callable] = {f.__name__: f for f in (relu, gelu, gelu_tanh, silu)}
_NAMES = {forward: name for name, forward in FORWARDS.items()}
_PACKAGES = ("torch.nn.modules.activation", "transformers.activations")


def of_transformers(kind: type) -> bool:
    return kind.__module__ == _PACKAGES[1]


def recognised(module: torch.nn.Module) -> str | None:
    """The name in :data:`ACTIVATIONS` of what a module of torch or transformers, or a converted one, computes; ``None``
    for all others."""
    kind = type(module)
    if kind.forward in _NAMES:
        return _NAMES[kind.forward]
    if kind.__module__ not in _PACKAGES or module._parameters or module._buffers or module._modules:
        return None
    if "forward" in vars(module):
        return None
    # Large values tell a clipped activation, many small ones the two forms of GELU.
    x = torch.cat([values(64), 5 * values(64, seed=3.0), 50 * values(8)])
    names = (name for name in ACTIVATIONS if name != "none" and name not in GATED)
    return next((n for n in names if same(lambda t: kind.forward(module, t.clone()), ACTIVATIONS[n], x, 1e-7)), None)


def name_of(module: torch.nn.Module) -> str | None:
    """The same of a converted activation, ``None`` for a module of any other class."""
    return _NAMES.get(type(module).forward)
