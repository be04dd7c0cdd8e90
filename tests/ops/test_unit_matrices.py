"""unit_matrices: exact where the norm is a power of two, one matrix's result whatever its neighbours, strides and scales."""

import math

import pytest
import torch

import amp_kernels as ak
from amp_kernels._dispatch import load
from amp_kernels._raw.unit_matrices import op

from ..helpers.generators import HALF_DTYPES, normal

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out", HALF_DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (4, 16), (64, 1), (2, 32), (1, 256), (16, 4), (512, 2)])
def test_exact(device, dtype, out, rows, columns):
    """Elements of +-s have the norm s 2^k; the padding is zeros."""
    sign = torch.where(normal(3, rows, columns) < 0, -1.0, 1.0)
    scales = torch.tensor([1.0, 4.0, 2.0**-9])[:, None, None]
    got = op((scales * sign).to(device, dtype), eps=0.0, dtype=out)
    assert got.dtype == out
    assert got.shape == (3, -(-rows // 8) * 8, -(-columns // 8) * 8)
    expected = torch.zeros(got.shape, dtype=torch.float64)
    expected[:, :rows, :columns] = sign.double() / math.sqrt(rows * columns)
    assert torch.equal(got.cpu().double(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(37, 70), (9, 1301)])
def test_within_a_rounding_of_float64(device, dtype, rows, columns):
    x = normal(4, rows, columns).to(device, dtype)
    wide = x.cpu().double()
    expected = wide / wide.square().sum((1, 2), keepdim=True).sqrt()
    got = op(x, eps=1e-7, dtype=torch.float16).cpu().double()[:, :rows, :columns]
    assert ((got - expected).abs() <= 2.0**-11 * expected.abs() * (1 + 1e-3) + 2.0**-25).all()
    for view in (x.mT.contiguous().mT, torch.stack([x, x], -1)[..., 0], x.repeat(1, 2, 1)[:, rows:]):
        assert torch.equal(op(view, eps=1e-7, dtype=torch.float16).cpu().double()[:, :rows, :columns], got)
    assert torch.equal(op(x[2:3], eps=1e-7, dtype=torch.float16).cpu().double()[0, :rows, :columns], got[2])


def test_extreme_scales_and_eps(device):
    x = normal(1, 20, 30).to(device)
    expected = op(x, eps=0.0, dtype=torch.float16)
    for power in (-90, -40, 60, 120):
        assert torch.equal(op(x * 2.0**power, eps=0.0, dtype=torch.float16), expected)
    assert not op(x * 0, eps=1e-7, dtype=torch.float16).any()
    assert torch.equal(op(x, eps=2.0**20, dtype=torch.bfloat16), op(x * 4, eps=2.0**22, dtype=torch.bfloat16))


def test_nan_and_inf(device):
    x = torch.stack([normal(9, 12)] * 3).to(device)
    x[1, 3, 4], x[2, 0, 0] = math.nan, math.inf
    got = op(x, eps=1e-7, dtype=torch.float16)
    assert not got[0].isnan().any()
    assert got[1, :9, :12].isnan().all()
    assert not got[1, 9:].any()
    assert got[2, 0, 0].isnan()
    assert not got[2, 1:].any()


@pytest.mark.skipif("emulate" in load.absent() or "cpu" in load.absent(), reason="one of the two is not built")
def test_emulated_kernels_have_the_cpus_bits():
    for shape in ((2, 300, 33), (1, 3, 5000), (3, 70, 64)):
        for dtype in DTYPES:
            x = normal(*shape).to(dtype)
            expected = op(x, eps=1e-7, dtype=torch.bfloat16)
            with ak.backend("emulate"):
                assert torch.equal(op(x, eps=1e-7, dtype=torch.bfloat16), expected)
