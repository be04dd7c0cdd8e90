"""Dropout whose mask nobody stores: ``out = dropout(x) + residual`` from a seed, from which backward makes the mask again.

The seed and the element's place decide whether it is dropped (csrc/dropout/formula.h): Philox4x32-10, four
elements a call, 24 bits each. So the mask is the same on every backend, and for any number of threads. The op is linear in
``x``, and its gradient is the op itself, without a residual. Raw; ``amp_kernels.dropout_add`` is the differentiable one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .._checks.lists import KERNEL_DTYPES
from .._checks.operands import check_same_device, check_tensor
from .._dispatch.library import Sample, define
from .._sharding.dtensor import is_dtensor
from ._norm import check_like, check_rate
from ._stochastic import philox4x32_10

GROUP = 4  # elements that share a call of the generator


def draw_seed(op: str, x: Tensor) -> Tensor:
    """64 bits from the default generator of the device of ``x``, without a host synchronisation: int64 ``[1]``, which a replayed
    CUDA graph draws new ones.

    Raises:
        TypeError: ``x`` is a DTensor, whose ranks would have to agree on what they hold alike.
    """
    if is_dtensor(x):
        raise TypeError(f"{op}: dropout of a DTensor; accepted: plain tensors, of which each rank draws its own mask")
    return torch.randint(2**63 - 1, (1,), device=x.device)


def rate(p: float) -> tuple[int, float]:
    """An element is dropped where its 24 bits are below the first; what is kept is multiplied by the second."""
    return math.floor(p * 2.0**24 + 0.5), 1.0 / (1.0 - p) if p < 1.0 else 0.0


def kept(seed: Tensor, numel: int, p: float) -> Tensor:
    """Which of ``numel`` elements are kept: bool ``[numel]``."""
    group = torch.arange(-(-numel // GROUP), device=seed.device)
    words = torch.stack(philox4x32_10((group & 0xFFFFFFFF, group >> 32, 0, 0), seed), dim=1)
    return words.reshape(-1)[:numel] >> 8 >= rate(p)[0]


def composed(x: Tensor, seed: Tensor, residual: Tensor | None, p: float, out_dtype: torch.dtype) -> Tensor:
    """The op in torch's own operations, in the widest dtype that comes and at least fp32."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = torch.where(kept(seed, x.numel(), p).view(x.shape), x.to(wide) * rate(p)[1], 0.0)
    return (y if residual is None else y + residual.to(wide)).to(out_dtype)


def check(x: Tensor, seed: Tensor, residual: Tensor | None, p: float, out_dtype: torch.dtype) -> None:
    check_tensor("dropout", "x", x, KERNEL_DTYPES)
    check_like("dropout", "residual", residual, x.shape)
    check_rate("dropout", "p", p)
    check_like("dropout", "seed", seed, (1,), (torch.int64,))
    check_same_device("dropout", x=x, seed=seed, residual=residual)
    if out_dtype not in KERNEL_DTYPES:
        raise TypeError(f"dropout: out_dtype is {out_dtype}; accepted: float16, bfloat16, float32")


def _reference(x, seed, residual=None, *, p, out_dtype):
    check(x, seed, residual, p, out_dtype)
    return composed(x, seed, residual, p, out_dtype).contiguous()


def samples(device: str) -> Iterator[Sample]:
    generator = torch.Generator().manual_seed(0)
    for i, (dtype, p) in enumerate(zip(KERNEL_DTYPES, (0.1, 0.5, 0.75), strict=True)):
        other = KERNEL_DTYPES[i - 1]
        seed = torch.tensor([(0x9E3779B97F4A7C15 * (i + 1)) % 2**63], device=device)
        x = torch.randn(3, 1031, generator=generator).to(device, dtype)
        residual = torch.randn(3, 1031, generator=generator).to(device, other)
        yield (x, seed, residual), {"p": p, "out_dtype": other}
    yield (x[:, :1026:2], seed), {"p": 0.3, "out_dtype": dtype}
    yield (x[:0], seed), {"p": 0.0, "out_dtype": torch.float16}


op = define(
    "dropout(Tensor x, Tensor seed, Tensor? residual=None, *, float p, ScalarType out_dtype) -> Tensor",
    _reference,
    samples=samples,
)
