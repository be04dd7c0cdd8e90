"""``amp_kernels::gemm`` in Triton."""

from __future__ import annotations

import torch

from ..ops._gemm import GATED, check_gemm, finished, preactivation
from . import _gemm


def launch(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    activation: str = "none",
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """The op for tensors that Triton can reach; see ``amp_kernels/ops/gemm.py``."""
    check_gemm("gemm", a, b, bias, residual, activation, out_dtype)
    if in_kernel(bias, residual, beta, activation):
        c = torch.empty((*a.shape[:-1], b.shape[-1]), dtype=out_dtype or a.dtype, device=a.device)
        scale = None if alpha == 1 else alpha
        _gemm.run(c, a, b, bias, activation=activation, alpha=scale, batch_invariant=batch_invariant)
        return c
    z = preactivation(_gemm.product32(a, b, batch_invariant), bias, alpha)
    return finished(z, residual, activation, beta, out_dtype or a.dtype)


def in_kernel(bias: torch.Tensor | None, residual: torch.Tensor | None, beta: float, activation: str) -> bool:
    """Whether the kernel's own epilogue does it: a bias per column, and an activation of one argument."""
    return (bias is None or bias.ndim == 1) and (residual is None or beta == 0) and activation not in GATED
