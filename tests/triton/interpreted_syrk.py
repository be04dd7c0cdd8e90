"""The Triton kernels of syrk and unit_matrices in the interpreter; run by test_interpreted.py."""

import math

import pytest
import torch

from amp_kernels._dispatch.library import REGISTRY
from amp_kernels._raw.syrk import mirrored
from amp_kernels._triton import syrk as module
from amp_kernels._triton.unit_matrices import unit_matrices
from amp_kernels.testing.backends import check_backend
from amp_kernels.testing.generators import HALF_DTYPES, integers


@pytest.mark.parametrize("name", ["syrk", "unit_matrices"])
def test_samples(name):
    assert check_backend(REGISTRY[name], "triton", "cpu")


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("n", [1, 16, 31, 33, 64, 70, 100])
def test_triangles(monkeypatch, dtype, n):
    """Odd and even numbers of rows of tiles; operands differ, and c is NaN above the diagonal."""
    monkeypatch.setattr(module, "BLOCK", 16)
    monkeypatch.setattr(module, "BLOCK_K", 16)
    generator = torch.Generator().manual_seed(n)
    for layout in ("row", "padded_column"):
        a = integers(2, n, 24, limit=2, dtype=dtype, generator=generator, layout=layout)
        b = integers(2, n, 24, limit=2, dtype=dtype, generator=generator)
        c = integers(2, n, n, limit=3, dtype=dtype, generator=generator, layout=layout)
        expected = a.double() @ b.double().mT * 0.5 - 2 * c.double() + 3 * torch.eye(n).double()
        c = torch.where(torch.ones(n, n).tril() > 0, c, math.nan)
        assert torch.equal(module.syrk(a, b, c, alpha=0.5, beta=-2.0, diagonal=3.0).double(), mirrored(expected))


def test_rows_longer_than_a_block_and_zero_norms():
    x = torch.randn(2, 3, 2500, generator=torch.Generator().manual_seed(0))
    x[1] = 0
    with torch.no_grad():
        expected = REGISTRY["unit_matrices"].reference(x, eps=1e-7, dtype=torch.float16)
    assert torch.equal(unit_matrices(x, eps=1e-7, dtype=torch.float16), expected)
