"""Shared by the backward formulas of the differentiable ops."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def under_transform() -> bool:
    """True if a torch.func transform or forward-mode AD is at work.

    The formulas of this package are those of reverse mode: under a transform a raw op passes on no tangent, which means a
    derivative of zero. torch's own operations serve every transform.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def add_gradient(total: torch.Tensor | None, copy: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Adds the gradient of an operand's 16-bit ``copy``, which exists only if a backward was differentiated."""
    if copy is None:
        return total
    return copy.to(dtype) if total is None else total + copy.to(dtype)


def check_not_recorded(op: str, **tensors: torch.Tensor | None) -> None:
    """Raises if autograd would record ``op``, which has no formula for a gradient."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise RuntimeError(
                f"{op}: {name} requires a gradient, and {op} is not differentiable; accepted: a call under "
                f"torch.no_grad(), or {name}.detach()"
            )


def needs_gradient(*tensors: torch.Tensor | None) -> bool:
    """True if autograd will ask for the gradient of one of the ``tensors``."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False
