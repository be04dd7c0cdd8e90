"""Softmax and log-softmax of rows, and their gradients, in fp32 from what is read once. Raw: the ops that ``softmax`` and
``log_softmax`` are made of. The formulas: csrc/softmax/formula.h.

``mask`` is bool ``[a, b, c, columns]`` with ``a * b * c`` rows, True where an element counts; any of the first three may be
expanded. A row that is fully masked or all -inf is NaN; with ``safe`` its softmax is 0 and its log-softmax -inf. Masked elements have
gradient 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from .._checks.lists import KERNEL_DTYPES
from .._checks.operands import check_tensor
from .._dispatch.library import Sample, define
from .._dispatch.samples import Normal


def check_forward(x: Tensor, mask: Tensor | None, out_dtype: torch.dtype) -> None:
    _check_matrix("softmax_rows", "x", x)
    _check_mask("softmax_rows", mask, x)
    if out_dtype not in KERNEL_DTYPES:
        raise TypeError(f"softmax_rows: out_dtype is {out_dtype}; accepted: float16, bfloat16, float32")


def check_backward(grad: Tensor, of: Tensor, statistics: Tensor | None, mask: Tensor | None) -> None:
    name = "softmax_rows_backward"
    _check_matrix(name, "grad", grad)
    _check_matrix(name, "of", of)
    if of.shape != grad.shape:
        raise ValueError(f"{name}: of has shape {list(of.shape)}; accepted: that of grad, {list(grad.shape)}")
    _check_mask(name, mask, grad)
    if statistics is not None:
        check_tensor(name, "statistics", statistics, (torch.float32,))
        if statistics.shape != (2, grad.shape[0]):
            raise ValueError(
                f"{name}: statistics has shape {list(statistics.shape)}; accepted: {[2, grad.shape[0]]}, contiguous"
            )


def _check_matrix(name: str, argument: str, t: Tensor) -> None:
    check_tensor(name, argument, t, KERNEL_DTYPES)
    if t.ndim != 2 or t.shape[1] == 0 or not t.is_contiguous():
        raise ValueError(f"{name}: {argument} has shape {list(t.shape)}; accepted: contiguous [rows, columns]")


def _check_mask(name: str, mask: Tensor | None, like: Tensor) -> None:
    if mask is None:
        return
    check_tensor(name, "mask", mask, (torch.bool,))
    if mask.ndim != 4 or mask.shape[3] != like.shape[1] or mask.numel() != like.numel():
        raise ValueError(f"{name}: mask has shape {list(mask.shape)}; accepted: [a, b, c, {like.shape[1]}]")


def _forward(
    x: Tensor, mask: Tensor | None = None, *, log: bool = False, safe: bool = False, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    check_forward(x, mask, out_dtype)
    v = x.float()
    if mask is not None:
        v = v.masked_fill(~mask.reshape(v.shape), -torch.inf)
    largest = v.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(1, keepdim=True)
    base = torch.where(largest == -torch.inf, 0.0, largest)
    e = (v - base).exp()
    total = e.sum(1, keepdim=True)
    nothing = 0.0 if safe else torch.nan
    inverse = torch.where(total == 0, nothing, 1 / total)
    y = v - base - torch.where(total == 0, nothing, total.log()) if log else e * inverse
    statistics = torch.stack((base[:, 0], inverse[:, 0])) if log else x.new_empty((2, 0), dtype=torch.float32)
    return y.to(out_dtype), statistics


def _backward(
    grad: Tensor,
    of: Tensor,
    statistics: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    out_dtype: torch.dtype,
) -> Tensor:
    check_backward(grad, of, statistics, mask)
    g, y = grad.float(), of.float()
    if statistics is None:
        result = y * (g - (g * y).sum(1, keepdim=True))
    else:
        base, inverse = statistics[:, :, None]
        result = g - (y - base).exp() * inverse * g.sum(1, keepdim=True)
    if mask is not None:
        result = torch.where(mask.reshape(result.shape), result, 0.0)
    return result.to(out_dtype)


def _problems(device: str) -> Iterator[tuple[Tensor, Tensor | None, Tensor, torch.dtype]]:
    """x, mask, gradient, dtype of the result."""
    normal = partial(draw := Normal(device), scale=2.0)
    for i, dtype in enumerate(KERNEL_DTYPES):
        other = KERNEL_DTYPES[i - 1]
        yield normal(5, 40, dtype=dtype), None, normal(5, 40, dtype=other), other
        if i != 1:
            mask = torch.rand(2, 1, 3, 1100, generator=draw.generator).to(device) < 0.7
            mask[..., 0] = True
            yield normal(12, 1100, dtype=dtype), mask.expand(2, 2, 3, 1100), normal(12, 1100, dtype=dtype), dtype
            continue
        mask = torch.rand(3, 1, 1, 7, generator=draw.generator).to(device) < 0.5
        mask[1] = False
        yield normal(9, 7, dtype=dtype), mask.expand(3, 1, 3, 7), normal(9, 7, dtype=dtype), dtype
    yield normal(0, 4, dtype=torch.float32), None, normal(0, 4, dtype=torch.float32), torch.float32


def _forward_samples(device: str) -> Iterator[Sample]:
    for x, mask, _, out_dtype in _problems(device):
        yield (x, mask), {"log": x.shape[0] == 12, "safe": True, "out_dtype": out_dtype}
        yield (x,), {"log": x.shape[0] != 12, "out_dtype": out_dtype}


def _backward_samples(device: str) -> Iterator[Sample]:
    for x, mask, grad, out_dtype in _problems(device):
        yield (grad, _forward(x, mask, out_dtype=x.dtype)[0], None, mask), {"out_dtype": out_dtype}
        statistics = _forward(x, mask, safe=True, log=True, out_dtype=x.dtype)[1]
        yield (grad, x, statistics, mask), {"out_dtype": out_dtype}


forward_op = define(
    "softmax_rows(Tensor x, Tensor? mask=None, *, bool log=False, bool safe=False, ScalarType out_dtype) "
    "-> (Tensor, Tensor)",
    _forward,
    samples=_forward_samples,
)
#: From ``grad`` and ``y``, or, with the ``statistics`` that log-softmax returned, from ``grad`` and ``x``.
backward_op = define(
    "softmax_rows_backward(Tensor grad, Tensor of, Tensor? statistics=None, Tensor? mask=None, *, ScalarType out_dtype) "
    "-> Tensor",
    _backward,
    samples=_backward_samples,
)
