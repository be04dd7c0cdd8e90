"""8-bit optimizer moments in torch: the format of csrc/base/block8.h, which explains it.

Blocks of 32 elements in memory order, a code byte an element and an exponent byte a block. First moments have sign, 4 exponent and
3 mantissa bits; second moments, which are never negative, 5 exponent and 3 mantissa bits, and no positive one becomes 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._functional import pad

BLOCK = 32
NAN = 255  # the exponent of a block with an infinity, a NaN or a value above 1.875 * 2^127
NEAREST = 0x8000  # in place of random bits: to nearest, ties away from zero


class Code8(NamedTuple):
    """A format: ``top`` is the exponent of its largest binade, ``least`` the smallest exponent byte."""

    signed: bool
    top: int
    least: int

    @property
    def largest(self) -> int:
        return 0x7F if self.signed else 0xFF


FIRST = Code8(signed=True, top=15, least=32)
SECOND = Code8(signed=False, top=31, least=48)


def encode(x: Tensor, code: Code8, random16: Tensor | int = NEAREST) -> tuple[Tensor, Tensor]:
    """Flat float32 values as uint8 codes and exponents. The last block counts as if filled up with zeros. ``random16``: 16 bits
    an element of all blocks, as int64; without them to nearest."""
    bits = pad(x, (0, -x.numel() % BLOCK)).view(torch.int32).long()
    magnitude = bits & 0x7FFFFFFF
    largest = magnitude.view(-1, BLOCK).amax(1)
    exponent = ((largest + 0xFFFFF) >> 23).clamp(code.least, NAN)
    own, least = (magnitude >> 23).clamp(min=1), (exponent - code.top + 1).repeat_interleave(BLOCK)
    significand = (magnitude & 0x7FFFFF) | torch.where(magnitude < 0x800000, 0, 0x800000)
    fixed = significand >> (least - own).clamp(0, 31)
    wide = torch.where(own < least, fixed, magnitude - ((least - 1) << 23))
    codes = (wide + (random16 << 4)) >> 20
    if code.signed:
        codes |= (bits >> 24) & 0x80
    else:
        codes = torch.where((codes == 0) & (magnitude != 0), 1, codes)
    codes = torch.where(exponent.repeat_interleave(BLOCK) == NAN, 0, codes)
    return codes[: x.numel()].to(torch.uint8), exponent.to(torch.uint8)


def decode(codes: Tensor, exponents: Tensor, code: Code8) -> Tensor:
    """The float32 values of codes and exponents."""
    number, exponent = codes.long(), exponents.long().repeat_interleave(BLOCK)[: codes.numel()]
    magnitude = number & code.largest
    base = (exponent - code.top) << 23

    def of(bits: Tensor) -> Tensor:
        return bits.to(torch.int32).view(torch.float32)

    subnormal = of(base + ((magnitude + 8) << 20)) - of(base + (8 << 20))
    x = torch.where(magnitude < 8, subnormal, of(base + (magnitude << 20)))
    if code.signed:
        x = torch.where(number >= 0x80, -x, x)
    return torch.where(exponent == NAN, torch.nan, x)
