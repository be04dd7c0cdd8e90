"""csrc/base/philox.h against the published vectors, and csrc/base/rounding.h: stochastic rounding is unbiased."""

import math

import numpy as np
import pytest

from amp_kernels import _host

DTYPES = ("float16", "bfloat16")


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # known answers of the Random123 distribution (kat_vectors, philox4x32, 10 rounds)
        ([0] * 4, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, 0xFFFFFFFFFFFFFFFF, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0A4093822,  # key words 0xa4093822, 0x299f31d0
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    assert list(_host.philox4x32_10(counter, key)) == expected


def neighbours(x: float, dtype: str) -> tuple[float, float]:
    """The two 16-bit values that enclose a positive x."""
    codes = np.arange(0x7C00 if dtype == "float16" else 0x7F80, dtype=np.uint16)
    values = _host.to_float(codes, dtype)
    above = int(np.searchsorted(values, np.float32(x), side="right"))
    return float(values[above - 1]), float(values[above])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "x", [1.0 + 2.0**-13, 1.0 + 7 * 2.0**-20, 1000.123, 3.1e-3, -0.7654321, 6.0e-5, 1.23e-6, -3.0e-8, 1.9e-7]
)
def test_unbiased_by_a_binomial_test(dtype, x):
    """The number of roundings away from zero is binomial, p = fraction of the gap. Below 6.1e-5 fp16 is subnormal."""
    n = 1 << 20
    x32 = np.float32(x)
    low, high = neighbours(abs(float(x32)), dtype)
    p = (abs(float(x32)) - low) / (high - low)
    rounded = _host.to_float(_host.round_stochastic(np.full(n, x32), dtype, seed=2024, step=7, param=3), dtype)
    assert set(np.abs(rounded).tolist()) <= {low, high}
    assert np.all(np.signbit(rounded) == (x < 0))
    away = int((np.abs(rounded) == high).sum())
    assert abs(away - n * p) <= 4.5 * math.sqrt(n * p * (1 - p)) + 1e-9


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_values_are_never_changed(dtype):
    codes = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    values = _host.to_float(codes, dtype)
    nan = np.isnan(values)
    for seed in range(8):
        rounded = _host.round_stochastic(values, dtype, seed=seed, step=1, param=0)
        assert np.array_equal(rounded[~nan], codes[~nan])
        assert np.all(rounded[nan] == 0x7FFF)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_smallest_and_the_largest_fraction(dtype):
    """One unit of fp32 beside a 16-bit value almost always rounds to it: nothing is off by one."""
    n = 1 << 22
    just_above = np.nextafter(np.float32(1.5), np.float32(2))
    up = (
        _host.round_stochastic(np.full(n, just_above), dtype, 5, 1, 0)
        != _host.round_to(np.array([1.5], np.float32), dtype)
    ).sum()
    fraction = 2.0**-13 if dtype == "float16" else 2.0**-16
    assert abs(int(up) - n * fraction) <= 5 * math.sqrt(n * fraction)
    just_below = np.nextafter(np.float32(1.5), np.float32(1))
    down = (
        _host.round_stochastic(np.full(n, just_below), dtype, 5, 1, 0)
        != _host.round_to(np.array([1.5], np.float32), dtype)
    ).sum()
    assert abs(int(down) - n * fraction) <= 5 * math.sqrt(n * fraction)


@pytest.mark.parametrize("changed", [{"seed": 2}, {"seed": 1 + (1 << 32)}, {"step": 2}, {"param": 1}])
def test_every_part_of_the_key_counts(changed):
    x = np.full(4096, 1.0 + 2.0**-12, dtype=np.float32)
    key = {"seed": 1, "step": 1, "param": 0}
    assert np.array_equal(_host.round_stochastic(x, "float16", **key), _host.round_stochastic(x, "float16", **key))
    assert not np.array_equal(
        _host.round_stochastic(x, "float16", **key), _host.round_stochastic(x, "float16", **{**key, **changed})
    )


def test_elements_are_rounded_independently():
    """The eight numbers drawn from one philox call differ: no lane repeats another."""
    x = np.full(1 << 16, 1.0 + 2.0**-11, dtype=np.float32)  # half way in fp16
    up = (_host.round_stochastic(x, "float16", 9, 1, 0) == 0x3C01).reshape(-1, 8).astype(np.float64)
    correlation = np.corrcoef(up, rowvar=False) - np.eye(8)
    assert np.abs(correlation).max() < 5 / math.sqrt(len(up))


@pytest.mark.parametrize("dtype", DTYPES)
def test_half_away_from_zero(dtype):
    step = 2.0**-11 if dtype == "float16" else 2.0**-8  # half a unit at 1
    x = np.array([1 + step, -1 - step, 1 + 3 * step, np.inf, -np.inf, np.nan, 0.0, -0.0], dtype=np.float32)
    one = 0x3C00 if dtype == "float16" else 0x3F80
    inf = 0x7C00 if dtype == "float16" else 0x7F80
    expected = [one + 1, 0x8000 + one + 1, one + 2, inf, 0x8000 + inf, 0x7FFF, 0, 0x8000]
    assert _host.round_half_away(x, dtype).tolist() == expected
