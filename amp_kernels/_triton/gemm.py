"""``amp_kernels::gemm`` in Triton."""

from __future__ import annotations

import torch

from ..ops.gemm import _check_gemm
from . import _gemm


def launch(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str = "none",
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The op for tensors that Triton can reach; see ``amp_kernels/ops/gemm.py``."""
    _check_gemm("gemm", a, b, bias, activation, out_dtype)
    c = torch.empty((*a.shape[:-1], b.shape[-1]), dtype=out_dtype or a.dtype, device=a.device)
    _gemm.run(c, a, b, bias, activation=activation)
    return c
