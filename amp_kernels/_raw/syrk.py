"""Symmetric products of 16-bit matrices, of which only the lower triangle is computed.

``syrk`` is ``S = alpha * (a @ b^T) + beta * c + diagonal * I``; the upper triangle is the mirror image of the lower one, to the bit. That
equals the product if ``a @ b^T`` is symmetric: for ``b = a``, or for two polynomials of one symmetric matrix, as in a Newton-Schulz
iteration. Numerics are those of ``gemm``: fp32 sums and epilogue, one rounding.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .._checks.lists import HALF_DTYPES, within_float32
from .._checks.operands import check_tensor
from .._dispatch.library import Sample, define
from .._dispatch.samples import Normal
from ._product import check_operands, product32


def check_syrk(op: str, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None) -> None:
    """Everything that ``syrk`` asks of its arguments."""
    check_operands(op, a, b.mT if b.ndim > 1 else b)
    if a.shape != b.shape:
        raise ValueError(f"{op}: a has shape {list(a.shape)} and b {list(b.shape)}; accepted: the same shape for both")
    if c is not None:
        check_symmetric_addend(op, a, c)


def check_symmetric_addend(op: str, a: torch.Tensor, c: torch.Tensor) -> None:
    check_tensor(op, "c", c, (a.dtype,))
    shape = [*a.shape[:-1], a.shape[-2]]
    if list(c.shape) != shape:
        raise ValueError(f"{op}: c has shape {list(c.shape)}; accepted: {shape}, the shape of a @ a^T")


def mirrored(s: torch.Tensor) -> torch.Tensor:
    """The symmetric matrices with the lower triangles of ``s``."""
    lower = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril()
    return torch.where(lower, s, s.mT)


def _reference(a, b, c=None, *, alpha=1.0, beta=1.0, diagonal=0.0):
    alpha, beta, diagonal = map(within_float32, (alpha, beta, diagonal))
    s = alpha * product32(a, b.mT, False)
    if c is not None and beta != 0:
        s = torch.add(s, c.float(), alpha=beta)
    if diagonal != 0:
        s = s + torch.full(s.shape[-1:], diagonal, device=s.device).diag()  # not diagonal * eye, where inf * 0 is NaN
    return mirrored(s).to(a.dtype)


def samples(device: str) -> Iterator[Sample]:
    normal = Normal(device)
    for dtype in HALF_DTYPES:
        a, c = normal(2, 9, 16, dtype=dtype), normal(2, 9, 9, dtype=dtype)
        yield (a, a), {}
        yield (a[0], a[0], c[0]), {"alpha": -0.5, "beta": 2.0, "diagonal": 3.0}
        yield (a, a, c.mT), {"alpha": 0.5, "diagonal": -1.0}
        tall = normal(24, 8, dtype=dtype).t()
        yield (tall, tall, torch.full((8, 8), torch.nan, device=device, dtype=dtype)), {"beta": 0.0}
        odd = normal(5, 7, dtype=dtype)
        yield (odd, odd), {}
        yield (odd[:, :0], odd[:, :0], normal(5, 5, dtype=dtype)), {"beta": 0.5}
        yield (a[:0], a[:0]), {}


op = define(
    "syrk(Tensor a, Tensor b, Tensor? c=None, *, float alpha=1.0, float beta=1.0, float diagonal=0.0) -> Tensor",
    _reference,
    samples=samples,
    check=lambda call: check_syrk("syrk", call.a, call.b, call.c),
    tensor_cores=True,
    # Half of a full product and the diagonal, as BLAS counts it.
    flop_count=lambda a_shape, b_shape, *args, **kwargs: _flops(a_shape),
)


def _flops(shape) -> int:
    n, k = shape[-2:]
    return (shape[0] if len(shape) == 3 else 1) * n * (n + 1) * k
