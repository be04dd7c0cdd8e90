"""Autocast rules of the ops, in torch's dispatcher, so that ``torch.autocast`` works as with torch's own ops.

``torch.library.register_autocast`` casts to one fixed dtype; these rules follow the dtype that the user gave to
``torch.autocast``.
They cast nothing themselves: they pass ``compute_dtype`` on, and the op casts inside, below autograd. So autograd still
sees the fp32 weight and returns an fp32 gradient that was never rounded to 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import policy
from .library import LIBRARY, PLAIN, Op, decompose_batches

#: Dispatch key of autocast per device type.
KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


def lower_precision(op: Op, adapt: Callable[[tuple, dict, torch.dtype], tuple[tuple, dict]] | None = None) -> None:
    """Give ``op`` the rule "run in autocast's dtype": its keyword ``compute_dtype`` is set, unless the caller set it.

    Args:
        op: an op with a keyword argument ``compute_dtype``.
        adapt: ``(args, kwargs, dtype) -> (args, kwargs)`` completes the call, for arguments that only this rule can
            know.
    """
    _register(op, "compute_dtype", torch.get_autocast_dtype, adapt)


def fp32_result(op: Op) -> None:
    """Give ``op``, which computes in fp32 whatever it reads, the rule "return fp32": its keyword ``out_dtype`` is set,
    unless the caller set it. Nothing is cast on the way in."""
    _register(op, "out_dtype", lambda device_type: torch.float32)


def _register(op: Op, keyword: str, dtype_of: Callable[[str], torch.dtype], adapt: Callable | None = None) -> None:
    for device_type, key in KEYS.items():
        LIBRARY.impl(op.name, _rule(op, device_type, keyword, dtype_of, adapt), key)
    decompose_batches(op, _batched(op, keyword, dtype_of))


def _rule(op: Op, device_type: str, keyword: str, dtype_of: Callable, adapt: Callable | None) -> Callable:
    def kernel(*args, **kwargs):
        given = kwargs.pop(keyword, None)
        if policy.disabled:
            with torch._C._DisableAutocast():
                return op.overload(**_widened(op, args, kwargs))
        dtype = given or dtype_of(device_type)
        with torch._C._DisableAutocast():
            if adapt is not None:
                args, kwargs = adapt(args, kwargs, dtype)
            return op.overload(*args, **{keyword: dtype}, **kwargs)

    return kernel


def _widened(op: Op, args: tuple, kwargs: dict) -> dict:
    """A call's arguments with 16-bit tensors as fp32 and without shadows: what is left of autocast when the package is
    switched off."""
    given = {**dict(zip((a.name for a in op.overload._schema.arguments), args, strict=False)), **kwargs}
    return {name: None if name.startswith("shadow") else _wide(value) for name, value in given.items()}


def _wide(value: object) -> object:
    sixteen = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if sixteen else value


def _batched(op: Op, keyword: str, dtype_of: Callable) -> Callable:
    """The rule of torch.vmap, which comes before that of autocast, and does what that would do."""

    def kernel(*args, **kwargs):
        device_type = args[0].device.type
        on = dtype_on(device_type) is not None
        dtype = kwargs.pop(keyword, None) or (dtype_of(device_type) if on else None)
        with torch._C._DisableAutocast():
            return op.reference(*args, **{keyword: dtype}, **kwargs)

    return kernel


def eager(*tensors: torch.Tensor) -> bool:
    """True if only torch's eager mode sees a call on ``tensors``: no compiler, transform, mode or subclass.

    Then a public function may run its composite op as plain Python. That does what the dispatcher would do, and saves
    its two passes through Python, some 20 us.
    """
    for tensor in tensors:
        if type(tensor) not in PLAIN:
            return False
    return not (
        policy.disabled
        or torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
    )


def dtype_on(device_type: str) -> torch.dtype | None:
    """The ``compute_dtype`` that the rules above would pass: autocast's dtype where it is on, else ``None``."""
    if device_type in KEYS and torch.is_autocast_enabled(device_type) and not policy.disabled:
        return torch.get_autocast_dtype(device_type)
    return None


def apply(function: type[torch.autograd.Function], *args):
    """``function.apply`` without what torch does there for functorch, which is not at work: 1.5 us."""
    return super(torch.autograd.Function, function).apply(*args)
