"""check_and_norm's Triton kernel in the interpreter, against float64; run by test_interpreted.py."""

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
    sum_sq, found_inf = module.launch(grads, scale)
    want, found = expected(grads, scale)
    assert sum_sq.shape == found_inf.shape == ()
    assert sum_sq.dtype == found_inf.dtype == torch.float32
    assert found_inf.item() == found
    if not found:
        # A lane adds at most 16384 / 1024 + 2 squares in fp32, each rounded twice; fp64 above, one rounding at the end.
        assert sum_sq.item() == pytest.approx(want, rel=2 * 20 * 2.0**-24 + 2.0**-23, abs=0)
    again, _ = module.launch(grads, scale)
    assert torch.equal(again, sum_sq) or found
    for g, b in zip(grads, before, strict=True):
        assert torch.equal(g.nan_to_num(nan=0.5), b.nan_to_num(nan=0.5)), "a gradient was changed"


def make(n, dtype, offset=0, seed=0):
    generator = torch.Generator().manual_seed(seed + n)
    return torch.randn(n + offset, generator=generator, dtype=torch.float64).to(dtype)[offset:]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 7, 8, 1023, 1024, 1025, 16383, 16384, 16385, 70000])
def test_sizes(dtype, n):
    check([make(n, dtype)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", range(1, 9))
def test_offsets(dtype, offset):
    """Every address modulo 16 bytes, short and long tensors."""
    check([make(3, dtype, offset), make(1100, dtype, offset)])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 2500), st.integers(0, 8)), min_size=1, max_size=8),
    st.sampled_from([None, 1.0, 3.0, 65536.0, 2.0**-10]),
)
def test_mixed_lists(tensors, scale):
    grads = [make(n, dtype, offset, seed=i) for i, (dtype, n, offset) in enumerate(tensors)]
    check(grads, None if scale is None else torch.tensor(scale))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("at", [0, 1, 1030, 2040])
def test_non_finite_elements(dtype, value, at):
    grads = [make(5, torch.float32), make(2041, dtype, 1)]
    grads[1][at] = value
    check(grads)
    assert module.launch(grads)[1].item() == 1.0


def test_the_unscaled_value_decides():
    huge = [torch.full((9,), 1e30)]
    assert module.launch(huge)[1].item() == 0.0, "finite elements whose sum overflows are no overflow"
    assert module.launch(huge)[0].isinf()
    assert module.launch(huge, torch.tensor(2.0**-30))[1].item() == 1.0


def test_dense_tensors_of_any_strides_are_read_in_place():
    x = make(2 * 3 * 4 * 5, torch.bfloat16).reshape(2, 3, 4, 5)
    check([x.to(memory_format=torch.channels_last), x.permute(3, 1, 0, 2)])


def test_empty_lists_and_tensors():
    assert [x.item() for x in module.launch([torch.empty(0), torch.empty(3, 0)])] == [0.0, 0.0]


def test_more_tensors_than_one_launch_takes():
    grads = [make(1 + i % 3, DTYPES[i % 4], seed=i) for i in range(_tables.TENSORS_PER_TABLE + 5)]
    grads[-1][0] = 100.0
    check(grads)
    grads[-1][0] = float("nan")
    assert module.launch(grads)[1].item() == 1.0


def test_a_table_is_reused_only_for_the_same_list(monkeypatch):
    monkeypatch.setattr(_tables, "_uploads", type(_tables._uploads)())
    x = make(50, torch.float32)
    check([x])
    check([x])
    assert len(_tables._uploads) == 1
    check([x[:49]])  # same address, fewer elements
    check([x.view(torch.float16)])  # same address, other dtype
    assert len(_tables._uploads) == 3
