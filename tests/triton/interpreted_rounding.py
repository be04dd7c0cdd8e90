"""Stochastic rounding and split masters in Triton, in the interpreter, against the formulas bit for bit; run by test_interpreted.py."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from amp_kernels import _host
from amp_kernels._triton._rounding import round_stochastic, rounding_bits
from amp_kernels._triton._split_master import join_master, split_master
from amp_kernels._triton._tables import ELEMENTS

from ..ops.update_rules import BF16, F16, F32, NAMES


@triton.jit
def _round(x, out, seed: tl.int64, step, index, HALF: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0) * BLOCK
    at = first + tl.arange(0, BLOCK)
    random16 = rounding_bits(seed, step, index, first, BLOCK)
    tl.store(out + at, round_stochastic(tl.load(x + at), random16, HALF))


@triton.jit
def _draw(out, first, seed: tl.int64, step, index, N: tl.constexpr):
    tl.store(out + tl.arange(0, N), rounding_bits(seed, step, index, first, N).to(tl.int32))


def test_random_bits_of_elements_beyond_32_bits():
    out = torch.empty(16, dtype=torch.int32)
    group = 5 * 2**32 + 11
    _draw[(1,)](out, 8 * group, 2**50 + 3, 4, 9, N=16)
    words = [word for g in (group, group + 1) for word in _host.philox4x32_10([g % 2**32, g >> 32, 9, 4], 2**50 + 3)]
    assert out.tolist() == [half for word in words for half in (word & 0xFFFF, word >> 16)]


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_stochastic_rounding_is_the_package_s(dtype):
    """Every upper half of an fp32 code, subnormal and non-finite ones too."""
    lower = torch.randint(0, 2**16, (2**16,), generator=torch.Generator().manual_seed(1))
    x = ((torch.arange(2**16) << 16) | lower).to(torch.int32).view(F32)
    out = torch.empty(2**16, dtype=torch.int16)
    _round[(4,)](x, out, 2**40 + 5, 3, 7, HALF=ELEMENTS[dtype], BLOCK=2**14)
    wanted = _host.round_stochastic(x.numpy(), NAMES[dtype], 2**40 + 5, 3, 7)
    assert np.array_equal(out.numpy().view(np.uint16), wanted)


@triton.jit
def _split_and_join(x, weight, remainder, joined, HALF: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    upper, lower = split_master(tl.load(x + at), HALF)
    tl.store(weight + at, upper)
    tl.store(remainder + at, lower)
    tl.store(joined + at, join_master(upper, lower, HALF))


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_split_masters_have_the_format_of_the_package(dtype):
    """Every upper half of an fp32 code with lower halves around the ties, random and all ones; NaN bits too."""
    random = torch.randint(0, 2**16, (2**16,), generator=torch.Generator().manual_seed(0))
    codes = torch.stack(
        [(torch.arange(2**16) << 16) | lower for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, random)]
    )
    x = codes.flatten().to(torch.int32).view(F32)
    weight, remainder = (torch.empty(x.numel(), dtype=torch.int16) for _ in range(2))
    joined = torch.empty_like(x)
    _split_and_join[(x.numel() // 2**16,)](x, weight, remainder, joined, HALF=ELEMENTS[dtype], BLOCK=2**16)
    wanted_weight, wanted_remainder = _host.split_master(x.numpy(), NAMES[dtype])
    assert np.array_equal(weight.numpy().view(np.uint16), wanted_weight)
    assert np.array_equal(remainder.numpy(), wanted_remainder)
    wanted = _host.join_master(wanted_weight, wanted_remainder, NAMES[dtype])
    assert np.array_equal(joined.numpy().view(np.uint32), wanted.view(np.uint32))


@triton.jit
def _join(weight, remainder, joined, HALF: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(joined + at, join_master(tl.load(weight + at), tl.load(remainder + at), HALF))


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_split_weight_that_was_set_to_zero_is_zero(dtype, zero):
    remainder = torch.arange(-0x8000, 0).to(torch.int16)
    joined, wanted = torch.empty(2**15), torch.full((2**15,), zero)
    weight = torch.full((2**15,), zero, dtype=dtype).view(torch.int16)
    _join[(1,)](weight, remainder, joined, HALF=ELEMENTS[dtype], BLOCK=2**15)
    assert torch.equal(joined.view(torch.int32), wanted.view(torch.int32))
