"""An fp32 master weight as the 16-bit weight the model uses and a 16-bit remainder: the format, in torch.

The weight is the master rounded half away from zero; the remainder holds, signed, the 16 mantissa bits that follow
those of the weight. For bfloat16 the two are the float32 code cut in half. For float16, which has 5 exponent bits, they
form a code with 26 mantissa bits: exact for ``2^-17 <= |x| < 65536``; smaller values are fixed-point numbers in units
of ``2^-40`` (error at most ``2^-41``). Ties are rounded away from zero because a tie rounded to an even weight below it
would need a remainder of +0x8000.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._dispatch.devices import host_memory

NEAREST8 = 0x80  # in place of random bits: to nearest, ties away from zero
_INF = {torch.bfloat16: 0x7F800000, torch.float16: 0x7C000000}


def wide_code(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """31-bit code of a non-negative float32, as int64: the upper 15 bits are those of ``dtype``, 16 mantissa bits
    follow."""
    bits = magnitude.view(torch.int32).long()
    if dtype == torch.bfloat16:
        return torch.where(bits > _INF[dtype], bits | 0x400000, bits)
    normal = (bits - (112 << 23)) << 3
    subnormal = (magnitude.clamp(max=2.0**-14) * 2.0**40).round().long()
    code = torch.where(magnitude < 2.0**-14, subnormal, normal)
    code = torch.where(magnitude < 65536.0, code, _INF[dtype])
    return torch.where(magnitude.isnan(), 0x7E000000, code)


def split_master(master: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split float32 values into weights of ``dtype`` (float16 or bfloat16) and int16 remainders."""
    code = wide_code(master.abs(), dtype)
    rounded = torch.where(master.isnan(), code, code + 0x8000) >> 16
    weight = rounded | (master.signbit().long() << 15)
    return weight.to(torch.int16).view(dtype), code.to(torch.int16)


def split_master24(master: Tensor, dtype: torch.dtype, random8: Tensor | int = NEAREST8) -> tuple[Tensor, Tensor]:
    """Split float32 values, rounded to 24 bits, into weights of ``dtype`` and int8 remainders. ``random8``: 8 bits an element, as
    int64; without them to nearest. Every NaN becomes the same."""
    code = (wide_code(master.abs(), dtype) + random8) & ~0xFF
    code = torch.where(master.isnan(), _INF[dtype] + (_INF[dtype] & -_INF[dtype]) // 2, code)
    weight = ((code + 0x8000) >> 16) | ((master.signbit() & ~master.isnan()).long() << 15)
    return weight.to(torch.int16).view(dtype), (code >> 8).to(torch.int8)


#: By the dtype of the remainder.
SPLITS = {torch.int16: split_master, torch.int8: split_master24}


def join_master(weight: Tensor, remainder: Tensor) -> Tensor:
    """The float32 masters of :func:`split_master` and :func:`split_master24`. A remainder of 0 gives the weight itself.

    A weight of zero never comes with a negative remainder, unless it was set to zero afterwards (a pruning mask): it is
    zero then.
    """
    if remainder.dtype == torch.int8:
        remainder = remainder.to(torch.int16) * 256
    upper = (weight.view(torch.int16).long() & 0x7FFF) << 16
    lower = torch.where(upper == 0, remainder.clamp(min=0), remainder).long()
    code = upper + torch.where(weight.isnan(), lower & 0xFFFF, lower)
    if weight.dtype == torch.bfloat16:
        bits = code
    else:
        subnormal = (code.clamp(max=1 << 26).float() * 2.0**-40).view(torch.int32).long()
        bits = torch.where(code < 1 << 26, subnormal, (code >> 3) + (112 << 23))
        bits = torch.where(code < _INF[torch.float16], bits, 0x7F800000)
        bits = torch.where(code > _INF[torch.float16], 0x7FC00000, bits)
    magnitude = bits.to(torch.int32).view(torch.float32)
    return torch.where(weight.signbit(), -magnitude, magnitude)


def join_on_host(weight: Tensor, remainder: Tensor) -> Tensor:
    """:func:`join_master` into host memory, by pieces, which bound the temporary tensors of row-major operands."""
    master = host_memory(weight.shape, torch.float32)
    for part, *operands in zip(
        *(value.reshape(-1).split(1 << 17) for value in (master, weight, remainder)), strict=True
    ):
        part.copy_(join_master(*operands))
    return master
