"""newton_schulz: the float64 polynomial over spectra, one result alone, in a stack and in a list, scales, and bad input."""

import math

import pytest
import torch

import amp_kernels as ak
from amp_kernels.ops.newton_schulz import KELLER_JORDAN, POLAR_EXPRESS, iterate_dtype

from ..helpers.generators import normal
from .tensors import relative

SHAPES = [(48, 48), (40, 56), (32, 80), (80, 32), (1, 17), (17, 1), (13, 30), (256, 256), (256, 400)]
SPECTRA = ["gaussian", "flat", "slow", "fast", "tiny", "rank"]


def matrix(rows, columns, spectrum="gaussian"):
    x = normal(rows, columns).double()
    if spectrum == "gaussian":
        return x.float()
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    i = torch.arange(1, min(rows, columns) + 1).double()
    values = {
        "flat": torch.ones_like(i),
        "slow": 1 / i,
        "fast": 1e-2 ** (i / len(i)),
        "tiny": torch.where(i == len(i), 1e-6, 1.0),
        "rank": (i <= 8).double(),
    }
    return (u * values[spectrum] @ v).float()


def polynomial(x, triples):
    """The iteration in float64."""
    x = x.double() / x.double().norm()
    for a, b, c in triples:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def error_bound(x, triples):
    """Bound on the Frobenius error over the norm of the result. Each of a step's three products rounds its result once, by half an
    ulp u of at most the sum of the polynomial's terms, and a step multiplies the error before it by at most a, its slope at
    0, in the directions of small singular values, which have the share of the result's norm that is counted here."""
    u = 2.0**-11 if iterate_dtype(x) == torch.float16 else 2.0**-8
    exact = polynomial(x, triples)
    error, unit = u * x.norm().item() / x.norm().item(), x.double() / x.double().norm()
    for a, b, c in triples:
        error = a * error + u * (a + abs(b) + abs(c)) * unit.norm().item()
        gram = unit @ unit.mT
        unit = a * unit + (b * gram + c * gram @ gram) @ unit
    return error / exact.norm().item()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("triples", [[KELLER_JORDAN] * 5, list(POLAR_EXPRESS)], ids=["keller_jordan", "polar_express"])
def test_float64_polynomial(every_cpu_isa, shape, spectrum, triples):
    x = matrix(*shape, spectrum)
    out = ak.newton_schulz(x, coefficients=triples)
    assert out.dtype == torch.float32
    assert out.shape == x.shape
    assert torch.linalg.matrix_norm(out.double(), 2) < 1.25  # the largest value of both polynomials is below 1.21
    # Directions of tiny singular values are rounding noise, amplified by the product of all a; the rest is close.
    u, sigma, v = torch.linalg.svd(x.double(), full_matrices=False)
    kept = sigma > 0.1 * sigma[0]
    actual, expected = (u[:, kept].mT @ y @ v[kept].mT for y in (out.double(), polynomial(x, triples)))
    bf16 = iterate_dtype(x) == torch.bfloat16
    assert (actual - expected).abs().max() < (0.2 if bf16 else 0.12)
    assert relative(out, polynomial(x, triples)) <= error_bound(x, triples)
    if spectrum == "gaussian":
        assert relative(out, polynomial(x, triples)) < 2.5e-2


def test_converging_coefficients_give_the_polar_factor(every_cpu_isa):
    for shape in ((40, 40), (30, 64), (64, 30)):
        x = matrix(*shape, "slow")
        u, _, v = torch.linalg.svd(x.double(), full_matrices=False)
        out = ak.newton_schulz(x, steps=24, coefficients=(1.5, -0.5, 0.0))
        assert relative(out, u @ v) < 2.5e-2


def test_one_triple_a_step():
    x = matrix(24, 60)
    triples = [KELLER_JORDAN, (1.5, -0.5, 0.0), (2.0, -1.5, 0.5)]
    out = ak.newton_schulz(x, 3, triples)
    assert relative(out, polynomial(x, triples)) < 2.5e-2
    assert torch.equal(ak.newton_schulz(x, 3, "keller_jordan"), ak.newton_schulz(x, 3, KELLER_JORDAN))
    assert torch.equal(ak.newton_schulz(x, 5, "polar_express"), ak.newton_schulz(x, 5, POLAR_EXPRESS))
    assert torch.equal(
        ak.newton_schulz(x, 7, "polar_express"), ak.newton_schulz(x, 7, [*POLAR_EXPRESS, *[POLAR_EXPRESS[-1]] * 2])
    )


