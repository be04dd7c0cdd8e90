"""``amp_kernels::gemm_accumulate_`` in Triton."""

from __future__ import annotations

import torch

from ..ops.gemm import check_accumulate
from . import _gemm


def launch(
    c: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    batch_invariant: bool = False,
) -> None:
    """The op for tensors that Triton can reach; see ``amp_kernels/ops/gemm.py``."""
    check_accumulate(c, a, b)
    _gemm.run(c, a, b, residual=c, alpha=alpha, beta=beta, batch_invariant=batch_invariant)
