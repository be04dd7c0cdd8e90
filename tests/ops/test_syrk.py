"""syrk: float64 within the bound of its arithmetic, symmetric to the bit, the lower triangle alone, any batch."""

import math

import pytest
import torch

import amp_kernels as ak
from amp_kernels._raw.syrk import mirrored
from amp_kernels._raw.syrk import op as syrk_op

from ..helpers.bounds import assert_within, reference_and_bound
from ..helpers.generators import HALF_DTYPES, integers, normal

SIZES = [(1, 1), (1, 40), (5, 7), (16, 17), (65, 33), (130, 70), (200, 8)]


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_within_the_bound_of_one_rounding(device, dtype, size):
    n, k = size
    for alpha, beta, batch in ((1.0, 0.0, ()), (-0.5, 2.0, (3,))):
        a, c = normal(*batch, n, k, dtype=dtype).to(device), normal(*batch, n, n, dtype=dtype, seed=1).to(device)
        out = ak.syrk(a, c, alpha=alpha, beta=beta)
        assert out.dtype == dtype
        assert out.is_contiguous()
        assert torch.equal(out, out.mT)
        given = mirrored(c)
        assert_within(out, *reference_and_bound(a, a.mT, alpha=alpha, beta=beta, c=given, out_dtype=dtype))


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("layout", ["row", "column", "padded", "padded_column"])
@pytest.mark.parametrize("n", [3, 64, 97, 150])
def test_the_lower_triangle_of_two_operands_defines_it(device, generator, dtype, layout, n):
    """Exact: small integers. The operands differ, so an element of the upper triangle would show."""
    a = integers(2, n, 24, limit=2, dtype=dtype, generator=generator, layout=layout).to(device)
    b = integers(2, n, 24, limit=2, dtype=dtype, generator=generator).to(device)
    c = integers(2, n, n, limit=3, dtype=dtype, generator=generator, layout=layout).to(device)
    expected = a.double() @ b.double().mT * 0.5 - 2 * c.double() + 3 * torch.eye(n, device=device).double()
    out = syrk_op(a, b, c, alpha=0.5, beta=-2.0, diagonal=3.0)
    assert torch.equal(out.double(), mirrored(expected))
    poisoned = torch.where(torch.ones(n, n, device=device).tril() > 0, c, math.nan)
    assert torch.equal(syrk_op(a, b, poisoned, alpha=0.5, beta=-2.0, diagonal=3.0), out)


def test_the_same_bits_alone_and_in_a_stack(device):
    for n, k in ((5, 7), (72, 40), (150, 300)):
        a, c = normal(4, n, k, dtype=torch.bfloat16).to(device), normal(4, n, n, dtype=torch.bfloat16).to(device)
        stack = ak.syrk(a, c, alpha=0.3, beta=0.7)
        for i in range(4):
            assert torch.equal(ak.syrk(a[i], c[i], alpha=0.3, beta=0.7), stack[i])
            assert torch.equal(ak.syrk(a[i : i + 1], c[i : i + 1], alpha=0.3, beta=0.7)[0], stack[i])


def test_nan_and_inf_spread_to_their_rows_and_columns(device):
    a = normal(20, 12, dtype=torch.float16).to(device)
    a[7, 3] = math.nan
    out = ak.syrk(a)
    assert out[7].isnan().all()
    assert out[:, 7].isnan().all()
    assert out.isnan().sum() == 39
    a[7, 3] = math.inf
    out = ak.syrk(a)
    assert out[7, 7] == math.inf
    assert not out[torch.arange(20) != 7][:, torch.arange(20) != 7].isnan().any()


def test_beta_zero_does_not_read_c(device):
    a = normal(9, 16, dtype=torch.bfloat16).to(device)
    assert torch.equal(ak.syrk(a, a.new_full((9, 9), math.nan)), ak.syrk(a))


def test_empty(device):
    a = torch.ones(3, 4, 0, dtype=torch.float16, device=device)
    c = normal(3, 4, 4, dtype=torch.float16).to(device)
    assert torch.equal(ak.syrk(a), torch.zeros_like(c))
    assert torch.equal(ak.syrk(a, c, beta=1.0), mirrored(c))
    assert ak.syrk(a[:0]).shape == (0, 4, 4)
    assert ak.syrk(a[:, :0]).shape == (3, 0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_dtypes_take_torchs_product(dtype):
    a, c = normal(2, 5, 7).to(dtype), normal(2, 5, 5).to(dtype)
    out = ak.syrk(a, c, alpha=2.0, beta=-1.0)
    assert out.dtype == dtype
    assert torch.equal(out, out.mT)
    torch.testing.assert_close(out, mirrored(2 * (a @ a.mT) - c))


def test_leading_dimensions_and_views():
    a = normal(2, 3, 5, 8, dtype=torch.bfloat16)
    assert torch.equal(ak.syrk(a), torch.stack([ak.syrk(part) for part in a]))
    assert ak.syrk(a[:, :, ::2, 1:]).shape == (2, 3, 3, 3)


def test_bad_input():
    a = torch.ones(3, 4, dtype=torch.float16)
    for arguments, message in [
        ((a[0],), "a has shape"),
        ((a, torch.ones(3, 4, dtype=torch.float16)), r"c has shape \[3, 4\]; accepted: \[3, 3\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            ak.syrk(*arguments)
    with pytest.raises(TypeError, match="c has dtype float32"):
        ak.syrk(a, torch.ones(3, 3))
    with pytest.raises(TypeError, match="a has dtype int32"):
        ak.syrk(torch.ones(3, 3, dtype=torch.int32))
    with pytest.raises(RuntimeError, match=r"b must have the shape of a, \(3, 4\); got \(2, 4\)"):
        syrk_op.overload(a, torch.ones(2, 4, dtype=torch.float16))
    with pytest.raises(RuntimeError, match="not differentiable"):
        ak.syrk(a.requires_grad_())
    with torch.no_grad():
        ak.syrk(a)
