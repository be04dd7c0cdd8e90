"""Tensors surrounded by NaN, which reveal out-of-bounds reads in the result and out-of-bounds writes around it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch

from amp_kernels._dispatch import cpu_isa


def embed(
    tensor: torch.Tensor, *, transposed: bool = False, offset: int = 0, pad: int = 3, step: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy of ``tensor`` as a view into a larger buffer whose other elements are NaN.

    Args:
        tensor: two or more dimensions, a floating dtype.
        transposed: the last two dimensions are swapped in memory.
        offset: elements between the start of the (aligned) buffer and the view.
        pad: number of NaN elements after each row, and of NaN rows after each matrix: the leading dimension exceeds the row by
            ``pad``.
        step: stride inside a row, in elements.

    Returns:
        ``(view, buffer)``: the view has the values, shape and dtype of ``tensor``; ``buffer`` is its 1-D memory.
    """
    source = tensor.mT if transposed else tensor
    *batch, rows, columns = source.shape
    line = columns * step + pad
    matrix = (rows + pad) * line
    buffer = torch.full((offset + math.prod(batch) * matrix + pad,), math.nan, dtype=tensor.dtype, device=tensor.device)
    strides = [matrix * math.prod(batch[i + 1 :]) for i in range(len(batch))]
    view = buffer.as_strided(source.shape, (*strides, line, step), offset)
    view.copy_(source)
    return (view.mT if transposed else view), buffer


def assert_only_written(buffer: torch.Tensor, view: torch.Tensor) -> None:
    """Assert that ``view`` has no NaN and that the rest of the ``buffer`` of :func:`embed` is still NaN."""
    assert not view.isnan().any(), f"{int(view.isnan().sum())} elements of the result were not written"
    outside = torch.ones_like(buffer, dtype=torch.bool)
    outside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
    touched = outside & ~buffer.isnan()
    assert not touched.any(), f"memory outside the result was written, first at element {int(touched.nonzero()[0])}"


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Fill new torch memory with NaN inside the block, to reveal elements that a kernel does not write.

    torch does this only with deterministic algorithms. The CPU's instruction set does not change.
    """
    isa = cpu_isa.chosen()
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        with cpu_isa.cpu_isa(isa):
            yield
    finally:
        torch.use_deterministic_algorithms(was[0], warn_only=was[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled
