"""``amp_kernels::gemm_preact`` in Triton."""

from __future__ import annotations

import torch

from ..ops._gemm import check_gemm, output_shape
from . import _gemm


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
    c = torch.empty(output_shape(a, b, activation), dtype=out_dtype or a.dtype, device=a.device)
    z = c.new_empty(output_shape(a, b, "none"))
    _gemm.run(
        c, a, b, bias, z, residual, activation=activation, alpha=alpha, beta=beta, batch_invariant=batch_invariant
    )
    return c, z
