"""Products whose first operand is several matrices: the gradients of a linear layer whose output was split.

``segmented_gemm`` is ``gemm(cat(a, dim), b)`` to the bit, ``segmented_gemm_accumulate_`` the same of ``gemm_accumulate_``. On Hopper the
matrices are read in place, by a tensor map each, if there are two or three and each is contiguous along ``dim`` and begins at a
multiple of 64 of it; others are concatenated first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .._checks.lists import HALF_DTYPES, KERNEL_DTYPES
from .._checks.operands import check_out_dtype
from .._dispatch import policy
from .._dispatch.library import PLAIN, Sample, define
from .._dispatch.samples import Normal
from ._product import check_operands, product32
from .gemm import gemm_accumulate_op

MOST, STEP = 3, 64  # matrices that a kernel reads; each begins at a multiple of so many elements
_CAPABILITY = (9, 0)


def joined(a: Sequence[Tensor], dim: int) -> Tensor:
    """The concatenation, contiguous along ``dim``."""
    return torch.cat([t.t() for t in a], 1).t() if dim == 0 else torch.cat(list(a), 1)


def _check(op: str, a: Sequence[Tensor], b: Tensor, dim: int = 0, out_dtype: torch.dtype | None = None) -> None:
    if dim not in (0, 1):
        raise ValueError(f"{op}: dim is {dim}; accepted: 0 or 1")
    if not a:
        raise ValueError(f"{op}: a is empty; accepted: at least one matrix")
    for i, t in enumerate(a):
        if t.dtype != a[0].dtype:
            raise TypeError(f"{op}: a[{i}] is {t.dtype} and a[0] {a[0].dtype}; accepted: one dtype")
        if t.ndim != 2 or t.shape[1 - dim] != a[0].shape[1 - dim]:
            raise ValueError(
                f"{op}: a[{i}] has shape {list(t.shape)} and a[0] {list(a[0].shape)}; accepted: matrices with as many "
                f"{('columns', 'rows')[dim]}"
            )
    check_operands(op, joined(a, dim), b)
    check_out_dtype(op, out_dtype, KERNEL_DTYPES)


def reads(a: Sequence[Tensor]) -> bool:
    """True if products of these gradients, [rows, features] each, read them in place: otherwise one concatenation serves all
    products."""
    if not 2 <= len(a) <= MOST:
        return False
    for t in a:
        columns, pitch = t.shape[1], t.stride(0)
        if columns == 0 or columns % STEP or t.stride(1) != 1 or pitch < columns or pitch % 8:
            return False
        if type(t) in PLAIN and t.data_ptr() % 16:
            return False
    on = a[0]
    if on.is_cuda and not torch.cuda.is_available():
        return False
    backend = policy.select(op, on)
    return backend == "emulate" or (backend == "cuda" and policy.capability_of("cuda", on.device.index) == _CAPABILITY)


def _reference(call):
    return product32(joined(call.a, call.dim), call.b, False).to(call.out_dtype or call.b.dtype)


def _accumulate_reference(call):
    gemm_accumulate_op.reference(call.c, joined(call.a, 0), call.b, beta=float(not call.overwrite))


# ---- samples for opcheck and `info --check`


def _samples(device: str) -> Iterator[tuple[list[Tensor], Tensor, int]]:
    """``a, b, dim``: segments that are read in place, and others; the last of them may be short."""
    normal = Normal(device)
    for dtype in HALF_DTYPES:
        for sizes in ((64, 128), (128, 64, 64), (64, 64, 40), (64, 24, 64), (72,), (3, 0, 5), (64, 64, 64, 64)):
            gradients = [normal(24, size, dtype=dtype) for size in sizes]
            yield gradients, normal(sum(sizes), 16, dtype=dtype), 1
            yield [t.t() for t in gradients], normal(24, 16, dtype=dtype), 0
        apart = [normal(64, 10, dtype=dtype)[:, 1:9], normal(8, 64, dtype=dtype).t()]
        yield apart, normal(8, 16, dtype=dtype).t(), 1
        yield apart, normal(8, 16, dtype=dtype), 0
        yield [normal(0, 64, dtype=dtype), normal(0, 64, dtype=dtype)], normal(128, 4, dtype=dtype), 1
        yield [normal(64, 0, dtype=dtype), normal(64, 0, dtype=dtype)], normal(0, 4, dtype=dtype), 0


def samples(device: str) -> Iterator[Sample]:
    for i, (a, b, dim) in enumerate(_samples(device)):
        yield (a, b), {"dim": dim, "out_dtype": (None, *KERNEL_DTYPES)[i % 4]}


def accumulate_samples(device: str) -> Iterator[Sample]:
    for a, b, dim in _samples(device):
        if dim == 0:
            c = torch.ones(sum(t.shape[0] for t in a), b.shape[1], device=device)
            yield (c.clone(), a, b), {}
            yield (torch.full_like(c, torch.nan), a, b), {"overwrite": True}


# ---- ops


def _flops(b_shape, out_shape) -> int:
    return 2 * out_shape[0] * math.prod(b_shape)


op = define(
    "segmented_gemm(Tensor[] a, Tensor b, *, int dim, ScalarType? out_dtype=None) -> Tensor",
    _reference,
    bound=True,
    samples=samples,
    check=lambda call: _check("segmented_gemm", *call),
    tensor_cores=True,
    flop_count=lambda a_shapes, b_shape, out_shape, **kwargs: _flops(b_shape, out_shape),
)
#: ``c += cat(a) @ b`` in fp32, or with ``overwrite`` ``c = cat(a) @ b``.
accumulate_op = define(
    "segmented_gemm_accumulate_(Tensor(a!) c, Tensor[] a, Tensor b, *, bool overwrite=False) -> ()",
    _accumulate_reference,
    bound=True,
    samples=accumulate_samples,
    check=lambda call: _check("segmented_gemm_accumulate_", call.a, call.b),
    tensor_cores=True,
    flop_count=lambda c_shape, a_shapes, b_shape, *args, **kwargs: _flops(b_shape, c_shape),
)
