"""``amp_kernels::gemm`` by the CUDA kernels, on CPU tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops._gemm import activated_width, check_gemm
from . import _gemm


def launch(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    activation: str = "none",
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """See ``amp_kernels/ops/gemm.py``."""
    check_gemm("gemm", a, b, bias, residual, activation, out_dtype)
    c = _gemm.output(a, activated_width(activation, b.shape[-1]), out_dtype)
    _gemm.run(
        c,
        a,
        b,
        alpha=alpha,
        beta=beta,
        activation=activation,
        bias=bias,
        residual=residual,
        batch_invariant=batch_invariant,
    )
    return c
