"""Autocast rules of the ops, in torch's dispatcher, so that ``torch.autocast`` works as with torch's own ops.

``torch.library.register_autocast`` casts to one fixed dtype; these rules follow the dtype that the user gave to
``torch.autocast``.
They cast nothing themselves: they pass ``compute_dtype`` on, and the op casts inside, below autograd. So autograd still
sees the fp32 weight and returns an fp32 gradient that was never rounded to 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .library import LIBRARY, PLAIN, Op

#: Dispatch key of autocast per device type.
KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


def lower_precision(op: Op, adapt: Callable[[tuple, dict, torch.dtype], tuple[tuple, dict]] | None = None) -> None:
    """Give ``op`` the rule "run in autocast's dtype": its keyword ``compute_dtype`` is set, unless the caller set it.

    Args:
        op: an op with a keyword argument ``compute_dtype``.
        adapt: ``(args, kwargs, dtype) -> (args, kwargs)`` completes the call, for arguments that only this rule can
            know.
    """
    for device_type, key in KEYS.items():
        LIBRARY.impl(op.name, _rule(op, device_type, adapt), key)
    LIBRARY.impl(op.name, _batched(op), "FuncTorchBatched")


def _rule(op: Op, device_type: str, adapt: Callable | None) -> Callable:
    def kernel(*args, compute_dtype=None, **kwargs):
        dtype = compute_dtype or torch.get_autocast_dtype(device_type)
        with torch._C._DisableAutocast():
            if adapt is not None:
                args, kwargs = adapt(args, kwargs, dtype)
            return op.overload(*args, compute_dtype=dtype, **kwargs)

    return kernel


def _batched(op: Op) -> Callable:
    """The rule of torch.vmap, which comes before that of autocast: the op's composition of torch's operations, which know
    batches. Without it vmap would call the op once for each element, with a warning."""

    def kernel(*args, compute_dtype=None, **kwargs):
        dtype = compute_dtype or dtype_on(args[0].device.type)
        with torch._C._DisableAutocast():
            return op.reference(*args, compute_dtype=dtype, **kwargs)

    return kernel


def eager(*tensors: torch.Tensor) -> bool:
    """Whether nothing but torch's eager mode looks at a call on ``tensors``: no compiler, transform, mode or subclass.

    Then a public function may run its composite op as plain Python. That does what the dispatcher would do, and saves
    its two passes through Python, some 20 us.
    """
    for tensor in tensors:
        if type(tensor) not in PLAIN:
            return False
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
    )


def dtype_on(device_type: str) -> torch.dtype | None:
    """What the rules above would pass as ``compute_dtype``: autocast's dtype where it is on, else ``None``."""
    if device_type in KEYS and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def apply(function: type[torch.autograd.Function], *args):
    """``function.apply`` without what torch does there for functorch, which is not at work: 1.5 us."""
    return super(torch.autograd.Function, function).apply(*args)
