"""gemm, gemm_accumulate_: exact where the result is representable, within the bound of the arithmetic
elsewhere."""

import itertools
import math

import pytest
import torch

from amp_kernels._checks.activations import ACTIVATIONS
from amp_kernels._dispatch import cpu_isa
from amp_kernels._dispatch.policy import requested_backend

from ..helpers.bounds import assert_frobenius, assert_unbiased, assert_within, reference_and_bound
from ..helpers.generators import EDGE_SIZES, EXACT_INTEGERS, HALF_DTYPES, LAYOUTS, OUT_DTYPES, integers, operand
from ..helpers.poison import assert_only_written, embed, poisoned_allocations
from .raw import gemm, gemm_accumulate_


@pytest.fixture(autouse=True)
def _one_thread(threads):
    """Small products on many threads mostly wait; the test that needs threads sets them."""
    threads(1)


# ---- within the bound


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_error_is_within_the_bound(device, generator, dtype, out_dtype, activation):
    a = operand(67, 300, dtype=dtype, generator=generator, device=device, scale=0.2)
    b = operand(300, 132, dtype=dtype, generator=generator, device=device, scale=0.3)
    for bias_dtype in (None, dtype, torch.float32):
        bias = None if bias_dtype is None else torch.randn(132, generator=generator).to(device, bias_dtype)
        out = gemm(a, b, bias, activation=activation, out_dtype=out_dtype)
        reference, bound = reference_and_bound(a, b, bias, activation=activation, out_dtype=out_dtype)
        assert out.dtype == out_dtype
        assert out.is_contiguous()
        assert_within(out, reference, bound)
        assert_frobenius(out, reference, 300)
        # Gelu and silu crowd at their minimum, where errors correlate.
        if out_dtype != torch.float32 and activation == "none":
            assert_unbiased(out, reference)


@pytest.mark.parametrize(("dtype", "k"), list(itertools.product(HALF_DTYPES, (1024, 16384))))
def test_error_of_long_sums(device, generator, dtype, k):
    a = operand(48, k, dtype=dtype, generator=generator, device=device)
    b = operand(k, 40, dtype=dtype, generator=generator, device=device, layout="column", scale=k**-0.5)
    for out_dtype in (dtype, torch.float32):
        out = gemm(a, b, out_dtype=out_dtype)
        reference, bound = reference_and_bound(a, b, out_dtype=out_dtype)
        assert_within(out, reference, bound)
        assert_frobenius(out, reference, k)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_rows_shared_by_threads(device, generator, threads, count):
    """Large enough that the epilogue is cut into pieces."""
    threads(count)
    a = operand(2, 201, 40, dtype=torch.bfloat16, generator=generator, device=device)
    b = operand(2, 40, 500, dtype=torch.bfloat16, generator=generator, device=device, scale=0.2)
    c = torch.ones(2, 201, 500, device=device)
    with poisoned_allocations():
        out = gemm(a, b, activation="silu")
        gemm_accumulate_(c, a, b)
    assert_within(out, *reference_and_bound(a, b, activation="silu", out_dtype=torch.bfloat16))
    ones = torch.ones_like(c)
    assert_within(c, *reference_and_bound(a, b, beta=1.0, c=ones, out_dtype=torch.float32))


def _bf16_partials(a, b):
    halves = (a[:, i : i + 512].float() @ b[i : i + 512].float() for i in range(0, 2048, 512))
    return sum(half.bfloat16() for half in halves)


def _truncated(a, b):
    return ((a.float() @ b.float()).view(torch.int32) & -65536).view(torch.float32).bfloat16()


@pytest.mark.parametrize("wrong", [_bf16_partials, _truncated])
def test_the_gates_reject_16_bit_partial_sums_and_truncation(generator, wrong):
    a = operand(64, 2048, dtype=torch.bfloat16, generator=generator)
    b = operand(2048, 64, dtype=torch.bfloat16, generator=generator)
    reference, _ = reference_and_bound(a, b, out_dtype=torch.bfloat16)
    with pytest.raises(AssertionError):
        assert_frobenius(wrong(a, b), reference, 2048)


def test_the_bound_rejects_a_wrong_element(generator):
    a, b = (operand(16, 16, dtype=torch.float16, generator=generator) for _ in range(2))
    reference, bound = reference_and_bound(a, b, out_dtype=torch.float16)
    for wrong in (reference[3, 5] + 0.01, math.inf, math.nan, -reference[3, 5]):
        out = reference.half()
        out[3, 5] = wrong
        with pytest.raises(AssertionError, match=r"1 of 256 elements .* at \[3, 5\]"):
            assert_within(out, reference, bound)


