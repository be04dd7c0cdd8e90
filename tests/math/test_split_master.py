"""csrc/base/split_master.h: what the 16-bit weight and the 16-bit remainder keep of an fp32 master."""

import numpy as np
import pytest
import torch

from amp_kernels import _host
from amp_kernels._raw._split_master import join_master, split_master, split_master24

DTYPES = ("float16", "bfloat16")


def floats(*codes: int) -> np.ndarray:
    return np.array(codes, dtype=np.uint32).view(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_fp32_codes(dtype):
    assert _host.check_split_master(dtype) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_is_the_master_rounded_half_away(dtype):
    x = np.arange(0, 1 << 32, 4099, dtype=np.uint64).astype(np.uint32).view(np.float32)
    x = x[~np.isnan(x)]
    weight, _ = _host.split_master(x, dtype)
    assert np.array_equal(weight, _host.round_half_away(x, dtype))
    nearest = _host.to_float(_host.round_to(x, dtype), dtype)
    visible = _host.to_float(weight, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        as_near = np.abs(visible.astype(np.float64) - x) == np.abs(nearest.astype(np.float64) - x)
    small = (np.abs(x) < 2.0**-17) & (dtype == "float16")  # there the master is rounded to a multiple of 2^-40 first
    assert np.all((as_near | ~np.isfinite(nearest))[~small])


def test_a_tie_goes_away_from_zero():
    """With ties to even this master came back one unit of bf16 too low: a remainder of +0x8000 does not fit."""
    weight, remainder = _host.split_master(floats(0x3F808000, 0xBF808000, 0x3F818000), "bfloat16")
    assert weight.tolist() == [0x3F81, 0xBF81, 0x3F82]
    assert remainder.tolist() == [-0x8000] * 3
    weight, remainder = _host.split_master(np.array([1 + 2.0**-11, -1 - 2.0**-11], dtype=np.float32), "float16")
    assert weight.tolist() == [0x3C01, 0xBC01]
    assert remainder.tolist() == [-0x8000] * 2


def test_fp16_overflow_shows_in_the_weight():
    x = np.array([65504.0, 65519.996, 65520.0, 65535.996, 65536.0, 1e38, -65520.0], dtype=np.float32)
    weight, remainder = _host.split_master(x, "float16")
    assert np.isinf(_host.to_float(weight, "float16")).tolist() == [False, False, True, True, True, True, True]
    back = _host.join_master(weight, remainder, "float16")
    assert np.array_equal(back, np.where(np.abs(x) < 65536, x, np.inf).astype(np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_remainder_zero_is_the_weight_itself(dtype):
    """So a 16-bit model without an optimizer state yet has zero remainders."""
    codes = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    joined = _host.join_master(codes, np.zeros(1 << 16, dtype=np.int16), dtype)
    widened = _host.to_float(codes, dtype)
    assert np.array_equal(joined, widened, equal_nan=True)
    assert np.array_equal(np.signbit(joined), np.signbit(widened))


@pytest.mark.parametrize("dtype", DTYPES)
def test_torchs_form_has_the_same_bits(dtype):
    """That of the references and checkpoints: all upper halves of fp32 codes, and all weights, with these lower halves."""
    lower = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    x = ((np.arange(1 << 16, dtype=np.uint32) << 16)[:, None] | lower).reshape(-1).view(np.float32)
    weight, remainder = split_master(torch.from_numpy(x), getattr(torch, dtype))
    wanted = _host.split_master(x, dtype)
    numbers = ~np.isnan(x)
    assert np.array_equal(weight.view(torch.uint16).numpy()[numbers], wanted[0][numbers])
    assert np.array_equal(remainder.numpy()[numbers], wanted[1][numbers])
    assert weight.isnan().numpy()[~numbers].all()
    assert join_master(weight, remainder).isnan().numpy()[~numbers].all()
    weights = np.repeat(np.arange(1 << 16, dtype=np.uint16), lower.size)
    remainders = np.tile(lower.astype(np.uint16).view(np.int16), 1 << 16)
    back = join_master(torch.from_numpy(weights).view(getattr(torch, dtype)), torch.from_numpy(remainders)).numpy()
    joined = _host.join_master(weights, remainders, dtype)
    numbers = ~np.isnan(joined)
    assert np.array_equal(np.isnan(back), ~numbers)
    assert np.array_equal(back.view(np.uint32)[numbers], joined.view(np.uint32)[numbers])


def test_sizes_must_agree():
    with pytest.raises(ValueError, match="join_master: arrays of 2 and 3 elements"):
        _host.join_master(np.zeros(2, dtype=np.uint16), np.zeros(3, dtype=np.int16), "bfloat16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero", [0x0000, 0x8000])
def test_a_weight_that_was_set_to_zero_is_zero_whatever_its_remainder(dtype, zero):
    """A pruning mask leaves the remainder. Below the code of zero lie those of NaN."""
    remainder = np.arange(-0x8000, 0, dtype=np.int16)
    back = _host.join_master(np.full(remainder.shape, zero, dtype=np.uint16), remainder, dtype)
    assert np.all(back == 0)
    assert np.all(np.signbit(back) == bool(zero))


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_codes_of_24_bits_come_back_whatever_the_random_bits(dtype):
    """Every weight and remainder join to a number that splits into them. Not: a zero with a negative remainder, which is zero, a NaN,
    whose remainder may be any, and in fp16 an infinity with a remainder."""
    weight, remainder = np.meshgrid(np.arange(1 << 16), np.arange(-128, 128), indexing="ij")
    weight, remainder = weight.reshape(-1).astype(np.uint16), remainder.reshape(-1).astype(np.int8)
    x = _host.join_master(weight, remainder.astype(np.int16) * 256, dtype)
    visible = _host.to_float(weight, dtype)
    assert np.array_equal(np.isnan(x) & ~np.isnan(visible), (np.isinf(visible) & (remainder > 0)))
    plain = ~np.isnan(x) & ~((visible == 0) & (remainder < 0)) & ~(np.isinf(x) & (remainder != 0))
    if dtype == "float16":  # the fp32 value of a code below 2^-17 and above 65504 is rounded (csrc/base/rounding.h)
        plain &= np.abs(x) < 65536
    for random8 in (0, 0xFF):
        again = _host.split_master24(x, dtype, random8)
        assert np.array_equal(again[0][plain], weight[plain])
        assert np.array_equal(again[1][plain], remainder[plain])
    assert np.all(np.isnan(_host.to_float(_host.split_master24(x[np.isnan(x)], dtype, 0xFF)[0], dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_master_of_24_bits_is_unbiased_and_the_reference_agrees(dtype):
    torch_dtype = getattr(torch, dtype)
    x = np.array(
        [1 + 2.0**-17, -3.14159, 0.1, 1e-3, -6e-5, 2.0**-20, 1e-30, 0.0, np.inf, -np.inf, np.nan], dtype=np.float32
    )
    x = np.concatenate([x, floats(0x7FFFFFFF, 0xFFFFFFFF)])  # NaNs whose payload a carry would run through
    total = np.zeros(x.shape)
    for random8 in range(256):
        weight, remainder = _host.split_master24(x, dtype, random8)
        theirs = split_master24(torch.from_numpy(x), torch_dtype, random8)
        assert np.array_equal(weight, theirs[0].view(torch.int16).numpy().view(np.uint16))
        assert np.array_equal(remainder, theirs[1].numpy())
        total += _host.join_master(weight, remainder.astype(np.int16) * 256, dtype)
    mean, finite = total / 256, np.isfinite(x)
    kept = np.abs(x) * 2.0**-40 if dtype == "bfloat16" else np.maximum(np.abs(x) * 2.0**-30, 2.0**-41)
    assert np.all(np.abs(mean[finite] - x[finite]) <= kept[finite])
    assert np.array_equal(mean[~finite], x[~finite], equal_nan=True)
