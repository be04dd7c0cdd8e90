"""Inputs of ops: shapes, layouts, dtypes and values, for tests."""

from __future__ import annotations

from collections.abc import Callable

import torch

from amp_kernels._checks.lists import HALF_DTYPES as HALF_DTYPES
from amp_kernels._dispatch.samples import Normal

from .poison import embed

#: Sizes around the edges of tiles and vectors, including 0 and 1.
EDGE_SIZES = (0, 1, 7, 8, 9, 63, 64, 65)

OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

#: Integers up to this magnitude are exact in the dtype.
EXACT_INTEGERS = {torch.float16: 2048, torch.bfloat16: 256, torch.float32: 2**24}


def _expanded(tensor: torch.Tensor) -> torch.Tensor:
    """Repeat the first matrix of a batch, or the first row of a matrix, with stride 0."""
    return tensor[:1].expand_as(tensor) if tensor.shape[0] else tensor


#: Memory layouts: functions of a contiguous tensor. All except ``expanded`` keep the values.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "row": lambda t: t,
    "column": lambda t: t.mT.contiguous().mT,
    "padded": lambda t: embed(t, pad=5)[0],
    "padded_column": lambda t: embed(t, transposed=True, pad=5)[0],
    "offset": lambda t: embed(t, offset=1, pad=0)[0],
    "strided": lambda t: embed(t, step=2)[0],
    "expanded": _expanded,
}


def normal(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    grad: bool = False,
    scale: float = 1.0,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Normally distributed numbers of standard deviation ``scale``, which depend on shape and seed alone."""
    return Normal(device, seed=seed)(*shape, dtype=dtype, scale=scale, grad=grad)


def operand(
    *shape: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
    layout: str = "row",
    scale: float = 1.0,
) -> torch.Tensor:
    """A matrix or batch of matrices of normally distributed numbers, in a layout of :data:`LAYOUTS`.

    Args:
        shape: two or more sizes.
        dtype: a floating dtype.
        generator: a CPU generator; the numbers do not depend on ``device``.
        scale: standard deviation.
    """
    values = scale * torch.randn(shape, generator=generator)
    return LAYOUTS[layout](values.to(device, dtype))


def integers(
    *shape: int,
    limit: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
    layout: str = "row",
) -> torch.Tensor:
    """Integers in ``[-limit, limit]``. For ``limit_a limit_b K`` up to :data:`EXACT_INTEGERS`, every sum of products is exact."""
    values = torch.randint(-limit, limit + 1, shape, generator=generator)
    return LAYOUTS[layout](values.to(device, dtype))
