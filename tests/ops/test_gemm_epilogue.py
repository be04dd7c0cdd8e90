"""The epilogue of gemm beyond bias and activation: row bias, residual, alpha, beta, swiglu; and the
batch-invariant order of summation."""

import itertools
import math

import pytest
import torch

from amp_kernels._dispatch.policy import requested_backend

from ..helpers.bounds import assert_frobenius, assert_within, reference_and_bound
from ..helpers.generators import HALF_DTYPES, LAYOUTS, OUT_DTYPES, integers, operand
from ..helpers.poison import embed, poisoned_allocations
from .raw import gemm, gemm_accumulate_


def small(device, dtype, generator, *batch):
    """Integers whose every sum is exact even in bf16."""
    a = integers(*batch, 6, 16, limit=2, dtype=dtype, generator=generator, device=device)
    b = integers(*batch, 16, 10, limit=2, dtype=dtype, generator=generator, device=device)
    return a, b


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_bias_per_row_is_the_same_for_every_column_and_batch(device, generator, dtype, batch):
    a, b = small(device, dtype, generator, *batch)
    for bias_dtype in (dtype, torch.float32):
        bias = torch.arange(-3.0, 3.0, device=device).to(bias_dtype)[:, None]
        expected = a.double() @ b.double() + bias.double()
        assert torch.equal(gemm(a, b, bias).double(), expected)
        assert torch.equal(gemm(a, b, embed(bias, step=2)[0], activation="relu").double(), expected.relu())


