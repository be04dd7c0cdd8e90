"""Copies of a module with replaced parts, which :func:`amp_kernels.convert` runs to find out what its class computes.

Names are not enough: Gemma's RMSNorm has the attributes of Llama's but another formula. So the forward of the class runs
once on a few float64 or float32 numbers on the CPU, and the result is compared with the formula of the replacement.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from ._wrapped import own_class


def standing_in(module: torch.nn.Module, **replaced: dict) -> torch.nn.Module:
    """An instance of the class of ``module`` (unwrapped) with its attributes, except those in ``replaced``."""
    kind = own_class(module)
    probe = kind.__new__(kind)
    probe.__dict__ = vars(module) | replaced
    return probe


def values(*shape: int, dtype: torch.dtype = torch.float64, seed: float = 1.0) -> Tensor:
    """Irregular numbers in (-2, 2), without using a random generator."""
    count = torch.Size(shape).numel()
    return torch.arange(1, count + 1, dtype=torch.float64, device="cpu").mul(seed).sin().mul(2).view(shape).to(dtype)


def same(found: Callable[[Tensor], Tensor], formula: Callable[[Tensor], Tensor], x: Tensor, rtol: float) -> bool:
    """True if both give the same result for ``x``; False if ``found`` raises.

    ``found`` is foreign code: the random state is restored after it, and its warnings are suppressed.
    """
    with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = formula(x)
        try:
            result = found(x)
        except Exception:
            return False
        comparable = isinstance(result, Tensor) and result.shape == expected.shape
        return comparable and torch.allclose(result.to(expected.dtype), expected, rtol=rtol, atol=rtol)
