"""Activation modules: recognising their function, and forwards by which :mod:`.fused` identifies them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import _functional as F
from .._checks.activations import ACTIVATIONS, GATED
from ._derived import shows
from ._probe import same, values


@shows("relu")
def relu(self, x: Tensor) -> Tensor:
    return F.relu(x, inplace=getattr(self, "inplace", False))


@shows("gelu")
def gelu(self, x: Tensor) -> Tensor:
    return F.gelu(x)


@shows("gelu(approximate='tanh')")
def gelu_tanh(self, x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


@shows("silu")
def silu(self, x: Tensor) -> Tensor:
    return F.silu(x, inplace=getattr(self, "inplace", False))


FORWARDS: dict[str, Callable] = {f.__name__: f for f in (relu, gelu, gelu_tanh, silu)}
_NAMES = {forward: name for name, forward in FORWARDS.items()}
_PACKAGES = ("torch.nn.modules.activation", "transformers.activations")


def of_transformers(kind: type) -> bool:
    return kind.__module__ == _PACKAGES[1]


def recognised(module: torch.nn.Module) -> str | None:
    """The name in :data:`ACTIVATIONS` of the function of a torch, transformers or converted activation module; ``None`` for
    other modules."""
    kind = type(module)
    if kind.forward in _NAMES:
        return _NAMES[kind.forward]
    if kind.__module__ not in _PACKAGES or module._parameters or module._buffers or module._modules:
        return None
    if "forward" in vars(module):
        return None
    # Large values reveal clipping; many small ones tell the two forms of GELU apart.
    x = torch.cat([values(64), 5 * values(64, seed=3.0), 50 * values(8)])
    names = (name for name in ACTIVATIONS if name != "none" and name not in GATED)
    return next((n for n in names if same(lambda t: kind.forward(module, t.clone()), ACTIVATIONS[n], x, 1e-7)), None)


def name_of(module: torch.nn.Module) -> str | None:
    """The name of a converted activation's function; ``None`` for other modules."""
    return _NAMES.get(type(module).forward)