# ---- exact


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_integers_are_exact_at_every_edge_size(device, generator, dtype):
    """Every sum and product is an integer that even the 16-bit result holds, so nothing may be off."""
    triples = {
        triple for s, t in itertools.product(EDGE_SIZES, repeat=2) for triple in ((s, t, t), (t, s, t), (t, t, s))
    }
    with poisoned_allocations():
        for m, n, k in sorted(triples):
            limit = 1 if dtype == torch.bfloat16 else 4
            a = integers(m, k, limit=limit, dtype=dtype, generator=generator, device=device)
            b = integers(n, k, limit=limit, dtype=dtype, generator=generator, device=device).t()
            bias = integers(1, n, limit=limit, dtype=dtype, generator=generator, device=device)[0]
            assert limit * limit * k + limit <= EXACT_INTEGERS[dtype]
            expected = a.double() @ b.double()
            assert torch.equal(gemm(a, b).double(), expected), (m, n, k)
            out, z = gemm(a, b, bias, activation="relu", out_dtype=torch.float32, preact=True)
            assert torch.equal(z.double(), expected + bias), (m, n, k)
            assert torch.equal(out.double(), (expected + bias).relu()), (m, n, k)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("layout_a", ["row", "column"])
@pytest.mark.parametrize("layout_b", ["row", "column"])
def test_a_permutation_moves_every_code_unchanged(device, generator, dtype, layout_a, layout_b):
    """Each finite 16-bit code, subnormals included where they are not flushed, comes out as it went in, and where the permutation says."""
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).reshape(256, 256)
    codes = torch.where(codes.isfinite(), codes, 0).to(device)
    if flushes(device, dtype):
        codes = torch.where(codes.abs() < torch.finfo(dtype).tiny, 0, codes)
    columns = torch.randperm(256, generator=generator)
    permutation = torch.eye(256)[:, columns].to(device, dtype)
    out = gemm(LAYOUTS[layout_a](codes), LAYOUTS[layout_b](permutation))
    assert torch.equal(out, codes[:, columns])
    out = gemm(LAYOUTS[layout_a](permutation), LAYOUTS[layout_b](codes))
    assert torch.equal(out, codes[columns.argsort()])


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("batch", [(), (3,)])
def test_nothing_beyond_the_operands_is_read(device, generator, dtype, batch):
    """NaN beyond every row, below every matrix, between the elements and before the start; offsets of 0 to 8
    elements."""
    a = integers(*batch, 9, 17, limit=3, dtype=dtype, generator=generator, device=device)
    b = integers(*batch, 17, 10, limit=3, dtype=dtype, generator=generator, device=device)
    expected = (a.double() @ b.double()).float()
    for offset, transposed_a, transposed_b, step in itertools.product(range(9), (False, True), (False, True), (1, 2)):
        view_a, _ = embed(a, offset=offset, transposed=transposed_a, step=step)
        view_b, _ = embed(b, offset=8 - offset, transposed=transposed_b, pad=1)
        assert torch.equal(gemm(view_a, view_b, out_dtype=torch.float32), expected)


@pytest.mark.parametrize("layouts", list(itertools.product(LAYOUTS, repeat=2)), ids="-".join)
def test_every_layout_and_batches(device, generator, layouts):
    for batch, dtype in (((), torch.bfloat16), ((4,), torch.float16)):
        a = integers(*batch, 12, 20, limit=3, dtype=dtype, generator=generator, device=device, layout=layouts[0])
        b = integers(*batch, 20, 8, limit=3, dtype=dtype, generator=generator, device=device, layout=layouts[1])
        assert torch.equal(gemm(a, b).double(), a.double() @ b.double())


def test_cancellation_needs_fp32_sums(device):
    for dtype in HALF_DTYPES:
        # Sums of every 2nd to 16th element of K, as the lanes of a vector hold them, must not overflow.
        largest = min(torch.finfo(dtype).max, 2.0**110)
        a = torch.full((2, 4096), largest, device=device, dtype=dtype)
        b = torch.tensor([1.0, -1.0], device=device, dtype=dtype).repeat(2048)[:, None].expand(-1, 2)
        assert torch.equal(gemm(a, b), torch.zeros(2, 2, device=device, dtype=dtype))


def flushes(device, dtype):
    """True if the CPU's instructions for bf16 run, which take subnormal numbers for zero (docs/cpu.md)."""
    cpu = device == "cpu" and requested_backend() == "cpu"
    return cpu and dtype == torch.bfloat16 and cpu_isa.flushes_subnormals()


