"""``amp_kernels::gemm_dact`` by the CUDA kernels, on CPU tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.gemm_dact import check_dact
from . import _gemm


def launch(
    a: Tensor,
    b: Tensor,
    preact: Tensor,
    *,
    activation: str,
    bias_grad: bool = False,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """See ``amp_kernels/ops/gemm_dact.py``."""
    check_dact(a, b, preact, activation, out_dtype)
    dz = _gemm.output(a, preact.shape[-1], out_dtype)
    sums = a.new_empty(preact.shape[-1] if bias_grad else 0, dtype=torch.float32)
    _gemm.run(
        dz,
        a,
        b,
        activation=activation,
        preact=preact,
        sums=sums if bias_grad else None,
        batch_invariant=batch_invariant,
    )
    return dz, sums
