"""``amp_kernels::gemm_accumulate_`` by the CUDA kernels, on CPU tensors."""

from __future__ import annotations

from torch import Tensor

from ..ops.gemm import check_accumulate
from . import _gemm


def launch(
    c: Tensor, a: Tensor, b: Tensor, *, alpha: float = 1.0, beta: float = 1.0, batch_invariant: bool = False
) -> None:
    """See ``amp_kernels/ops/gemm.py``."""
    check_accumulate(c, a, b)
    residual = None if beta in (0.0, 1.0) else c
    _gemm.run(
        c, a, b, accumulate=beta == 1.0, alpha=alpha, beta=beta, residual=residual, batch_invariant=batch_invariant
    )
