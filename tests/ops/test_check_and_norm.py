"""check_and_norm: the norm against float64, the flag against every place a bad value can stand."""

import math

import pytest
import torch

from amp_kernels._dispatch.library import REGISTRY

from ..helpers.generators import normal

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
OP = REGISTRY["check_and_norm"]
pytestmark = pytest.mark.usefixtures("compiled")


def run(grads, scale=None) -> tuple[float, float]:
    kept = [g.clone() for g in grads]
    sum_sq, found_inf = OP(grads, None if scale is None else torch.tensor(scale))
    for result in (sum_sq, found_inf):
        assert result.dtype == torch.float32
        assert result.shape == ()
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(kept, grads, strict=True))  # read only
    return sum_sq.item(), found_inf.item()


def expected(grads, scale=1.0) -> float:
    return sum(((g.double() / scale) ** 2).sum().item() for g in grads)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", [0, 1, 2, 15, 63, 64, 65, 1023, 1024, 1025, 16383, 16384, 16385, 100_003])
def test_norm_at_every_tail(dtype, n):
    """Unscaling and squaring round once each, the sum is formed in double: 2 u in all, and the result rounds."""
    grad = normal(n, dtype=dtype)
    sum_sq, found_inf = run([grad], 3.0)
    assert found_inf == 0.0
    assert sum_sq == pytest.approx(expected([grad], 3.0), rel=4 * 2.0**-24, abs=0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_value_at_every_position(compiled, dtype, bad):
    """Every place in the first lanes and tail, and the edges of tiles (1024) and chunks (16384)."""
    n = 16384 + 1024 + 71 if compiled == "cpu" else 1024 + 71
    grad = normal(n, dtype=dtype)
    edges = [e + d for e in (1024, 2048, 16384, 16384 + 1024) for d in (-2, -1, 0, 1)]
    for position in {*range(130), *edges, *range(n - 75, n)} & set(range(n)):
        grad[position], kept = bad, grad[position].clone()
        assert run([grad], 4.0)[1] == 1.0, position
        grad[position] = kept
    assert run([grad], 4.0)[1] == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_finite_gradient_that_is_not_finite_unscaled(dtype):
    """Scale 2^-30: 1e30 is finite, 1e30 * 2^30 is not. torch's scaler applies it and the weights become NaN."""
    grad = torch.full((9,), 1e30, dtype=dtype)
    assert run([grad], 2.0**-30)[1] == 1.0
    assert run([grad])[1] == 0.0


def test_scale_underflow():
    """A scale that was halved to zero: the inverse is inf, and every gradient, zero too, is refused."""
    assert run([torch.zeros(3)], 0.0)[1] == 1.0
    assert run([torch.ones(3)], 0.0)[1] == 1.0


def test_the_flag_is_not_taken_from_the_sum():
    """Finite gradients whose squares overflow fp32, and ones whose sum does in double."""
    assert run([torch.full((9,), 1e30)]) == (math.inf, 0.0)
    assert run([torch.full((4,), 1e200, dtype=torch.float64)]) == (math.inf, 0.0)


def test_small_gradients_do_not_vanish():
    """The square of 1e-23 is below fp32's range, a million of them are not."""
    assert run([torch.full((1000,), 1e-23)] * 1000)[0] == pytest.approx(1e-40, rel=2e-5, abs=0)
    assert run([torch.full((7,), 2.0**-24, dtype=torch.float16)])[0] == 7 * 2.0**-48  # subnormal


def test_the_largest_values():
    assert run([torch.tensor([65504.0], dtype=torch.float16)])[0] == pytest.approx(65504.0**2, rel=1e-7, abs=0)
    assert run([torch.tensor([3e38])], 1.0)[1] == 0.0


def test_inverse_scale_is_rounded_once_from_double():
    """fp32 3 / fp32 reciprocal: the tested value is g * float(1 / 3), as in torch's scaler."""
    grad = torch.full((1,), 3.0)
    assert run([grad], 3.0)[0] == torch.tensor((3.0 * torch.tensor(1 / 3).item()), dtype=torch.float32).square().item()


def test_same_bits_for_any_number_of_threads(threads):
    """The sum is 2^24 + 1, a tie between two fp32 numbers, and 1500 squares of 2^-15 that decide it. Added singly to the
    large sum they vanish, so the result shows in which order, that is with which chunks, the sum was formed."""
    grad = torch.zeros(300_032)
    grad[0], grad[64] = 4096.0, 1.0
    grad[100_032:200_000:64] = 2.0**-15
    for n in (1, 2, 3, 7):
        threads(n)
        assert run([grad]) == (2.0**24 + 2, 0.0), n
        assert run_each([grad, grad], per_tensor=True) == ([2.0**24 + 2] * 2, [0.0] * 2), n


def test_the_stride_of_a_dimension_of_one_element_means_nothing():
    odd = torch.empty_strided((3, 1, 4), (1, 77, 3)).fill_(2.0)
    assert run([odd])[0] == 48.0


@pytest.mark.parametrize(
    ("grads", "scale", "message"),
    [
        ([], torch.ones(()), "grads must not be empty"),
        (
            [torch.zeros(2), torch.zeros(3, dtype=torch.int32)],
            None,
            r"grads\[1\] must have dtype float16, bfloat16, float32, float64; got int32",
        ),
        ([torch.zeros(2, dtype=torch.complex64)], None, r"grads\[0\] must have dtype"),
        ([torch.zeros(3).expand(2, 3)], None, r"grads\[0\] must cover .* got shape \(2, 3\) with strides \(0, 1\)"),
        ([torch.zeros(3)], torch.ones(2), r"grad_scale must have one element; got shape \(2\)"),
        ([torch.zeros(3)], torch.ones((), dtype=torch.float64), "grad_scale must have dtype float32; got float64"),
    ],
)
def test_bad_calls(grads, scale, message):
    with pytest.raises(RuntimeError, match=message):
        OP(grads, scale)


# ---- largest magnitudes, and results per tensor ----


def run_each(grads, scale=None, **options):
    norms, found = OP(grads, None if scale is None else torch.tensor(scale), **options)
    assert norms.dtype == found.dtype == torch.float32
    assert norms.shape == found.shape == ((len(grads),) if options.get("per_tensor") else ())
    return norms.tolist(), found.tolist()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", [1, 2, 63, 65, 1023, 1025, 16383, 16385, 40_000])
def test_the_largest_magnitude_is_exact(dtype, n):
    grad = normal(n, dtype=dtype, seed=n)
    for position in {0, 1 % n, n // 2, n - 1}:
        kept, grad[position] = grad[position].clone(), -7.0 - position % 5
        assert run_each([grad, grad[:0]], 4.0, norm_type=math.inf) == ((7.0 + position % 5) / 4, 0.0)
        grad[position] = kept


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("per_tensor", [False, True])
def test_infinity_stays_infinity_and_nan_wins(dtype, per_tensor):
    for values, largest in ([1.0, -math.inf], math.inf), ([-math.inf, math.nan, 2.0], math.nan), ([-3.0], 3.0):
        norms, found = run_each([torch.tensor(values, dtype=dtype)], norm_type=math.inf, per_tensor=per_tensor)
        norm, flag = (norms[0], found[0]) if per_tensor else (norms, found)
        assert norm == largest or (math.isnan(norm) and math.isnan(largest))
        assert flag == float(not math.isfinite(largest))


def test_a_finite_double_above_the_range_of_float32_is_no_overflow():
    grads = [torch.tensor([1.0, -1e60], dtype=torch.float64)]
    for norm_type in (2.0, math.inf):
        assert run_each(grads, norm_type=norm_type) == (math.inf, 0.0)


def test_more_tensors_than_a_launch_has_warps_and_slots():
    grads = [normal(1 + i % 5, dtype=FLOATS[i % 4], seed=i) for i in range(3500)]
    want = [expected([grad]) for grad in grads[1:]]
    assert run(grads)[0] == pytest.approx(expected(grads), rel=1e-6)
    grads[0][0] = math.nan
    assert run(grads)[1] == 1.0
    norms, found = run_each(grads, per_tensor=True)
    assert found == [1.0, *[0.0] * 3499]
    assert norms[1:] == pytest.approx(want, rel=1e-6)


def test_each_tensor_has_its_own_results_whatever_the_others_hold():
    sizes = [0, 1, 5, 16_384, 16_385, 50_000, 0, 3]
    grads = [normal(n, dtype=FLOATS[i % 4], seed=i) for i, n in enumerate(sizes)]
    grads[4][16_384], grads[7][0] = math.nan, -math.inf
    norms, found = run_each(grads, 8.0, per_tensor=True)
    largest, again = run_each(grads, 8.0, per_tensor=True, norm_type=math.inf)
    assert found == again == [float(i in (4, 7)) for i in range(8)]
    for i, grad in enumerate(grads):
        if i not in (4, 7):
            assert (norms[i], 0.0) == run([grad], 8.0), "the bits of the tensor alone"
            assert largest[i] == (grad.double().abs().max() / 8 if grad.numel() else 0.0)
    assert (math.isnan(norms[4]), norms[7]) == (True, math.inf)
