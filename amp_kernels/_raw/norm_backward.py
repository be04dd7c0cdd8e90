"""The gradients of layer norm and RMS norm: of the rows, and of weight and bias as sums over the rows in fp32.

With ``n = (x - mean) * rstd`` and ``g = grad * weight``, and means over a row::

    grad_x = rstd * (g - mean(g) - n * mean(g * n)) + grad_sum
    grad_weight = sum over rows of grad * n        grad_bias = sum over rows of grad

RMS norm has no mean(g). A branch that was added to a residual before the norm gets its gradient from the rounded grad_x, in
the same pass. The sums over rows are partial sums of strips of rows, added in order: deterministic, without
atomics. The op is raw; ``amp_kernels.layer_norm`` and ``amp_kernels.rms_norm`` are the differentiable ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .._checks.lists import KERNEL_DTYPES
from .._dispatch.library import Sample, define
from .._dispatch.samples import Normal
from ._norm import check_backward, statistics


def _reference(call):
    check_backward(*call)
    x, mean = call.x, call.mean
    dy, n = call.grad.float(), x.float()
    n = (n if mean is None else n - mean[:, None]) * call.rstd[:, None]
    g = dy if call.weight is None else dy * call.weight.float()
    dx = g - n * (g * n).mean(1, keepdim=True)
    dx = (dx if mean is None else dx - g.mean(1, keepdim=True)) * call.rstd[:, None]
    if call.grad_sum is not None:
        dx = dx + call.grad_sum.float()
    sums = [(dy * n).sum(0), dy.sum(0)][: call.parameters]
    dx = dx.to(x.dtype).contiguous()
    branch = dx.new_empty(0) if call.branch_dtype is None else dx.to(call.branch_dtype, copy=True)
    return dx, torch.stack(sums) if sums else call.rstd.new_empty(0, x.shape[1]), branch


def samples(device: str) -> Iterator[Sample]:
    normal = Normal(device)
    for i, dtype in enumerate(KERNEL_DTYPES):
        other, third = KERNEL_DTYPES[i - 1], KERNEL_DTYPES[i - 2]
        for rows, columns in ((5, 40), (3, 1100), (9, 7), (0, 4)):
            x, grad = normal(rows, columns, dtype=dtype), normal(rows, columns, dtype=other)
            mean, rstd = statistics(x.float(), 1e-5, True)
            weight, grad_sum = normal(columns, dtype=third), normal(rows, columns, dtype=other)
            yield (grad, x, rstd, mean, weight), {"parameters": 2}
            _, rstd = statistics(x.float(), 1e-5, False)
            yield (grad, x, rstd, None, weight, grad_sum), {"parameters": 1, "branch_dtype": other}
            yield (grad, x, rstd, None, weight, grad_sum), {"branch_dtype": third}
        yield (grad, x, rstd), {}


op = define(
    "norm_backward(Tensor grad, Tensor x, Tensor rstd, Tensor? mean=None, Tensor? weight=None, Tensor? grad_sum=None, "
    "*, int parameters=0, ScalarType? branch_dtype=None) -> (Tensor, Tensor, Tensor)",
    _reference,
    samples=samples,
    bound=True,
)


def norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    mean: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    grad_sum: torch.Tensor | None = None,
    *,
    parameters: int = 0,
    branch_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of :func:`norm_forward` from what it returned. Not differentiable.

    Args:
        grad: gradient of ``y``, ``[rows, columns]``, fp16, bf16 or fp32, any strides.
        x: what was normalised: ``x``, or the sum with the residual; any of these dtypes.
        rstd, mean: fp32 ``[rows]``; without a mean the gradient is that of RMS norm.
        weight: ``[columns]``, any of these dtypes.
        grad_sum: the gradient that the sum has besides, the shape of ``x``, any of these dtypes.
        parameters: how many sums over the rows are wanted: 0, 1 (of the weight) or 2 (and of the bias).
        branch_dtype: of the third result, fp16, bf16 or fp32; None: it is not wanted.

    Returns:
        ``(grad_x, grad_parameters, grad_branch)``: the first contiguous, in the dtype of ``x``, rounded once, with
        ``grad_sum`` added; the second fp32 ``[parameters, columns]``; the third, of ``branch_dtype``, is the gradient of
        what was added to a residual: the first as it was rounded. Without ``branch_dtype`` it has no elements.

    Raises:
        TypeError: a dtype or layout is not accepted.
        ValueError: shapes, devices or ``parameters`` do not fit.
    """
    check_backward(grad, x, rstd, mean, weight, grad_sum, parameters, branch_dtype)
    return op(grad, x, rstd, mean, weight, grad_sum, parameters=parameters, branch_dtype=branch_dtype)
