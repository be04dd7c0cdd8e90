"""Sums over the rows of a matrix in an order that no split of the rows changes: the gradients of biases and norm weights within
:func:`amp_kernels.batch_invariant`. Raw.

``sums += grad.sum(0)``, or with ``x`` ``sums += (grad * (x - mean) * rstd).sum(0)``, the gradient of a norm's weight. A unit of 64
rows is added row by row from zero, and the units one after the other to ``sums``, all in fp32. So two calls over the rows before and
after a multiple of 64 give the bits of one call over all.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .._checks.lists import KERNEL_DTYPES
from .._checks.operands import check_tensor
from .._dispatch.library import Sample, define
from .._dispatch.samples import Normal
from ._norm import check_like

UNIT = 64  # rows


def check(call) -> None:
    op, grad = "unit_sums_", call.grad
    check_tensor(op, "grad", grad, KERNEL_DTYPES)
    if grad.ndim != 2 or not call.sums.is_contiguous():
        raise ValueError(f"{op}: grad has shape {list(grad.shape)}; accepted: [rows, columns], with contiguous sums")
    if (call.x is None) != (call.rstd is None) or (call.x is None and call.mean is not None):
        raise ValueError(f"{op}: x, rstd and mean go together; accepted: none, x and rstd, or all three")
    check_like(op, "sums", call.sums, grad.shape[1:], (torch.float32,))
    check_like(op, "x", call.x, grad.shape)
    check_like(op, "mean", call.mean, grad.shape[:1], (torch.float32,))
    check_like(op, "rstd", call.rstd, grad.shape[:1], (torch.float32,))


def _reference(call):
    if call.sums.is_meta:
        return
    values = call.grad.float()
    if call.x is not None:
        n = call.x.float() if call.mean is None else call.x.float() - call.mean[:, None]
        values = values * (n * call.rstd[:, None])
    rows, columns = values.shape
    whole = values[: rows // UNIT * UNIT].reshape(rows // UNIT, UNIT, columns)
    units = whole.new_zeros(whole.shape[0], columns)
    for row in whole.unbind(1):
        units += row
    rest = values.new_zeros(columns)
    for row in values[rows // UNIT * UNIT :]:
        rest += row
    total = torch.zeros_like(call.sums) if call.fresh else call.sums.clone()
    for unit in (*units, rest) if rows % UNIT else units:
        total += unit
    call.sums.copy_(total)


def samples(device: str) -> Iterator[Sample]:
    normal = Normal(device)
    for i, dtype in enumerate(KERNEL_DTYPES):
        for rows, columns in ((150, 40), (64, 7), (3, 300), (0, 4)):
            sums, grad = normal(columns, dtype=torch.float32), normal(rows, columns, dtype=dtype)
            x, of_rows = normal(rows, columns, dtype=KERNEL_DTYPES[i - 1]), normal(2, rows, dtype=torch.float32)
            yield (sums.clone(), grad), {"fresh": rows == 64}
            yield (sums.clone(), grad, x, None, of_rows[0]), {}
            yield (sums, grad.t().contiguous().t(), x, *of_rows), {"fresh": rows == 3}


op = define(
    "unit_sums_(Tensor(a!) sums, Tensor grad, Tensor? x=None, Tensor? mean=None, Tensor? rstd=None, *, bool fresh=False) -> ()",
    _reference,
    samples=samples,
    bound=True,
    check=check,
)
#: The op's arguments: ``sums`` fp32 [columns], contiguous; ``grad`` and ``x`` [rows, columns], fp16, bf16 or fp32 each, any
#: strides; ``mean`` and ``rstd`` fp32 [rows]. ``fresh`` overwrites ``sums`` without reading it.
