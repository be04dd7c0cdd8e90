"""The split master's format, in torch (what checkpoints and the references use): what it keeps, and its rounding."""

import pytest
import torch

from amp_kernels._raw._split_master import join_master, split_master

EDGES = (0x0000, 0x0001, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


def floats(lower):
    """Every upper half of a float32 code with the given lower half."""
    codes = (torch.arange(2**16) << 16) | lower
    return codes.to(torch.int32).view(torch.float32)


def bits(x):
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("lower", EDGES)
def test_bfloat16_keeps_every_bit(lower):
    x = floats(lower)
    weight, remainder = split_master(x, torch.bfloat16)
    back = join_master(weight, remainder)
    numbers = ~x.isnan()
    assert torch.equal(bits(back)[numbers], bits(x)[numbers])
    assert back[~numbers].isnan().all()
    assert weight[~numbers].isnan().all()
    # Rounded to nearest, ties away from zero: computed on the integers, whose order is that of the magnitudes.
    code = bits(x)[numbers].long() & 0x7FFFFFFF
    expected = (code + 0x8000) >> 16
    assert torch.equal(bits(weight)[numbers].long() & 0x7FFF, expected)
    assert torch.equal(weight.signbit()[numbers], x.signbit()[numbers])


@pytest.mark.parametrize("lower", EDGES)
def test_float16_is_exact_from_2_to_the_minus_17_on(lower):
    x = floats(lower)
    weight, remainder = split_master(x, torch.float16)
    back = join_master(weight, remainder)
    size = x.abs().double()
    exact = ((size >= 2.0**-17) & (size < 65536)) | (size == 0) | (size == torch.inf)
    assert torch.equal(bits(back)[exact], bits(x)[exact])
    small = size < 2.0**-17
    assert (back.double() - x.double())[small].abs().max() <= 2.0**-41
    assert (back[(size >= 65536)].abs() == torch.inf).all()
    assert back[x.isnan()].isnan().all()
    # The weight is the nearest float16; a tie goes to the larger magnitude, where round-to-even may take the smaller.
    finite = size < 65504
    nearest = x.half()
    gap = (weight.double() - x.double()).abs(), (nearest.double() - x.double()).abs()
    large = finite & (size >= 2.0**-17)
    assert torch.equal(gap[0][large], gap[1][large])
    tie = large & (weight != nearest)
    assert (weight[tie].abs() > nearest[tie].abs()).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_zero_remainder_is_the_weight_itself(dtype):
    weight = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    back = join_master(weight, torch.zeros(2**16, dtype=torch.int16))
    numbers = ~weight.isnan()
    assert torch.equal(back[numbers], weight[numbers].float())
    assert torch.equal(back.signbit()[numbers], weight.signbit()[numbers])
    assert back[~numbers].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_weight_that_was_set_to_zero_is_zero_whatever_its_remainder(dtype, zero):
    remainder = torch.arange(-0x8000, 0).to(torch.int16)
    back = join_master(torch.full(remainder.shape, zero, dtype=dtype), remainder)
    assert torch.equal(back.view(torch.int32), torch.full(remainder.shape, zero).view(torch.int32))
