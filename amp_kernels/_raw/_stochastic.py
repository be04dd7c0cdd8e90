"""Stochastic rounding from a counter-based random number generator: the reference, in torch integers.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) maps a counter and a key to four
random words. The key is the seed; the counter says what the bits are for: elements ``8 q .. 8 q + 7`` (in memory order)
of a parameter at a step. So an element is rounded alike whoever computes it: any backend, number of threads, rank, or run
resumed from a checkpoint.

The counter is ``(q mod 2^32, q / 2^32, parameter, step)``. Each half of a word is for one element: 16 bits, the lower 8 of them
for a weight of 24 bits. The 8-bit codes of moment number ``k`` have the same words in another order, word ``w`` in place
of word ``w xor (1 + k)``. So all values of an element have independent bits, from one call of the generator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._split_master import wide_code

_WORD = 0xFFFFFFFF
Word = Tensor | int  # 32 bits, as a non-negative int64


def _product(constant: int, x: Word) -> tuple[Word, Word]:
    """The high and the low word of a product of 32-bit numbers, which int64 alone does not hold."""
    low, high = constant * (x & 0xFFFF), constant * (x >> 16)
    return (high + (low >> 16)) >> 16, (low + ((high & 0xFFFF) << 16)) & _WORD


def philox4x32_10(counter: tuple[Word, Word, Word, Word], key: Word) -> tuple[Word, Word, Word, Word]:
    """Four random words for a counter of four words and a 64-bit key, any of which may be tensors."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & _WORD, (key >> 32) & _WORD
    for _ in range(10):
        (high0, low0), (high1, low1) = _product(0xD2511F53, c0), _product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def rounding_bits(
    seed: int, step: Tensor, index: int, numel: int, value: int = 0, width: int = 0, pitch: int = 0
) -> Tensor:
    """16 random bits, as int64, for each of ``numel`` elements of a parameter at ``step``.

    ``index``: the parameter's number, below 2^32, plus 2^32 times the block of 32 elements of the whole parameter with which
    this piece of it begins. ``value``: 0 is the weight, ``1 + k`` moment ``k``. ``width``, ``pitch``: of a piece within rows, the
    elements of its rows and of those of the whole parameter, multiples of 32.
    """
    group = torch.arange(-(-numel // 8), device=step.device)
    if width:
        group += group // (width // 8) * ((pitch - width) // 8)
    group += (index >> 32) * 4
    counter = (group & _WORD, group >> 32, index & _WORD, step.long())
    drawn = philox4x32_10(counter, seed)
    words = torch.stack([drawn[w ^ value] for w in range(4)], dim=1)
    return torch.stack((words & 0xFFFF, words >> 16), dim=2).reshape(-1)[:numel]


def round_stochastic(x: Tensor, dtype: torch.dtype, random16: Tensor) -> Tensor:
    """float32 values to float16 or bfloat16, away from zero with a probability equal to the fraction that is cut off.

    Unbiased: exactly for bfloat16 and for float16 from 2^-17 on, to within 2^-41 below. Infinities and NaN stay.
    """
    code = (wide_code(x.abs(), dtype) + random16) >> 16
    code = torch.where(x.isnan(), 0x7FFF, code | (x.signbit().long() << 15))
    return code.to(torch.int16).view(dtype)
