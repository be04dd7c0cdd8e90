"""Classes derived, when a module is converted, from one that this package does not import: its own, with another forward.

The derived class has the name of its base, so that printing a model tells the same; it pickles as its base and the
function that is its forward, both by name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


@cache
def derived(base: type[torch.nn.Module], forward: Callable) -> type[torch.nn.Module]:
    """The subclass of ``base`` whose forward is ``forward``, a function of a module of this package."""
    return type(
        base.__name__,
        (base,),
        {
            "forward": forward,
            "__reduce_ex__": _reduce_ex,
            "__module__": forward.__module__,
            "__doc__": base.__doc__,
            "_amp_kernels_base": base,
        },
    )


def base_of(kind: type) -> type[torch.nn.Module] | None:
    """What ``kind`` was derived from, ``None`` if it is no class made here (a subclass of one is none either)."""
    return vars(kind).get("_amp_kernels_base")


def own_forward(module: torch.nn.Module, *args: Any) -> Any:
    """What ``module``, of a derived class, computed before it was converted."""
    return module._amp_kernels_base.forward(module, *args)


def _reduce_ex(self: torch.nn.Module, protocol: int) -> tuple:
    kind = type(self)
    if base_of(kind) is None:
        return object.__reduce_ex__(self, protocol)
    _, _, *state = object.__reduce_ex__(self, 2)
    return _rebuilt, (kind._amp_kernels_base, kind.forward), *state


def _rebuilt(base: type[torch.nn.Module], forward: Callable) -> torch.nn.Module:
    kind = derived(base, forward)
    return kind.__new__(kind)
