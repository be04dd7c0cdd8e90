"""The Triton kernels of lists of tensors in the interpreter, over sizes, addresses, mixed lists and more tensors than a table takes: bit
for bit against the CPU op, ``check_and_norm`` against float64; run by test_interpreted.py."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_kernels._triton import _tables, cast, exponent_histogram, unscale
from amp_kernels._triton import check_and_norm as norm

from ..helpers.bits import assert_same_bits

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def make(n, dtype, offset=0, seed=0):
    """``n`` elements, ``offset`` elements after a 16-byte boundary, with one more element after the last."""
    generator = torch.Generator().manual_seed(seed + n)
    return torch.randn(n + offset + 1, generator=generator, dtype=torch.float64).to(dtype)[offset:-1]


def whole(t):
    """Everything in the storage of ``t``."""
    return torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())


def copied(t, fill=None, dtype=None):
    """A copy of ``t`` and of what lies around it, or memory of the same layout filled with a number."""
    memory = whole(t).clone() if fill is None else torch.full_like(whole(t), fill, dtype=dtype)
    return memory.as_strided(t.shape, t.stride(), t.storage_offset())


def check_unscale(grads, inv=0.3, found=0.0):
    """Returns the flag."""
    wanted, flags = [copied(g) for g in grads], (torch.tensor(found), torch.tensor(found))
    torch.ops.amp_kernels.unscale_(wanted, flags[0], torch.tensor(inv))
    unscale.unscale_(grads, flags[1], torch.tensor(inv))
    for g, w in zip((*grads, flags[1]), (*wanted, flags[0]), strict=True):
        assert_same_bits(whole(g), whole(w))
    return flags[1].item()


def check_histogram(tensors):
    special = torch.tensor([0.0, math.inf, -math.inf, math.nan, 2.0**-149], dtype=torch.float64)
    for t in tensors:
        values = t.double().flatten().exp2().pow(40)  # of many powers of two
        values[::7] = special[torch.arange(len(values[::7])) % 5]
        t.copy_(values.view(t.shape))
    results = (op(tensors) for op in (exponent_histogram.exponent_histogram, torch.ops.amp_kernels.exponent_histogram))
    assert all(map(torch.equal, *results))


def check_cast(tensors):
    """Each to every dtype, rounded to nearest and stochastically."""
    pairs = [(t, to) for t in tensors if t.dtype != torch.float64 for to in DTYPES[:3]]
    sources = [source for source, _ in pairs]
    for options in ({}, {"seed": 2**62 + 1, "step": torch.tensor(3.0)}):
        want, got = ([copied(source, 7.0, to) for source, to in pairs] for _ in range(2))
        torch.ops.amp_kernels.cast_(want, sources, **options)
        cast.cast_(got, sources, **options)
        for g, w in zip(got, want, strict=True):
            assert_same_bits(whole(g), whole(w))


def check_norm(grads, scale=None):
    """Sums within their roundings, largest magnitudes exactly, of all and of each tensor."""
    before = [whole(g).clone() for g in grads]
    inv = 1.0 if scale is None else (1.0 / scale.double()).float()
    unscaled = [((g if g.dtype == torch.float64 else g.float()) * inv).flatten() for g in grads]
    sums = torch.stack([u.double().square().sum() for u in unscaled])
    largest = torch.stack([torch.cat([u.abs(), u.new_zeros(1)]).amax().float() for u in unscaled])
    flags = torch.stack([(~u.isfinite()).any().float() for u in unscaled])
    for per_tensor, norm_type in ((False, 2.0), (False, math.inf), (True, 2.0), (True, math.inf)):
        got, found = norm.check_and_norm(grads, scale, norm_type=norm_type, per_tensor=per_tensor)
        assert got.dtype == found.dtype == torch.float32
        assert torch.equal(found, flags if per_tensor else flags.amax())
        if norm_type == math.inf:
            want = largest if per_tensor else largest.amax()
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        else:
            # A lane adds at most 16384 / 1024 + 2 squares in fp32, each rounded twice; fp64 above, one rounding at the end.
            want, finite = (sums if per_tensor else sums.sum()).float(), found == 0
            torch.testing.assert_close(got[finite], want[finite], rtol=42 * 2.0**-24, atol=2.0**-149)
            again = norm.check_and_norm(grads, scale, norm_type=norm_type, per_tensor=per_tensor)[0]
            assert torch.equal(again[finite], got[finite])
    for g, b in zip(grads, before, strict=True):
        assert_same_bits(whole(g), b, "a gradient was changed")


CHECKS = {
    "unscale_": check_unscale,
    "exponent_histogram": check_histogram,
    "cast_": check_cast,
    "check_and_norm": check_norm,
}
EACH = pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)


@EACH
@pytest.mark.parametrize("n", [1, 7, 255, 257, 1023, 1025, 2049, 16384, 16385])
def test_sizes(check, n):
    check([make(n, dtype) for dtype in DTYPES])


@EACH
@pytest.mark.parametrize("offset", range(1, 9))
def test_offsets(check, offset):
    """Every address modulo 16 bytes, tensors within a block and beyond one, and nothing written beside them."""
    check([make(n, dtype, offset) for dtype in DTYPES for n in (3, 2500)])


@EACH
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 2500), st.integers(0, 8)), min_size=1, max_size=8),
    st.sampled_from([1.0, 3.0, 65536.0, 2.0**-10]),
)
def test_mixed_lists(check, tensors, number):
    tensors = [make(n, dtype, offset, seed=i) for i, (dtype, n, offset) in enumerate([*tensors, (torch.float32, 5, 1)])]
    more = {"unscale_": (1 / number,), "check_and_norm": (torch.tensor(number),)}
    check(tensors, *more.get(next(name for name in CHECKS if CHECKS[name] is check), ()))


@EACH
def test_dense_strides_and_empty_tensors(check):
    x = make(120, torch.bfloat16).reshape(2, 3, 4, 5)
    check([x.clone(memory_format=torch.channels_last), x.clone().permute(3, 1, 0, 2), torch.empty(0, 3)])


@EACH
def test_more_tensors_than_one_table_takes(check, monkeypatch):
    monkeypatch.setattr(_tables, "TENSORS_PER_TABLE", 3)
    tensors = [make(n, DTYPES[i % 4], i % 3, seed=i) for i, n in enumerate((1, 16_385, 3, 40_000, 37, 0, 46, 5))]
    check(tensors)
    tensors[-1][0] = torch.nan
    check(tensors)


# ---- what decides the flag


@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_elements(dtype):
    """In the peeled head, the main loop and the tail; whatever else the program comes across after it."""
    after = [dtype for dtype in DTYPES for _ in range(_tables.INTERPRETED_PROGRAMS)]
    for at, value in ((0, math.inf), (1030, math.nan), (4999, -math.inf)):
        grads = [make(5, torch.float32), make(5000, dtype, 1), *(make(4, d) for d in after)]
        grads[1][at] = value
        check_norm(grads)
        assert check_unscale(grads) == 1.0


@pytest.mark.parametrize(
    ("dtype", "largest"), [(torch.float16, 65504.0), (torch.bfloat16, 3.38e38), (torch.float32, 3.4e38)]
)
def test_a_product_that_overflows_its_dtype_is_found(dtype, largest):
    """The stored value decides; in fp16 the product is still finite where it is computed."""
    assert check_unscale([torch.full((9,), largest, dtype=dtype)], inv=0.5) == 0.0
    assert check_unscale([torch.full((9,), largest, dtype=dtype)], inv=2.0) == 1.0


def test_the_unscaled_value_decides_and_an_earlier_find_stays():
    huge = [torch.full((9,), 1e30)]
    check_norm(huge, torch.tensor(2.0**-30))
    assert [x.item() for x in norm.check_and_norm(huge)] == [math.inf, 0.0], "finite elements whose sum overflows"
    for found in (1.0, 2.0):
        assert check_unscale([make(9, torch.float32)], found=found) == found


def test_unscale_without_a_flag():
    for inv in (0.5, 1 / 3, math.inf):
        ours, theirs = make(2500, torch.bfloat16, 1), make(2500, torch.bfloat16, 1)
        unscale.unscale_([ours], None, torch.tensor(inv))
        torch.ops.amp_kernels.unscale_([theirs], None, torch.tensor(inv))
        assert_same_bits(ours, theirs)
    signalling = torch.full((2500,), 0x7F81, dtype=torch.int16).view(torch.bfloat16)  # any operation changes it
    unscale.unscale_([signalling], None, torch.ones(()))
    assert (signalling.view(torch.int16) == 0x7F81).all()


# ---- check_and_norm alone


def test_a_table_is_reused_only_for_the_same_list(monkeypatch):
    monkeypatch.setattr(_tables, "_uploads", type(_tables._uploads)())
    x = make(50, torch.float32)
    check_norm([x])
    check_norm([x])
    assert len(_tables._uploads) == 1
    check_norm([x[:49]])  # same address, fewer elements
    check_norm([x.view(torch.float16)])  # same address, other dtype
    assert len(_tables._uploads) == 3


@pytest.mark.parametrize(
    ("exponent", "dtype"), [(-60, torch.float32), (-63, torch.bfloat16), (-70, torch.float32), (-100, torch.bfloat16)]
)
def test_squares_below_the_range_of_fp32(dtype, exponent):
    """One by one they vanish or lose bits; their sum must not, nor may larger values or zeros beside them matter."""
    small = torch.full((17_000,), 1.7 * 2.0**exponent, dtype=dtype)
    check_norm([small, torch.zeros(5000)])
    small[100:300] = 0.0
    small[16_500] = 2.0 ** (exponent + 30)
    check_norm([small], torch.tensor(2.0**-4))
    want = small.double().square().sum()
    assert norm.check_and_norm([small])[0].item() == pytest.approx(want.item(), rel=2.0**-18, abs=2.0**-149)


def test_a_finite_double_above_the_range_of_fp32():
    grads = [torch.tensor([1.0, -1e60], dtype=torch.float64)]
    for norm_type in (2.0, math.inf):
        assert [x.item() for x in norm.check_and_norm(grads, norm_type=norm_type)] == [math.inf, 0.0]
