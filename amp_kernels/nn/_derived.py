"""Subclasses of a converted module's class with another forward, for classes that this package does not import.

A derived class has the name of its base, and a printed model says in the module's line which function runs in place of the
base's forward. It pickles by reference to its base and to its forward function.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch


def shows(function: str, *, own_signature: bool = False) -> Callable[[Callable], Callable]:
    """Decorator of a forward for :func:`derived`: a printed module names this ``function``, and with ``own_signature``
    ``inspect.signature`` shows the arguments of the base's forward, which transformers looks at."""

    def mark(forward: Callable) -> Callable:
        forward.shows, forward.own_signature = function, own_signature
        return forward

    return mark


def shown(details: str, function: str, base: type) -> str:
    """The ``extra_repr`` of a module that runs ``function`` in place of the forward of ``base``."""
    room = "torch.nn" if base.__module__.startswith("torch.nn.") else base.__module__.partition(".")[0]
    return ", ".join(filter(None, (details, f"{function} in place of {room}.{base.__qualname__}")))


@cache
def derived(base: type[torch.nn.Module], forward: Callable) -> type[torch.nn.Module]:
    """The subclass of ``base`` with the forward ``forward``, a module-level function of this package."""
    body = {
        "forward": _with_signature(forward, base.forward) if forward.own_signature else forward,
        "extra_repr": _extra_repr,
        "__reduce_ex__": _reduce_ex,
        "__module__": forward.__module__,
        "__doc__": base.__doc__,
        "_amp_kernels_base": base,
        "_amp_kernels_forward": forward,
    }
    if base.__repr__ is not torch.nn.Module.__repr__:  # Conv1D's, which has no extra_repr
        body["__repr__"] = _repr
    return type(base.__name__, (base,), body)


def _with_signature(forward: Callable, own: Callable) -> Callable:
    @wraps(own)
    def call(self, *args, **kwargs):
        return forward(self, *args, **kwargs)

    return call


def base_of(kind: type) -> type[torch.nn.Module] | None:
    """The base of a class created by :func:`derived`; ``None`` for any other class, including subclasses of these."""
    return vars(kind).get("_amp_kernels_base")


def forward_of(kind: type) -> Callable | None:
    """The forward of a class created by :func:`derived`; ``None`` for any other class."""
    return vars(kind).get("_amp_kernels_forward")


def own_forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The original forward of ``module``, an instance of a derived class."""
    return module._amp_kernels_base.forward(module, *args, **kwargs)


def _extra_repr(self: torch.nn.Module) -> str:
    return shown(self._amp_kernels_base.extra_repr(self), type(self)._amp_kernels_forward.shows, self._amp_kernels_base)


def _repr(self: torch.nn.Module) -> str:
    details = self._amp_kernels_base.__repr__(self).removesuffix(")")
    return shown(details, type(self)._amp_kernels_forward.shows, self._amp_kernels_base) + ")"


def _reduce_ex(self: torch.nn.Module, protocol: int) -> tuple:
    kind = type(self)
    if base_of(kind) is None:
        return object.__reduce_ex__(self, protocol)
    _, _, *state = object.__reduce_ex__(self, 2)
    return _rebuilt, (kind._amp_kernels_base, vars(kind)["_amp_kernels_forward"]), *state


def _rebuilt(base: type[torch.nn.Module], forward: Callable) -> torch.nn.Module:
    kind = derived(base, forward)
    return kind.__new__(kind)