def test_a_bias_of_one_column_and_one_row_is_told_apart_by_its_dimensions(device):
    a = torch.ones(2, 3, device=device, dtype=torch.float16)
    b = torch.ones(3, 2, device=device, dtype=torch.float16)
    bias = torch.tensor([1.0, 10.0], device=device)
    assert gemm(a, b, bias).tolist() == [[4, 13], [4, 13]]
    assert gemm(a, b, bias[:, None]).tolist() == [[4, 4], [13, 13]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("residual_dtype", ["own", "float32"])
def test_a_residual_of_any_layout_is_added_after_the_activation(device, generator, layout, residual_dtype):
    for dtype, batch in ((torch.float16, ()), (torch.bfloat16, (3,))):
        a, b = small(device, dtype, generator, *batch)
        residual = integers(*batch, 6, 10, limit=50, dtype=torch.float32, generator=generator, layout=layout)
        residual = residual.to(device) if residual_dtype == "float32" else residual.to(device, dtype)
        z = a.double() @ b.double()
        expected = z.relu() - 2 * residual.double()
        assert torch.equal(
            gemm(a, b, None, residual, beta=-2.0, activation="relu", out_dtype=torch.float32).double(), expected
        )
        out, preact = gemm(
            a, b, None, residual, beta=-2.0, alpha=0.5, activation="relu", out_dtype=torch.float32, preact=True
        )
        assert torch.equal(out.double(), 0.5 * z.relu() - 2 * residual.double())
        assert torch.equal(preact.double(), 0.5 * z)


def test_the_public_functions_broadcast_the_residual(device, generator):
    a, b = small(device, torch.float16, generator, 3)
    for shape in ((), (10,), (6, 1), (3, 1, 1), (1, 6, 10)):
        residual = integers(*shape, 1, limit=9, dtype=torch.float32, generator=generator, device=device)[..., 0]
        expected = a.double() @ b.double() + residual.double()
        assert torch.equal(gemm(a, b, None, residual).double(), expected)
        assert torch.equal(gemm(a, b, None, residual, activation="none", preact=True)[0].double(), expected)


def test_beta_zero_does_not_read_the_residual(device, generator):
    a, b = small(device, torch.bfloat16, generator)
    nan = torch.full((6, 10), math.nan, device=device)
    assert torch.equal(gemm(a, b, None, nan, beta=0.0), gemm(a, b))
    assert torch.equal(gemm(a, b, None, nan, beta=0.0, activation="none", preact=True)[0], gemm(a, b))
    assert gemm(a, b, None, nan, beta=1.0).isnan().all()


def test_alpha_scales_the_product_and_not_the_bias(device, generator):
    a, b = small(device, torch.float16, generator)
    bias = torch.arange(10.0, device=device)
    expected = -0.5 * (a.double() @ b.double()) + bias
    out, z = gemm(a, b, bias, alpha=-0.5, activation="relu", out_dtype=torch.float32, preact=True)
    assert torch.equal(z.double(), expected)
    assert torch.equal(out.double(), expected.relu())


# ---- swiglu


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
def test_swiglu_is_within_the_bound(device, generator, dtype, out_dtype):
    """1050 columns of the result do not fit one tile of the CPU kernel; those of the emulator are narrower, and it takes its time."""
    broad = 600 if requested_backend() == "emulate" else 2100
    for batch, columns in itertools.product(((), (2,)), (66, broad)):
        a = operand(*batch, 9, 70, dtype=dtype, generator=generator, device=device, scale=0.3)
        b = operand(*batch, 70, columns, dtype=dtype, generator=generator, device=device, scale=0.4, layout="column")
        bias = torch.randn(columns, generator=generator).to(device)
        residual = torch.randn(*batch, 9, columns // 2, generator=generator).to(device)
        reference, bound = reference_and_bound(
            a, b, bias, activation="swiglu", out_dtype=out_dtype, beta=0.5, c=residual
        )
        with poisoned_allocations():
            out = gemm(a, b, bias, residual, beta=0.5, activation="swiglu", out_dtype=out_dtype)
            again, z = gemm(a, b, bias, residual, beta=0.5, activation="swiglu", out_dtype=out_dtype, preact=True)
        assert out.shape == (*batch, 9, columns // 2)
        assert out.is_contiguous()
        assert_within(out, reference, bound)
        assert_frobenius(out, reference, 70)
        assert torch.equal(again, out)
        assert_within(z, *reference_and_bound(a, b, bias, out_dtype=out_dtype))


def test_the_gates_are_the_first_half(device):
    """silu of a gate of -300 is zero, whatever the value; the other way round it would not be."""
    a = torch.ones(1, 1, device=device, dtype=torch.bfloat16)
    b = torch.tensor([[-300.0, 200.0, 5.0, 0.5]], device=device, dtype=torch.bfloat16)
    assert gemm(a, b, activation="swiglu", out_dtype=torch.float32).tolist() == [[0.0, 100.0]]


# ---- batch invariance


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize(("k", "n"), [(1, 1), (65, 40), (1000, 33), (333, 80)])
def test_a_row_does_not_depend_on_its_neighbours(device, generator, dtype, k, n):
    a = operand(130, k, dtype=dtype, generator=generator, device=device)
    b = operand(k, n, dtype=dtype, generator=generator, device=device, layout="column", scale=k**-0.5)
    whole = gemm(a, b, out_dtype=torch.float32, batch_invariant=True)
    assert_within(whole, *reference_and_bound(a, b, out_dtype=torch.float32))
    for first, rows in ((0, 1), (129, 1), (3, 2), (64, 63), (1, 129), (5, 17)):
        part = a[first : first + rows]
        assert torch.equal(gemm(part, b, out_dtype=torch.float32, batch_invariant=True), whole[first : first + rows])
        c = torch.empty(rows, n, device=device)
        assert torch.equal(gemm_accumulate_(c, part, b, beta=0, batch_invariant=True), whole[first : first + rows])
    batches = a.view(13, 10, k)
    batched = gemm(batches, b.expand(13, k, n), out_dtype=torch.float32, batch_invariant=True)
    assert torch.equal(batched.view(130, n), whole)
    assert torch.equal(gemm(embed(a, pad=3, offset=1)[0], b, out_dtype=torch.float32, batch_invariant=True), whole)
