"""``syrk``: BLAS's symmetric rank-k update over the package's triangular product."""

from __future__ import annotations

import torch

from .. import _functional as F
from .._checks.lists import FLOATS, HALF_DTYPES, check_number
from .._checks.operands import check_same_device, check_tensor
from .._raw.syrk import check_symmetric_addend, mirrored
from .._raw.syrk import op as syrk_op
from ._autograd import check_not_recorded
from ._products import check_backend


def syrk(a: torch.Tensor, c: torch.Tensor | None = None, *, alpha: float = 1.0, beta: float = 0.0) -> torch.Tensor:
    """``alpha * (a @ a^T) + beta * c``, a symmetric matrix, at half the cost of the full product.

    Tiles of the lower triangle are computed; the upper one is written from them, so the result is symmetric to the bit.
    16-bit operands accumulate in fp32 and the result is rounded once. It is not differentiable.

    Args:
        a: ``[..., N, K]``, any strides. fp16 and bf16 take this package's kernels, fp32 and fp64 torch's own product.
        c: ``[..., N, N]`` of the shape of ``a @ a^T`` and the dtype of ``a``, any strides. Only its lower triangle
            matters, so the result is symmetric whatever the upper one holds.
        alpha: factor of the product.
        beta: factor of ``c``. With 0, ``c`` is not read: NaN and inf in it do not spread.

    Returns:
        ``[..., N, N]``, contiguous, in the dtype of ``a``.

    Raises:
        TypeError: a dtype or layout is not accepted.
        ValueError: shapes or devices do not fit.
        RuntimeError: a gradient of ``a`` or ``c`` would be recorded.

    Examples:
        >>> a = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)
        >>> ak.syrk(a)
        tensor([[ 5., 11.],
                [11., 25.]], dtype=torch.bfloat16)
    """
    check_tensor("syrk", "a", a, FLOATS)
    if a.ndim < 2:
        raise ValueError(f"syrk: a has shape {list(a.shape)}; accepted: [..., N, K]")
    if c is not None:
        check_symmetric_addend("syrk", a, c)
        check_same_device("syrk", a=a, c=c)
    check_not_recorded("syrk", a=a, c=c)
    check_number("syrk", "alpha", alpha)
    check_number("syrk", "beta", beta)
    if c is None and beta != 0:
        raise ValueError(f"syrk: beta is {beta} and c is None; accepted: 0 without c")
    alpha, beta = float(alpha), float(beta)
    if a.dtype not in HALF_DTYPES:
        check_backend(a)
        product = alpha * F.matmul(a, a.mT)
        return mirrored(product if c is None or beta == 0 else torch.add(product, c, alpha=beta))
    stack = a if a.ndim <= 3 else a.flatten(0, -3)
    addend = c if c is None or a.ndim <= 3 else c.flatten(0, -3)
    out = syrk_op(stack, stack, addend, alpha=alpha, beta=beta)
    return out if a.ndim <= 3 else out.view(*a.shape[:-1], a.shape[-2])
