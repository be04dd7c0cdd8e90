"""baddbmm and addmm: torch's contract, one rounding, gradients, autocast, out; see test_differentiable.py."""

import math

import pytest
import torch

from amp_kernels.ops.baddbmm import addmm, baddbmm

from ..helpers.bounds import assert_within, frobenius_gate, reference_and_bound
from ..helpers.generators import HALF_DTYPES, normal
from .tensors import leaves

SHAPES = [(3, 6, 5), (1, 6, 5), (6, 5), (5,), (6, 1), ()]


def problem(input_shape, dtype, *, grad=False, batched=True, input_dtype=None):
    batch = (3,) if batched else ()
    return (
        normal(*input_shape, dtype=input_dtype or dtype, seed=1, grad=grad),
        normal(*batch, 6, 40, dtype=dtype, seed=2, grad=grad),
        normal(*batch, 40, 5, dtype=dtype, seed=3, grad=grad),
    )


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0.5, -2.0), (0, 3)])
def test_forward_and_gradients(dtype, shape, beta, alpha):
    for batched, function, theirs in ((True, baddbmm, torch.baddbmm), (False, addmm, torch.addmm)):
        if not batched and len(shape) == 3:
            continue
        for input_dtype in (dtype, torch.float32):
            tensors = problem(shape, dtype, grad=True, batched=batched, input_dtype=input_dtype)
            out = function(*tensors, beta=beta, alpha=alpha)
            assert out.dtype == dtype
            addend, a, b = (t.detach() for t in tensors)
            assert_within(out, *reference_and_bound(a, b, alpha=alpha, beta=beta, c=addend, out_dtype=dtype))
            with torch.no_grad():
                assert torch.equal(function(*tensors, beta=beta, alpha=alpha), out)
            grad = normal(*out.shape, dtype=dtype, seed=4)
            out.backward(grad)
            doubles = leaves(tensors, torch.float64)
            theirs(*doubles, beta=beta, alpha=alpha).backward(grad.double())
            for actual, leaf in zip(tensors, doubles, strict=True):
                assert actual.grad.dtype == actual.dtype
                error = (actual.grad.double() - leaf.grad).norm()
                assert error <= 2 * frobenius_gate(dtype, 40) * leaf.grad.norm()


def test_beta_zero_ignores_input():
    nan, a, b = problem((3, 6, 5), torch.bfloat16)
    nan = torch.full_like(nan, math.nan).requires_grad_()
    out = baddbmm(nan, a, b, beta=0)
    assert torch.equal(out, baddbmm(torch.zeros_like(nan), a, b))
    out.sum().backward()
    assert not nan.grad.any()


@pytest.mark.parametrize("input_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_row_goes_as_a_bias(input_dtype, op_calls):
    """A bias is read once for a tile, and a residual that is broadcast for every element."""
    for shape in [(5,), (1, 5), (1, 1, 5)]:
        row, a, b = problem(shape, torch.bfloat16, input_dtype=input_dtype)
        op_calls.clear()
        with torch.autocast("cpu", torch.bfloat16):
            baddbmm(row, a, b)
            baddbmm(row, a, b, beta=0.3)
            baddbmm(row.expand(3, 6, 5), a, b)
        (bias, none), (scaled, none_either), (no_bias, residual) = (
            (*args, None, None)[2:4] for args, _ in op_calls["gemm"]
        )
        assert none is none_either is no_bias is None
        assert bias.dtype is (torch.float32 if input_dtype is torch.float16 else input_dtype)
        assert torch.equal(bias, row.flatten().to(bias.dtype))
        assert scaled.dtype is torch.float32
        assert torch.equal(scaled, 0.3 * row.flatten().float())
        assert residual.shape == (3, 6, 5)


@pytest.mark.parametrize("autocast", HALF_DTYPES)
def test_autocast(autocast):
    for input_dtype in (torch.float32, *HALF_DTYPES):
        tensors = problem((6, 5), torch.float32, grad=True, input_dtype=input_dtype)
        with torch.autocast("cpu", autocast):
            out = baddbmm(*tensors, alpha=0.5)
        addend, a, b = (t.detach() for t in tensors)
        a, b = a.to(autocast), b.to(autocast)
        assert out.dtype == autocast
        assert_within(out, *reference_and_bound(a, b, alpha=0.5, beta=1.0, c=addend, out_dtype=autocast))
        grad = normal(*out.shape, dtype=autocast, seed=4)
        out.backward(grad)
        assert [t.grad.dtype for t in tensors] == [input_dtype, torch.float32, torch.float32]
        assert_within(tensors[1].grad, *reference_and_bound(grad, b.mT, alpha=0.5, out_dtype=torch.float32))


def test_out():
    for dtype in (torch.bfloat16, torch.float32):
        tensors = problem((3, 6, 5), dtype)
        expected = baddbmm(*tensors, beta=2)
        out = torch.full((3, 6, 5), math.nan, dtype=dtype)
        assert baddbmm(*tensors, beta=2, out=out) is out
        assert torch.equal(out, expected)
        with torch.autocast("cpu", torch.float16):
            assert torch.equal(baddbmm(*tensors, beta=2, out=out), expected)
        assert torch.equal(baddbmm(*tensors, beta=2, out=tensors[0]), expected)  # in place


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({1: torch.ones(2, 3)}, ValueError, r"baddbmm: batch1 has shape \[2, 3\]; accepted: \[B, M, K\]"),
        ({2: torch.ones(2, 4, 4).half()}, ValueError, r"batch2 \[2, 4, 4\]; accepted: \[B, M, K\] and \[B, K, N\]"),
        ({2: torch.ones(3, 3, 4).half()}, ValueError, r"batch2 \[3, 3, 4\]"),
        ({0: torch.ones(3, 4).half()}, ValueError, r"input has shape \[3, 4\]; accepted: .* \[2, 2, 4\]"),
        ({0: torch.ones(5, 2, 2, 4).half()}, ValueError, r"input has shape \[5, 2, 2, 4\]"),
        ({0: torch.ones(4).double()}, TypeError, "input has dtype float64; accepted: float16, float32"),
        ({2: torch.ones(2, 3, 4)}, TypeError, "batch1 is float16, batch2 is float32"),
        ({0: torch.ones(4, device="meta").half()}, ValueError, "batch1 is on cpu, but input is on meta"),
    ],
)
def test_bad_input(change, error, message):
    tensors = [torch.ones(4).half(), torch.ones(2, 2, 3).half(), torch.ones(2, 3, 4).half()]
    for position, tensor in change.items():
        tensors[position] = tensor
    with pytest.raises(error, match=message):
        baddbmm(*tensors)


def test_bad_out():
    tensors = problem((5,), torch.bfloat16)
    for out, error, message in (
        (torch.empty(3, 6, 5), TypeError, "out has dtype float32; accepted: bfloat16"),
        (torch.empty(6, 5).bfloat16(), ValueError, r"out has shape \[6, 5\]; accepted: \[3, 6, 5\]"),
        (tensors[1], ValueError, "out shares memory with batch1"),
    ):
        with pytest.raises(error, match=message):
            baddbmm(*tensors, out=out)
    with pytest.raises(RuntimeError, match="out is given while an operand"):
        baddbmm(*problem((5,), torch.bfloat16, grad=True), out=torch.empty(3, 6, 5).bfloat16())
