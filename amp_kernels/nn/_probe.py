"""Copies of a module with parts replaced, on which :func:`amp_kernels.convert` finds out what its class computes.

Names tell little: Gemma's RMSNorm has the attributes of Llama's and another formula. So the forward of the class runs
once, on a few float64 or float32 numbers of the CPU, and is compared with the formula that would take its place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from ._wrapped import own_class


def standing_in(module: torch.nn.Module, **replaced: dict) -> torch.nn.Module:
    """A module of the own class and with the attributes of ``module``, except ``_parameters`` or ``_modules``."""
    kind = own_class(module)
    probe = kind.__new__(kind)
    probe.__dict__ = vars(module) | replaced
    return probe


def values(*shape: int, dtype: torch.dtype = torch.float64, seed: float = 1.0) -> torch.Tensor:
    """Numbers in (-2, 2) without a pattern that a formula could share; no random generator is touched."""
    count = torch.Size(shape).numel()
    return torch.arange(1, count + 1, dtype=torch.float64, device="cpu").mul(seed).sin().mul(2).view(shape).to(dtype)


def same(
    found: Callable[[torch.Tensor], torch.Tensor],
    formula: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    rtol: float,
) -> bool:
    """Whether both give the same for ``x``; not where ``found`` fails, whatever the reason.

    ``found`` is foreign code: the random numbers that it draws are put back, and what it warns of is not heard.
    """
    with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = formula(x)
        try:
            result = found(x)
        except Exception:
            return False
        if not isinstance(result, torch.Tensor) or result.shape != expected.shape:
            return False
        return torch.allclose(result.to(expected.dtype), expected, rtol=rtol, atol=rtol)
