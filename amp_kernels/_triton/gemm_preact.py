"""``amp_kernels::gemm_preact`` in Triton."""

from __future__ import annotations

import torch

from ..ops._gemm import check_gemm, finished, preactivation
from . import _gemm
from .gemm import in_kernel


def launch(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    activation: str,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op for tensors that Triton can reach; see ``amp_kernels/ops/gemm.py``."""
    check_gemm("gemm_preact", a, b, bias, residual, activation, out_dtype)
    if in_kernel(bias, residual, beta, activation):
        c = torch.empty((*a.shape[:-1], b.shape[-1]), dtype=out_dtype or a.dtype, device=a.device)
        preact = torch.empty_like(c)
        scale = None if alpha == 1 else alpha
        _gemm.run(c, a, b, bias, preact, activation=activation, alpha=scale, batch_invariant=batch_invariant)
        return c, preact
    z = preactivation(_gemm.product32(a, b, batch_invariant), bias, alpha)
    return finished(z, residual, activation, beta, out_dtype or a.dtype), z.to(out_dtype or a.dtype, copy=True)
