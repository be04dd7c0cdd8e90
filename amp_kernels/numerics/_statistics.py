"""Statistics from the rows of :func:`amp_kernels.numerics.exponent_histogram`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._checks import lists
from .._raw.exponent_histogram import INFINITY_BIN, LEAST_EXPONENT, NAN_BIN
from .._sharding.local import local

#: FP16 rounds values below 2^-25 to zero; its smallest subnormal is 2^-24, its smallest normal number 2^-14.
FLUSHED_BELOW, SUBNORMAL_BELOW = -25, -14
FP16_MAX = 65504.0


@dataclass(frozen=True)
class Statistics:
    """Summary of one tensor from its histogram."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    nan: int
    inf: int
    zeros: int
    values: int
    largest: float

    @staticmethod
    def of(row: Sequence[int], largest: float, shape: tuple[int, ...], dtype: torch.dtype) -> Statistics:
        return Statistics(shape, dtype, row[NAN_BIN], row[INFINITY_BIN], row[0], sum(row), largest)

    @property
    def finite(self) -> bool:
        return self.nan == self.inf == 0

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        bad = f"{self.nan} NaN, {self.inf} inf of {self.values}" if not self.finite else "finite"
        return f"{name}{list(self.shape)}: {bad}, largest finite magnitude {self.largest:.4g}"


def flushed_share(counts: Tensor, scale: float) -> float:
    """The share of the finite nonzero values that FP16 rounds to zero after multiplication by ``scale``.

    Args:
        counts: int64 ``[280]``.
        scale: above 0; rounded to the nearest power of two.
    """
    numbers = counts[1:INFINITY_BIN].tolist()
    lost = FLUSHED_BELOW - LEAST_EXPONENT - round(math.log2(scale))  # the first so many bins
    total = sum(numbers)
    return sum(numbers[: max(lost, 0)]) / total if total else 0.0


def shifted(counts: Tensor, exponent: Tensor) -> Tensor:
    """The counts of the values times ``2 ** exponent``, an integer tensor on the device, without a host sync.

    Bins outside the range are added to its ends.
    """
    places = torch.arange(1, INFINITY_BIN, device=counts.device) + exponent
    moved = torch.zeros_like(counts)
    moved.index_add_(-1, places.clamp(1, INFINITY_BIN - 1), counts[..., 1:INFINITY_BIN])
    for column in (0, INFINITY_BIN, NAN_BIN):
        moved[..., column] = counts[..., column]
    return moved


def values_of(tensor: Tensor) -> Tensor:
    """This rank's values of a tensor, in a form that the list ops accept: dense, in a supported dtype; of a sparse tensor its
    values."""
    values = local(tensor.detach())
    values = values.coalesce()._values() if values.is_sparse else values
    values = values if values.dtype in lists.FLOATS else values.float()  # 8-bit formats
    return values if lists.is_dense(values) else values.contiguous()
