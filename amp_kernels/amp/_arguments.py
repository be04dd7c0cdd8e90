"""Arguments of the scaler's methods that stand in the wrong place, or have two names."""

from __future__ import annotations

import inspect
import numbers

from torch import Tensor
from torch.optim import Optimizer

from .._checks.types import type_name


def check_optimizer(method: str, optimizer: object) -> None:
    """Raise for a model, parameters or ``None``. An optimizer need not be torch's."""
    if not (hasattr(optimizer, "param_groups") and callable(getattr(optimizer, "step", None))):
        raise TypeError(
            f"GradScaler.{method}: optimizer has type {type_name(optimizer)}; accepted: an optimizer, which has param_groups and "
            "step"
        )


def check_closure(optimizer: Optimizer, first: object) -> None:
    """Raise if ``first``, the first argument of ``optimizer.step``, is a number in place of a closure."""
    if isinstance(first, (numbers.Real, Tensor)) and "closure" in inspect.signature(optimizer.step).parameters:
        raise TypeError(
            f"GradScaler.step: the second argument is {first!r}, which is no argument of {type(optimizer).__name__}.step; accepted: "
            f"max_norm={first!r}"
        )


def one_norm(max_norm: float | None, max_grad_norm: float) -> float:
    """The value of an argument that has two names."""
    if max_norm is not None:
        raise ValueError(
            f"GradScaler.step: max_norm is {max_norm} and max_grad_norm, which is the same, {max_grad_norm}; accepted: one of them"
        )
    return max_grad_norm
