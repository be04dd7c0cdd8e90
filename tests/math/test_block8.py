"""csrc/base/block8.h, the format of 8-bit moments, and its reference in torch: exact values, rounding and edges."""

import numpy as np
import pytest
import torch

from amp_kernels import _host
from amp_kernels._raw import _block8
from amp_kernels._raw._block8 import BLOCK, FIRST, NAN, NEAREST, SECOND, Code8

FORMATS = pytest.mark.parametrize("code", [FIRST, SECOND], ids=["first", "second"])


def value(code: Code8, number: int, exponent: int) -> float:
    """The value of a code by the definition of a small float, in float64."""
    magnitude = number & code.largest
    significand = magnitude if magnitude < 8 else (8 + magnitude % 8) << (magnitude // 8 - 1)
    sign = -1.0 if code.signed and number & 0x80 else 1.0
    return sign * significand * 2.0 ** (exponent - 127 - code.top - 2)


def encode(x: np.ndarray, code: Code8, random16: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
    """By C++, compared with the reference."""
    random16 = np.broadcast_to(np.asarray(random16, dtype=np.uint32), x.shape).copy()
    codes, exponents = _host.encode_block8(x, code.signed, random16)
    theirs = _block8.encode(torch.from_numpy(x), code, torch.from_numpy(random16.astype(np.int64)))
    assert np.array_equal(codes, theirs[0].numpy())
    assert np.array_equal(exponents, theirs[1].numpy())
    return codes, exponents


def decode(codes: np.ndarray, exponents: np.ndarray, code: Code8) -> np.ndarray:
    x = _host.decode_block8(codes, exponents, code.signed)
    theirs = _block8.decode(torch.from_numpy(codes), torch.from_numpy(exponents), code).numpy()
    assert np.array_equal(x, theirs, equal_nan=True)
    return x


def numbers(code: Code8, blocks: int, seed: int, spread: int = 40) -> np.ndarray:
    """Blocks of values over many binades, with zeros."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal(blocks * BLOCK) * 2.0 ** generator.integers(-spread, 1, blocks * BLOCK)
    x = np.repeat(2.0 ** generator.integers(-60, 60, blocks), BLOCK) * x
    x[generator.random(x.size) < 0.05] = 0
    return (x if code.signed else np.abs(x)).astype(np.float32)


@FORMATS
def test_every_code_of_every_exponent_has_its_value(code):
    exponents = np.arange(code.least, 255, dtype=np.uint8)
    codes = np.arange(256, dtype=np.uint8)
    x = decode(np.tile(codes, exponents.size), np.repeat(exponents, 256 // BLOCK), code).reshape(exponents.size, 256)
    for row, exponent in zip(x, exponents.tolist(), strict=True):
        assert row.tolist() == [value(code, number, exponent) for number in range(256)]
    assert np.isnan(decode(codes, np.full(8, NAN, dtype=np.uint8), code)).all()


@FORMATS
def test_values_of_the_format_keep_their_value_whatever_the_random_bits(code):
    generator = np.random.default_rng(0)
    codes = generator.integers(0, 256, 4096 * BLOCK, dtype=np.uint8)
    exponents = generator.integers(code.least + code.top, 255, 4096, dtype=np.uint8)
    x = decode(codes, exponents, code)
    for random16 in (0, 0xFFFF, NEAREST):
        assert np.array_equal(decode(*encode(x, code, random16), code), x)


@FORMATS
def test_a_rounded_value_is_one_of_its_two_neighbours(code):
    x = numbers(code, 2000, 1)
    down, up = (decode(*encode(x, code, random16), code) for random16 in (0, 0xFFFF))
    nearest = decode(*encode(x, code, NEAREST), code)
    exponents = np.repeat(encode(x, code, 0)[1].astype(np.int64), BLOCK)
    unit = 2.0 ** (exponents - 127.0 - code.top - 2)
    step = np.maximum(2.0 ** np.floor(np.log2(np.maximum(np.abs(x.astype(np.float64)), 1e-300))) / 8, unit)
    magnitude = np.abs(x.astype(np.float64))
    if code.signed:
        assert np.all(np.abs(down) <= magnitude)
        assert np.all(np.abs(nearest - x) <= step / 2)
        assert np.all(np.signbit(nearest) == np.signbit(x))
    else:
        tiny = magnitude < unit  # and becomes the least code instead of 0
        assert np.all(down[~tiny] <= magnitude[~tiny])
        assert np.all(down[tiny & (x > 0)] == unit[tiny & (x > 0)])
        assert np.all(np.abs(nearest - x)[~tiny] <= step[~tiny] / 2)
    assert np.all(np.abs(up) < magnitude + step + (magnitude == 0))
    assert np.all(np.abs(up) >= magnitude * (1 - 2.0**-16) - unit * 2.0**-16)


@FORMATS
@pytest.mark.parametrize("x", [1.0625, 0.7654321, 3.3e-2, 2.0**-15 * 1.3, 2.0**-17 * 1.7])
def test_rounding_is_unbiased(code, x):
    """The mean over all 2^16 random numbers is the value, but for what is cut off below them."""
    random16 = np.arange(1 << 16, dtype=np.uint32)
    values = np.full((1 << 16, BLOCK), np.float32(x))
    values[:, 0] = 1.9  # the largest of its block: an exponent above, as 1.9 is beyond 1.875
    codes, exponents = encode(values.reshape(-1), code, np.repeat(random16, BLOCK))
    assert set(exponents.tolist()) == {128}
    mean = decode(codes, exponents, code).reshape(-1, BLOCK)[:, 1:].astype(np.float64).mean()
    unit = 2.0 ** (1 - code.top - 2)
    step = max(2.0 ** np.floor(np.log2(x)) / 8, unit)
    assert abs(mean - np.float32(x)) <= step * 2.0**-16


@FORMATS
def test_only_the_exponent_is_shared(code):
    x = numbers(code, 3, 2).reshape(3, BLOCK)
    x[:, 0] = 1.5 * np.abs(x).max(1)  # the largest of its block
    before = encode(x.reshape(-1), code, NEAREST)
    x[1, 5:] /= 3
    after = encode(x.reshape(-1), code, NEAREST)
    assert np.array_equal(before[1], after[1])
    assert np.array_equal(
        np.delete(before[0], np.s_[BLOCK + 5 : 2 * BLOCK]), np.delete(after[0], np.s_[BLOCK + 5 : 2 * BLOCK])
    )


@FORMATS
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_block_that_is_not_finite_decodes_to_nan_and_its_neighbours_do_not(code, bad):
    x = numbers(code, 3, 3)
    x[BLOCK + 7] = bad
    codes, exponents = encode(x, code, 0xFFFF)
    assert exponents.tolist()[1] == NAN
    assert np.isnan(decode(codes, exponents, code).reshape(3, BLOCK)).all(1).tolist() == [False, True, False]


@FORMATS
def test_the_ends_of_float32(code):
    """Zeros stay, and blocks of tiny numbers have the least exponent. Beyond the largest code a block is not finite."""
    largest = 1.875 * 2.0**127
    for x, exponent in ((0.0, code.least), (largest, 254), (1e-45, code.least), (2.0**-126, code.least)):
        codes, exponents = encode(np.full(BLOCK, x, dtype=np.float32), code, 0xFFFF)
        assert set(exponents.tolist()) == {exponent}
        back = decode(codes, exponents, code)
        assert np.all(np.isfinite(back))
        assert np.all((back > 0) == (x > 0)) or code.signed
        assert np.all(back == x) or x < 2.0**-100
    _, exponents = encode(np.full(BLOCK, np.nextafter(np.float32(largest), np.float32(np.inf))), code, 0)
    assert exponents.tolist() == [NAN]


def test_a_positive_second_moment_never_becomes_zero():
    x = np.float32(2.0) ** -np.arange(BLOCK * 4, dtype=np.float32)[:126]
    x = np.concatenate([x, np.zeros(2, dtype=np.float32)]).reshape(4, BLOCK).T.reshape(-1).copy()
    codes, _ = encode(x, SECOND, 0)
    assert np.array_equal(codes > 0, x > 0)
