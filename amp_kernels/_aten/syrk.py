"""``syrk`` over torch's product: a whole one of each matrix, whose lower triangle is mirrored."""

from __future__ import annotations

import torch

from .._raw.syrk import mirrored
from .gemm import products


def syrk(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    diagonal: float = 0.0,
) -> torch.Tensor:
    multiply, _ = products()
    c = None if beta == 0 else c
    if a.ndim == 2:
        s, _ = multiply(a, b.mT, None, c, alpha=alpha, beta=beta)
    else:
        # One after the other: torch chooses the order of sums by the batch, and a matrix has the same bits alone and in a stack.
        addends = [None] * len(a) if c is None else c
        each = [multiply(x, y.mT, None, z, alpha=alpha, beta=beta)[0] for x, y, z in zip(a, b, addends, strict=True)]
        s = torch.stack(each) if each else a.new_empty(0, a.shape[1], a.shape[1])
    if diagonal != 0:
        s.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return mirrored(s)
