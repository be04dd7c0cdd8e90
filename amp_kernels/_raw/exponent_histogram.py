"""Histograms of magnitudes by power of two, which show what a 16-bit format would keep of tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .. import _functional as F
from .._checks import lists
from .._dispatch.library import Sample, define

#: Column 0 counts zeros, column ``1 + i`` values with ``floor(log2|x|) == LEAST_EXPONENT + i``, then infinity, then NaN.
LEAST_EXPONENT = -149
INFINITY_BIN = 278
NAN_BIN = 279
BINS = 280


def _reference(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    counts, largest = [], []
    for tensor in tensors:
        magnitude = tensor.detach().float().abs().reshape(-1)
        finite = torch.where(magnitude < math.inf, magnitude, 0.0)
        _, exponent = torch.frexp(finite)  # finite = fraction * 2^exponent with fraction in [1/2, 1)
        bins = torch.where(finite == 0, 0, exponent - LEAST_EXPONENT)
        bins = torch.where(magnitude == math.inf, INFINITY_BIN, bins)
        bins = torch.where(magnitude.isnan(), NAN_BIN, bins).long()
        counts.append(
            torch.zeros(BINS, dtype=torch.int64, device=tensor.device).index_add(0, bins, torch.ones_like(bins))
        )
        largest.append(F.pad(finite, (0, 1)).amax())  # the largest of nothing is 0
    return torch.stack(counts), torch.stack(largest)


def samples(device: str) -> Iterator[Sample]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(37,), (3, 5), (), (0, 4), (1000,)]
    wide = [2.0 ** torch.randint(-40, 20, shape, generator=generator) for shape in shapes]
    mixed = [(x * torch.randn(x.shape, generator=generator)).to(device, dtype) for dtype in lists.FLOATS for x in wide]
    yield (mixed,), {}
    yield ([torch.full((20_000,), 2.0**-25, device=device), mixed[0].t()],), {}
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 2.0**-149, 3e38], device=device)
    yield ([special, special[:5].half(), special[3:].bfloat16()],), {}


op = define("exponent_histogram(Tensor[] tensors) -> (Tensor, Tensor)", _reference, samples=samples)


def exponent_histogram(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Count, for each tensor, how many values are in each power of two: one read, without a host sync.

    Args:
        tensors: non-empty list of dense tensors (any strides that cover their memory once), float16, bfloat16, float32
            or float64 (which is rounded to float32 first), mixed freely, any shapes including empty ones, one device.

    Returns:
        ``(counts, largest)`` on that device. ``counts``: int64 ``[len(tensors), 280]``; column 0 counts zeros, column
        ``1 + i`` values with ``floor(log2|x|) == -149 + i`` (float32's subnormals and normal numbers, -149 to 127),
        column 278 infinities, column 279 NaN. ``largest``: float32 ``[len(tensors)]``, the largest finite magnitude,
        0 where there is none.

    Raises:
        TypeError: a dtype is not accepted (integers and complex numbers are not).
        ValueError: the list is empty, or a tensor is sparse, not dense, or on another device.

    Examples:
        >>> counts, largest = ak.numerics.exponent_histogram([torch.tensor([0.0, 1.0, 1.5, -6.0, torch.inf])])
        >>> counts.nonzero()[:, 1].tolist(), largest.item()  # zero, 2^0 twice, 2^2, infinity
        ([0, 150, 152, 278], 6.0)
    """
    tensors = tensors if isinstance(tensors, Tensor) else list(tensors)
    lists.check_list("exponent_histogram", "tensors", tensors, lists.FLOATS)
    return op(tensors)