@pytest.mark.parametrize("steps", range(8))
def test_any_number_of_steps(every_cpu_isa, steps):
    """Restarts of the Gram form fall behind every one of the first steps."""
    for shape in ((20, 24), (20, 64), (64, 20)):
        x = matrix(*shape)
        expected = polynomial(x, [KELLER_JORDAN] * steps)
        assert relative(ak.newton_schulz(x, steps), expected) < 4e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_same_bits_alone_in_a_stack_and_in_a_list(dtype):
    shapes = [(24, 24), (16, 40), (40, 16), (16, 40), (9, 7), (24, 24)]
    matrices = [normal(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]
    listed = ak.newton_schulz(matrices)
    for i, (x, y) in enumerate(zip(matrices, listed, strict=True)):
        assert y.dtype == dtype
        alone = ak.newton_schulz(x)
        assert torch.equal(alone, y)
        assert torch.equal(ak.newton_schulz(torch.stack([x.flip(0), x, x]))[1], alone), i
        assert torch.equal(ak.newton_schulz(x.mT.contiguous().mT), alone)
    stack = normal(2, 3, 12, 20).to(dtype)
    assert torch.equal(ak.newton_schulz([stack, stack[0, 0]])[0], ak.newton_schulz(stack))


def test_a_list_of_several_dtypes():
    matrices = [
        normal(12, 20, seed=i).to(dtype) for i, dtype in enumerate((torch.float16, torch.bfloat16, torch.float32))
    ]
    for x, y in zip(matrices, ak.newton_schulz(matrices), strict=True):
        assert y.dtype == x.dtype
        assert torch.equal(y, ak.newton_schulz(x))


@pytest.mark.parametrize("elements", [1, 700, 1500])
def test_a_stack_in_parts(monkeypatch, elements):
    """So many elements of 24 x 16 that one, two or four matrices are in work together."""
    x = normal(5, 20, 13)
    expected = ak.newton_schulz(x)
    monkeypatch.setattr("amp_kernels.ops.newton_schulz.ELEMENTS_TOGETHER", elements)
    assert torch.equal(ak.newton_schulz(x), expected)


def test_a_power_of_two_changes_no_bit():
    for shape in ((24, 24), (16, 40)):
        x = matrix(*shape)
        expected = ak.newton_schulz(x)
        for power in (-20, 3, 60, 100):
            assert torch.equal(ak.newton_schulz(x * 2.0**power, eps=0.0), expected)
    tiny = x * 2.0**-60  # its squares are no fp32 numbers
    assert torch.equal(ak.newton_schulz(tiny, eps=0.0), expected)
    assert ak.newton_schulz(tiny).abs().max() < 1e-6  # below eps it is small


def test_zeros_and_empty():
    assert not ak.newton_schulz(torch.zeros(3, 12, 20)).any()
    for shape in ((0, 4, 4), (4, 0), (0, 4), (2, 0, 3)):
        assert ak.newton_schulz(torch.ones(shape)).shape == shape
    assert ak.newton_schulz([]) == []


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_nan_and_inf_stay_in_their_matrix(poison):
    x = torch.stack([matrix(20, 33)] * 3)
    x[1, 2, 5] = poison
    out = ak.newton_schulz(x)
    assert out[1].isnan().all()
    assert torch.equal(out[0], ak.newton_schulz(x[0]))
    assert torch.equal(out[2], out[0])


def test_bad_input():
    x = torch.ones(4, 4)
    for options, message in [
        ({"steps": -1}, "steps is -1; accepted: an integer from 0 to 99"),
        ({"steps": 2.0}, "steps is 2.0"),
        ({"steps": 100}, "steps is 100"),
        ({"eps": -1.0}, "eps is -1.0"),
        ({"eps": math.nan}, "eps is nan"),
        ({"coefficients": "newton"}, "coefficients is 'newton'; accepted: 'keller_jordan'"),
        ({"coefficients": (1.0, 2.0)}, "coefficients is"),
        ({"coefficients": [KELLER_JORDAN] * 4}, "steps is 5"),
        ({"coefficients": (1.0, 2.0, math.inf)}, "coefficients is"),
        ({"coefficients": 3.0}, "coefficients is 3.0"),
    ]:
        with pytest.raises(ValueError, match=message):
            ak.newton_schulz(x, **options)
    with pytest.raises(ValueError, match=r"x has shape \[4\]; accepted: \[..., M, N\]"):
        ak.newton_schulz(x[0])
    with pytest.raises(TypeError, match=r"x\[1\] has dtype float64"):
        ak.newton_schulz([x, x.double()])
    with pytest.raises(RuntimeError, match=r"x requires a gradient, and newton_schulz is not differentiable"):
        ak.newton_schulz(x.clone().requires_grad_())
    with torch.no_grad():
        assert not ak.newton_schulz(x.clone().requires_grad_()).requires_grad


def test_compiles():
    x = matrix(16, 40)
    compiled = torch.compile(ak.newton_schulz, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), ak.newton_schulz(x))
