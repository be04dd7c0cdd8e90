"""``amp_kernels::gemm_dact`` in Triton."""

from __future__ import annotations

import torch

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
    dz = torch.empty(preact.shape, dtype=out_dtype or a.dtype, device=a.device)
    sums = torch.empty(preact.shape[-1] if bias_grad else 0, dtype=torch.float32, device=a.device)
    _gemm.run(
        dz,
        a,
        b,
        preact=preact,
        activation=activation,
        backward=True,
        sums=sums if bias_grad else None,
        batch_invariant=batch_invariant,
    )
    return dz, sums
