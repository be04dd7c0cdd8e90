"""The first pass of a Newton-Schulz iteration: matrices divided by their Frobenius norms, as 16-bit iterates.

Sums of squares are float64, in which no square of a narrower number overflows or vanishes, and each matrix is summed by
itself: its result does not depend on the others of the stack. A factor of 2^k on a matrix leaves its result as it is, to the
bit, above ``eps``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .._checks.lists import HALF_DTYPES, KERNEL_DTYPES
from .._checks.operands import check_out_dtype, check_tensor
from .._dispatch.library import Sample, define


def padded(size: int) -> int:
    """Rows of so many 16-bit elements begin at multiples of 16 bytes."""
    return (size + 7) // 8 * 8


def check(call) -> None:
    check_tensor("unit_matrices", "x", call.x, KERNEL_DTYPES)
    check_out_dtype("unit_matrices", call.dtype, HALF_DTYPES)
    if call.x.ndim != 3:
        raise ValueError(f"unit_matrices: x has shape {list(call.x.shape)}; accepted: [B, M, N]")


def _reference(x, *, eps, dtype):
    batch, rows, columns = x.shape
    out = x.new_zeros(batch, padded(rows), padded(columns), dtype=dtype)
    for i in range(batch):
        wide = x[i].double().contiguous()
        norm = wide.square().sum(1).sum().sqrt()
        out[i, :rows, :columns] = (wide * (1 / norm.clamp(min=eps))).float()
    return out


def samples(device: str) -> Iterator[Sample]:
    generator = torch.Generator().manual_seed(0)
    for dtype, out in zip(KERNEL_DTYPES, (*HALF_DTYPES, HALF_DTYPES[0]), strict=True):
        x = torch.randn(3, 9, 20, generator=generator).to(device, dtype)
        x[1] = 0
        yield (x,), {"eps": 1e-7, "dtype": out}
        yield (x.mT,), {"eps": 1e-7, "dtype": out}
        yield (x[:, ::2, 1:8],), {"eps": 30.0, "dtype": out}
        yield (x[:0],), {"eps": 0.0, "dtype": out}
    x = torch.tensor([[[1e30, -1e30]], [[1e-30, 2e-30]]], device=device)
    yield (x,), {"eps": 1e-38, "dtype": torch.float16}


op = define(
    "unit_matrices(Tensor x, *, float eps, ScalarType dtype) -> Tensor", _reference, samples=samples, check=check
)
