"""csrc/base/half.h against torch's own conversions: every 16-bit code, every rounding boundary between two of them."""

import numpy as np
import pytest
import torch

from amp_kernels import _host

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
CODES = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


def decoded(dtype: str) -> np.ndarray:
    return torch.from_numpy(CODES.view(np.int16)).view(DTYPES[dtype]).float().numpy()


def encoded(x: np.ndarray, dtype: str) -> np.ndarray:
    return torch.from_numpy(x).to(DTYPES[dtype]).view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_widens_exactly(dtype):
    expected, actual = decoded(dtype), _host.to_float(CODES, dtype)
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(actual), nan)
    assert np.array_equal(actual.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])  # bits: the sign of zero counts


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_survives_a_round_trip(dtype):
    back = _host.round_to(decoded(dtype), dtype)
    nan = np.isnan(decoded(dtype))
    assert np.array_equal(back[~nan], CODES[~nan])
    assert np.all(back[nan] == 0x7FFF)  # quiet, and the one code that cvt.rn writes


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounds_to_nearest_even_at_every_boundary(dtype):
    """For each pair of neighbours: the tie and the fp32 values just below and above it; also beyond the largest."""
    values = decoded(dtype)
    finite = np.unique(np.abs(values[np.isfinite(values)]))
    top = finite[-1].astype(np.float64)
    neighbours = np.append(finite.astype(np.float64), 2 * top - finite[-2])  # the value that would follow the largest
    ties = ((neighbours[1:] + neighbours[:-1]) / 2).astype(np.float32)
    inf = np.float32(np.inf)
    cases = np.concatenate([ties, np.nextafter(ties, -inf), np.nextafter(ties, inf), finite.astype(np.float32)])
    cases = np.concatenate([cases, -cases, np.array([np.inf, -np.inf], dtype=np.float32)])
    assert np.array_equal(_host.round_to(cases, dtype), encoded(cases, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounds_like_torch_everywhere(dtype):
    """Every 997th of all fp32 codes, so that all exponents and both subnormal ranges occur."""
    x = np.arange(0, 1 << 32, 997, dtype=np.uint64).astype(np.uint32).view(np.float32)
    x = x[~np.isnan(x)]
    assert np.array_equal(_host.round_to(x, dtype), encoded(x, dtype))


def test_unknown_dtype_is_named():
    with pytest.raises(ValueError, match="dtype is 'float8'; accepted: float16, bfloat16"):
        _host.round_to(np.zeros(1, dtype=np.float32), "float8")