def test_bf16_subnormals_count_as_zero_only_where_the_instructions_say_so(device):
    """2^-130 is one, 64 * 2^-130 * 2^10 is a normal number."""
    kept = 0.0 if flushes(device, torch.bfloat16) else 1.0
    a = torch.full((64, 64), 2.0**-130, device=device).bfloat16()
    b = torch.full((64, 64), 2.0**10, device=device).bfloat16()
    assert (gemm(a, b) == kept * 2.0**-114).all()
    assert (gemm(a, b, batch_invariant=True) == 2.0**-114).all()
    small = torch.full((64, 64), 2.0**-70, device=device).bfloat16()
    assert (gemm(small, 2**5 * small) == kept * 2.0**-129).all()


def test_inf_and_nan_stay_in_their_row_and_column(device):
    a = torch.ones(3, 4, device=device, dtype=torch.float16)
    b = torch.ones(4, 3, device=device, dtype=torch.float16)
    a[0, 1], a[1, 2] = math.inf, math.nan
    b[1, 2] = 0
    inf, nan = math.inf, math.nan
    expected = torch.tensor([[inf, inf, nan], [nan, nan, nan], [4, 4, 3]], device=device, dtype=torch.float16)
    for activation in ("none", "relu", "silu"):
        out = gemm(a, b, activation=activation)
        reference = ACTIVATIONS[activation](expected.float()).half()
        torch.testing.assert_close(out, reference, rtol=0, atol=0, equal_nan=True)
    big = torch.full((1, 2), 60000.0, device=device, dtype=torch.float16)
    assert gemm(big, big.t()).item() == inf
    assert gemm(big, big.t(), out_dtype=torch.float32).item() == 2 * 60000.0**2


def test_reruns_are_bitwise_equal(device, generator):
    a = operand(65, 200, dtype=torch.bfloat16, generator=generator, device=device)
    b = operand(200, 130, dtype=torch.bfloat16, generator=generator, device=device)
    first = gemm(a, b, activation="gelu_tanh", out_dtype=torch.float32)
    assert all(torch.equal(first, gemm(a, b, activation="gelu_tanh", out_dtype=torch.float32)) for _ in range(20))


@pytest.mark.parametrize("autocast_dtype", HALF_DTYPES)
def test_the_raw_op_ignores_autocast(device, generator, autocast_dtype):
    """A functional matmul inside the kernel would be cast to autocast's dtype."""
    a, b = (operand(40, 40, dtype=torch.float16, generator=generator, device=device) for _ in range(2))
    c = torch.zeros(40, 40, device=device)
    expected = gemm(a, b, out_dtype=torch.float32)
    with torch.autocast(device, autocast_dtype):
        assert torch.equal(gemm(a, b, out_dtype=torch.float32), expected)
        gemm_accumulate_(c, a, b)
        batched = gemm(a[None], b[None], out_dtype=torch.float32)
    assert torch.equal(c, expected)
    assert torch.equal(batched[0], expected)


# ---- accumulation


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (1.0, 0.0), (-2.0, 1.0), (0.5, -4.0), (0.0, 1.0), (0.0, 0.0)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_accumulate(device, generator, alpha, beta, transposed, batch):
    """Exact, into a c of any strides, and without a write beside it; with beta = 0 the NaN that stands in c is not
    read."""
    a = integers(*batch, 9, 33, limit=8, dtype=torch.bfloat16, generator=generator, device=device)
    b = integers(*batch, 33, 7, limit=8, dtype=torch.bfloat16, generator=generator, device=device)
    start = integers(*batch, 9, 7, limit=1000, dtype=torch.float32, generator=generator, device=device)
    expected = alpha * (a.double() @ b.double()) + beta * start.double()
    c, buffer = embed(start if beta else torch.full_like(start, math.nan), transposed=transposed, offset=1)
    assert gemm_accumulate_(c, a, b, alpha=alpha, beta=beta) is c
    assert torch.equal(c.double(), expected)
    assert_only_written(buffer, c)


def test_accumulate_keeps_what_16_bits_would_lose(device):
    """256 + 1 is 256 in bf16; a gradient accumulated over micro-batches must not stand still."""
    one = torch.ones(1, 1, device=device, dtype=torch.bfloat16)
    c = torch.full((1, 1), 256.0, device=device)
    for _ in range(10):
        gemm_accumulate_(c, one, one)
    assert c.item() == 266


def test_accumulate_with_an_empty_inner_size(device):
    a, b = torch.zeros(2, 0, device=device).half(), torch.zeros(0, 3, device=device).half()
    c = torch.full((2, 3), 5.0, device=device)
    assert (gemm_accumulate_(c, a, b) == 5).all()
    assert (gemm_accumulate_(c, a, b, beta=0) == 0).all()
