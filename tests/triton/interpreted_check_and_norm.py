"""check_and_norm's Triton kernel in the interpreter, against float64; run by test_interpreted.py."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_kernels._triton import _tables
from amp_kernels._triton import check_and_norm as module

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def expected(grads, scale):
    inv = 1.0 if scale is None else (1.0 / scale.double()).float()
    unscaled = [(g if g.dtype == torch.float64 else g.float()) * inv for g in grads]
    sum_sq = sum(float(u.double().square().sum()) for u in unscaled)
    return sum_sq, float(any(not bool(u.isfinite().all()) for u in unscaled))


def check(grads, scale=None):
    before = [g.clone() for g in grads]
    sum_sq, found_inf = module.check_and_norm(grads, scale)
    want, found = expected(grads, scale)
    assert sum_sq.shape == found_inf.shape == ()
    assert sum_sq.dtype == found_inf.dtype == torch.float32
    assert found_inf.item() == found
    if not found:
        # A lane adds at most 16384 / 1024 + 2 squares in fp32, each rounded twice; fp64 above, one rounding at the end.
        assert sum_sq.item() == pytest.approx(want, rel=2 * 20 * 2.0**-24 + 2.0**-23, abs=2.0**-149)
    again, _ = module.check_and_norm(grads, scale)
    assert torch.equal(again, sum_sq) or found
    check_other_norms(grads, scale)
    for g, b in zip(grads, before, strict=True):
        assert torch.equal(g.nan_to_num(nan=0.5), b.nan_to_num(nan=0.5)), "a gradient was changed"


def check_other_norms(grads, scale):
    """The largest magnitude is exact; results per tensor are those of the tensor alone."""
    inv = 1.0 if scale is None else (1.0 / scale.double()).float()
    unscaled = [((g if g.dtype == torch.float64 else g.float()) * inv).flatten() for g in grads]
    want = torch.stack([torch.cat([u.abs(), u.new_zeros(1)]).amax().float() for u in unscaled])
    flags = torch.stack([(~u.isfinite()).any().float() for u in unscaled])
    largest, found = module.check_and_norm(grads, scale, norm_type=math.inf)
    torch.testing.assert_close(largest, want.amax(), rtol=0, atol=0, equal_nan=True)
    for norm_type in (2.0, math.inf):
        norms, found = module.check_and_norm(grads, scale, norm_type=norm_type, per_tensor=True)
        assert norms.shape == found.shape == (len(grads),)
        assert torch.equal(found, flags)
        if norm_type == math.inf:
            torch.testing.assert_close(norms, want, rtol=0, atol=0, equal_nan=True)
        else:
            sums = torch.stack([u.double().square().sum() for u in unscaled]).float()
            torch.testing.assert_close(norms[flags == 0], sums[flags == 0], rtol=42 * 2.0**-24, atol=0)


def make(n, dtype, offset=0, seed=0):
    generator = torch.Generator().manual_seed(seed + n)
    return torch.randn(n + offset, generator=generator, dtype=torch.float64).to(dtype)[offset:]


@pytest.mark.parametrize("n", [1, 7, 8, 1023, 1024, 1025, 16383, 16384, 16385, 33000])
def test_sizes(n):
    check([make(n, DTYPES[n % 4])])
    check([make(n, dtype) for dtype in DTYPES])


@pytest.mark.parametrize("dtype", DTYPES)
def test_offsets(dtype):
    """Every address modulo 16 bytes, short and long tensors."""
    check([make(n, dtype, offset) for offset in range(1, 9) for n in (3, 1100)])


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 2500), st.integers(0, 8)), min_size=1, max_size=8),
    st.sampled_from([None, 1.0, 3.0, 65536.0, 2.0**-10]),
)
def test_mixed_lists(tensors, scale):
    grads = [make(n, dtype, offset, seed=i) for i, (dtype, n, offset) in enumerate(tensors)]
    check(grads, None if scale is None else torch.tensor(scale))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("value", "at"), [(math.inf, 0), (-math.inf, 1), (math.nan, 1030), (math.inf, 2040)])
def test_non_finite_elements(dtype, value, at):
    grads = [make(5, torch.float32), make(2041, dtype, 1)]
    grads[1][at] = value
    check(grads)
    assert module.check_and_norm(grads)[1].item() == 1.0


def test_the_unscaled_value_decides():
    huge = [torch.full((9,), 1e30)]
    assert module.check_and_norm(huge)[1].item() == 0.0, "finite elements whose sum overflows are no overflow"
    assert module.check_and_norm(huge)[0].isinf()
    assert module.check_and_norm(huge, torch.tensor(2.0**-30))[1].item() == 1.0


def test_dense_tensors_of_any_strides_are_read_in_place():
    x = make(2 * 3 * 4 * 5, torch.bfloat16).reshape(2, 3, 4, 5)
    check([x.to(memory_format=torch.channels_last), x.permute(3, 1, 0, 2)])


def test_empty_lists_and_tensors():
    assert [x.item() for x in module.check_and_norm([torch.empty(0), torch.empty(3, 0)])] == [0.0, 0.0]


@pytest.fixture
def small_tables(monkeypatch):
    monkeypatch.setattr(_tables, "TENSORS_PER_TABLE", 12)


def test_more_tensors_than_one_launch_takes(small_tables):
    grads = [make(1 + i % 3, DTYPES[i % 4], seed=i) for i in range(27)]
    grads[-1][0] = 100.0
    check(grads)
    grads[-1][0] = float("nan")
    assert module.check_and_norm(grads)[1].item() == 1.0


def test_a_table_is_reused_only_for_the_same_list(monkeypatch):
    monkeypatch.setattr(_tables, "_uploads", type(_tables._uploads)())
    x = make(50, torch.float32)
    check([x])
    check([x])
    assert len(_tables._uploads) == 1
    check([x[:49]])  # same address, fewer elements
    check([x.view(torch.float16)])  # same address, other dtype
    assert len(_tables._uploads) == 3


@pytest.mark.parametrize(
    ("exponent", "dtype"), [(-60, torch.float32), (-63, torch.bfloat16), (-70, torch.float32), (-100, torch.bfloat16)]
)
def test_squares_below_the_range_of_fp32(dtype, exponent):
    """One by one they vanish or lose bits; their sum must not, nor may larger values or zeros beside them matter."""
    small = torch.full((17_000,), 1.7 * 2.0**exponent, dtype=dtype)
    check([small, torch.zeros(5000)])
    small[100:300] = 0.0
    small[16_500] = 2.0 ** (exponent + 30)
    check([small], torch.tensor(2.0**-4))
    want = small.double().square().sum()
    assert module.check_and_norm([small])[0].item() == pytest.approx(want.item(), rel=2.0**-18, abs=2.0**-149)


def test_a_finite_double_above_the_range_of_fp32():
    grads = [torch.tensor([1.0, -1e60], dtype=torch.float64)]
    for norm_type in (2.0, math.inf):
        assert [x.item() for x in module.check_and_norm(grads, norm_type=norm_type)] == [math.inf, 0.0]


def test_per_tensor_results_of_more_tensors_than_one_launch_takes(small_tables):
    grads = [torch.full((1 + i % 3,), float(i)) for i in range(27)]
    grads[7] = torch.empty(0)
    norms, found = module.check_and_norm(grads, norm_type=math.inf, per_tensor=True)
    assert norms.tolist() == [0.0 if i == 7 else float(i) for i in range(len(grads))]
    assert not found.any()
