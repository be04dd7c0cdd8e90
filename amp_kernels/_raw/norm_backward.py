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
    check=check_backward,
    bound=True,
)
