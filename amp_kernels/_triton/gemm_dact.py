"""``amp_kernels::gemm_dact`` in Triton: the product in fp32 by the GEMM kernel, then torch's operations in fp32."""

from __future__ import annotations

import torch

from ..ops.activation_backward import DERIVATIVES
from ..ops.gemm_dact import check_dact
from . import _gemm


def launch(
    a: torch.Tensor,
    b: torch.Tensor,
    preact: torch.Tensor,
    *,
    activation: str,
    bias_grad: bool = False,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op for tensors that Triton can reach; see ``amp_kernels/ops/gemm_dact.py``."""
    check_dact(a, b, preact, activation, out_dtype)
    dz = DERIVATIVES[activation](_gemm.product32(a, b, batch_invariant), preact.float().contiguous())
    sums = dz.flatten(0, -2).sum(0) if bias_grad else dz.new_empty(0)
    return dz.to(out_dtype or a.dtype), sums
