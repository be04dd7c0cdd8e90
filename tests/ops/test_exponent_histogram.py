"""exponent_histogram against numpy, and the meaning of its columns."""

import numpy as np
import pytest
import torch

from amp_kernels._raw.exponent_histogram import BINS, INFINITY_BIN, LEAST_EXPONENT, NAN_BIN, exponent_histogram

pytestmark = pytest.mark.usefixtures("compiled")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def by_numpy(tensor):
    """Counts and largest finite magnitude, from the values in double."""
    values = np.abs(tensor.float().double().numpy().ravel())
    counts = np.zeros(BINS, np.int64)
    finite = values[np.isfinite(values) & (values > 0)]
    exponents, n = np.unique(np.floor(np.log2(finite)).astype(int), return_counts=True)
    counts[1 + exponents - LEAST_EXPONENT] = n
    counts[0], counts[INFINITY_BIN], counts[NAN_BIN] = (
        (values == 0).sum(),
        np.isinf(values).sum(),
        np.isnan(values).sum(),
    )
    return counts, finite.max(initial=0.0)


def check(*tensors):
    counts, largest = exponent_histogram(tensors)
    assert counts.dtype == torch.int64
    assert counts.shape == (len(tensors), BINS)
    assert largest.dtype == torch.float32
    for row, most, tensor in zip(counts, largest, tensors, strict=True):
        expected, expected_largest = by_numpy(tensor)
        np.testing.assert_array_equal(row.numpy(), expected)
        assert most.item() == expected_largest


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_value_of_a_half(dtype):
    check(torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 1023, 1025, 16384, 16385, 40_001])
def test_sizes(dtype, n):
    exponents = torch.randint(-160, 128, (n,), generator=torch.Generator().manual_seed(n))
    check(torch.ones(3, dtype=dtype), (2.0**exponents * 1.3).to(dtype))


def test_edges_of_bins():
    """A power of two opens a bin; the number below it closes the one before, subnormal or not."""
    powers = 2.0 ** torch.arange(-149, 128).double()
    below = torch.nextafter(powers.float(), torch.zeros(()))
    check(powers.float(), below, -powers.float())
    counts, _ = exponent_histogram([powers.float()])
    assert counts[0, 1:278].tolist() == [1] * 277


def test_float64_is_rounded_first():
    counts, largest = exponent_histogram([torch.tensor([1e-300, 1e300, 1.0, 2.0**-150], dtype=torch.float64)])
    assert counts[0].nonzero().flatten().tolist() == [0, 150, INFINITY_BIN]
    assert counts[0, 0] == 2  # 2^-150 lies half way between 0 and the smallest subnormal: to even
    assert largest.item() == 1.0


def test_any_order_of_dimensions():
    x = torch.randn(2, 3, 4, 5)
    check(x.permute(3, 1, 0, 2), x.to(memory_format=torch.channels_last), x[0, 0].t())


def test_a_list_longer_than_a_launch():
    """Of every dtype, alignment and some size, a few empty."""
    values = 2.0 ** torch.randint(-40, 20, (1100,), generator=torch.Generator().manual_seed(0))
    check(*(values[i % 17 : i % 17 + i * 37 % 1009 % 90].to(DTYPES[i % 4])[i % 3 :] for i in range(1290)))


def test_threads_do_not_change_it(same_bits_for):
    tensors = [torch.randn(300_000), torch.randn(70_000).bfloat16()]
    same_bits_for((1, 2), lambda: exponent_histogram(tensors))
