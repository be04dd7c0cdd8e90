"""Subclasses of a converted module's class with another forward, for classes that this package does not import.

A derived class has the name of its base, so that a printed model looks the same. It pickles by reference to its base and to
its forward function.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


@cache
def derived(base: type[torch.nn.Module], forward: Callable) -> type[torch.nn.Module]:
    """The subclass of ``base`` with the forward ``forward``, a module-level function of this package."""
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
    """The base of a class created by :func:`derived`; ``None`` for any other class, including subclasses of these."""
    return vars(kind).get("_amp_kernels_base")


def own_forward(module: torch.nn.Module, *args: Any) -> Any:
    """The original forward of ``module``, an instance of a derived class."""
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
