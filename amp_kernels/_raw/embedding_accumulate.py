"""Rows of gradients added to the rows of a table that they belong to: the backward of ``embedding``. Raw.

``out[r] += sum of grad[order[i]] over the i with sorted[i] == r``, summed in fp32 and rounded once: no sum stands still
where 16 bits end. Equal indices are adjacent, so the sums need no atomics and have the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._checks.lists import KERNEL_DTYPES
from .._checks.operands import check_tensor
from .._dispatch.library import Sample, define
from ._norm import check_like


def check(call) -> None:
    op, out, grad = "embedding_accumulate_", call.out, call.grad
    if call.in_order and (out.dtype != torch.float32 or call.scale_by_frequency):
        raise ValueError(f"{op}: in_order takes a float32 out and no scale_by_frequency; out has dtype {out.dtype}")
    check_tensor(op, "out", out, KERNEL_DTYPES)
    if out.ndim != 2 or grad.ndim != 2:
        raise ValueError(f"{op}: out has shape {list(out.shape)} and grad {list(grad.shape)}; accepted: two matrices")
    check_like(op, "grad", grad, (grad.shape[0], out.shape[1]))
    for name in ("sorted", "order"):
        check_like(op, name, getattr(call, name), grad.shape[:1], (torch.int64,))
    for name in ("out", "grad", "sorted", "order"):
        if not getattr(call, name).is_contiguous():
            raise ValueError(f"{op}: {name} has strides {list(getattr(call, name).stride())}; accepted: contiguous")


def _reference(
    out: Tensor,
    grad: Tensor,
    sorted: Tensor,
    order: Tensor,
    *,
    padding_idx: int = -1,
    scale_by_frequency: bool = False,
    in_order: bool = False,
) -> None:
    if out.is_meta:  # nothing is returned, so there is nothing to compute
        return
    if in_order:
        for row, at in zip(sorted.tolist(), order.tolist(), strict=True):
            if 0 <= row < out.shape[0] and row != padding_idx:
                out[row] += grad[at].float()
        return
    rows = out.shape[0]
    counted = (sorted >= 0) & (sorted < rows) & (sorted != padding_idx)
    index = torch.where(counted, sorted, 0)
    each = torch.where(counted[:, None], grad[order].float(), 0.0)
    total = torch.zeros_like(out, dtype=torch.float32).index_add_(0, index, each)
    count = torch.zeros(rows, device=out.device).index_add_(0, index, counted.float())
    if scale_by_frequency:
        total = total / count.clamp_min(1)[:, None]
    out.copy_(torch.where((count > 0)[:, None], out.float() + total, out))


def samples(device: str) -> Iterator[Sample]:
    generator = torch.Generator().manual_seed(0)

    def call(rows: int, columns: int, entries: int, dtype: torch.dtype, grad: torch.dtype, **options) -> Sample:
        index = torch.randint(rows, (entries,), generator=generator)
        index[::3] = rows // 2
        ordered, order = index.sort(stable=True)
        values = [torch.randn(n, columns, generator=generator) for n in (rows, entries)]
        out, grad = (v.to(device, d) for v, d in zip(values, (dtype, grad), strict=True))
        return (out, grad, ordered.to(device), order.to(device)), options

    for i, dtype in enumerate(KERNEL_DTYPES):
        yield call(11, 24, 70, dtype, KERNEL_DTYPES[i - 1], padding_idx=3)
        yield call(5, 7, 40, dtype, dtype, scale_by_frequency=True)
    yield call(9, 264, 33, torch.float32, torch.bfloat16)
    yield call(4, 8, 0, torch.float32, torch.float32)
    for i, dtype in enumerate(KERNEL_DTYPES):
        yield call(5, (7, 24)[i % 2], 70, torch.float32, dtype, padding_idx=1, in_order=True)


op = define(
    "embedding_accumulate_(Tensor(a!) out, Tensor grad, Tensor sorted, Tensor order, *, int padding_idx=-1, "
    "bool scale_by_frequency=False, bool in_order=False) -> ()",
    _reference,
    samples=samples,
    check=check,
)
#: The op's arguments: ``out`` [rows, D] and ``grad`` [N, D], fp16, bf16 or fp32 each, contiguous; ``sorted`` int64 [N],
#: ascending row numbers, and ``order`` int64 [N], whose they are: ``indices.sort(stable=True)``. Entries of
#: ``padding_idx`` count for nothing; ``scale_by_frequency`` divides a row's sum by the number of its entries. A row out
#: of range: an error on the CPU; nothing where that would cost a synchronisation. ``in_order`` adds entry after entry to an
#: fp32 ``out`` itself, so that calls for parts of the entries give the bits of one call for all.
