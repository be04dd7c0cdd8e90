"""activation_backward: every 16-bit pre-activation, against the derivative in float64."""

import math

import pytest
import torch

from amp_kernels._checks.activations import ACTIVATIONS, GATED
from amp_kernels._dispatch.policy import requested_backend
from amp_kernels._raw.activation_backward import op
from amp_kernels._raw.column_sums import column_sums

from ..helpers.bounds import TINY, UNIT_ROUNDOFF, assert_within
from ..helpers.generators import HALF_DTYPES
from ..helpers.poison import embed, poisoned_allocations
from .raw import activation_backward


def derivative(z: torch.Tensor, activation: str) -> torch.Tensor:
    z = z.double().requires_grad_()
    return torch.autograd.grad(ACTIVATIONS[activation](z).sum(), z)[0]


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("grad_dtype", ["own", "float32"])
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name not in GATED])
def test_every_code(device, dtype, grad_dtype, activation):
    z = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    torchs = requested_backend() == "reference"
    # torch's tanh form in fp32 overflows for z^3 and gives NaN.
    z = z[z.abs() < (1e12 if torchs else math.inf)].to(device)
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(z.shape, generator=generator).to(device, dtype if grad_dtype == "own" else torch.float32)
    with poisoned_allocations():
        out = activation_backward(grad, z, activation=activation)
    reference = grad.double() * derivative(z, activation)
    # One rounding to the result's type, and the derivative in fp32: a few units of 2^-24 absolute, as it is of size 1;
    # more in torch's tanh form, which subtracts numbers near 1.
    derivative_error = 2.0**-18 if torchs else 2.0**-20
    bound = UNIT_ROUNDOFF[dtype] * reference.abs() + derivative_error * grad.double().abs() + TINY[dtype]
    assert out.dtype == dtype
    assert_within(out, reference, bound)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("grad_dtype", ["own", "float32"])
def test_every_code_as_a_gate_and_as_a_value(device, dtype, grad_dtype):
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    codes = codes[codes.abs() < 1e37].to(device)  # beyond, grad * up may overflow where silu' would bring it back
    generator = torch.Generator().manual_seed(0)
    others = torch.randn(codes.shape, generator=generator).to(device, dtype)
    z = torch.stack([torch.cat([codes, others]), torch.cat([others, codes])])
    grad = torch.randn(2, codes.numel(), generator=generator)
    grad = grad.to(device, dtype if grad_dtype == "own" else torch.float32)
    with poisoned_allocations():
        out = activation_backward(grad, z, activation="swiglu")
    z64 = z.double().requires_grad_()
    (reference,) = torch.autograd.grad(ACTIVATIONS["swiglu"](z64), z64, grad.double())
    gate, up = z.double().chunk(2, dim=-1)
    sizes = grad.double().abs() * torch.stack([up, torch.nn.functional.silu(gate)]).abs()
    # torch's exp overflows where silu is below 2^-118, which makes it 0.
    bound = 2.0**-18 * torch.cat(list(sizes), dim=-1) + 2.0**-118 * grad.double().abs().repeat(1, 2)
    bound = UNIT_ROUNDOFF[dtype] * reference.abs() + bound + TINY[dtype]
    assert_within(out, reference, bound)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_any_strides(device, activation):
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(3, 5, 14 if activation in GATED else 7, generator=generator).to(device, torch.bfloat16)
    grad = torch.randn(3, 5, 7, generator=generator).to(device, torch.bfloat16)
    expected = activation_backward(grad, z, activation=activation)
    strided = activation_backward(embed(grad, transposed=True)[0], embed(z, step=2, offset=1)[0], activation=activation)
    assert torch.equal(strided, expected)
    assert strided.is_contiguous()
    ones = torch.ones((), device=device, dtype=torch.bfloat16).expand(3, 5, 7)
    assert torch.equal(
        activation_backward(ones, z, activation=activation),
        activation_backward(ones.contiguous(), z, activation=activation),
    )
    assert activation_backward(grad[:0], z[:0], activation=activation).shape == (0, *z.shape[1:])


def test_relu_chooses_and_does_not_multiply(device):
    z = torch.tensor([-1.0, 0.0, 1.0, math.nan], device=device, dtype=torch.float16)
    grad = torch.full((4,), math.inf, device=device)
    assert activation_backward(grad, z, activation="relu").tolist() == [0, 0, math.inf, math.inf]


@pytest.mark.parametrize("dtype", [*HALF_DTYPES, torch.float32])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_sums_of_columns_are_those_of_the_rounded_result(device, dtype, activation):
    generator = torch.Generator().manual_seed(0)
    gates = 2 if activation in GATED else 1
    for shape in ((450, 72), (7, 9, 30), (33,), (0, 8), (8, 0)):
        z = torch.randn(*shape[:-1], gates * shape[-1], generator=generator).to(device, dtype)
        grad = torch.randn(shape, generator=generator).to(device, dtype)
        with poisoned_allocations():
            out, sums = activation_backward(grad, z, activation=activation, bias_grad=True)
        assert torch.equal(out, activation_backward(grad, z, activation=activation))
        if len(shape) > 1:
            transposed = grad.mT.contiguous().mT
            assert torch.equal(sums, activation_backward(transposed, z, activation=activation, bias_grad=True)[1])
        rows = out[None].flatten(0, -2)
        assert torch.equal(sums, column_sums(rows))
        exact = rows.double()
        assert_within(sums, exact.sum(0), len(rows) * 2.0**-24 * exact.abs().sum(0))


@pytest.mark.parametrize(
    ("grad", "preact", "activation", "error", "message"),
    [
        (torch.ones(2).double(), torch.ones(2), "relu", TypeError, "grad has dtype float64; accepted: float32"),
        (torch.ones(2).half(), torch.ones(2).bfloat16(), "relu", TypeError, "grad has dtype float16"),
        (torch.ones(2), torch.ones(2).int(), "relu", TypeError, "preact has dtype int32"),
        (torch.ones(3), torch.ones(2), "relu", ValueError, r"grad has shape \[3\]; accepted: \[2\]"),
        (torch.ones(2), torch.ones(2), "swiglu", ValueError, r"grad has shape \[2\]; accepted: \[1\]"),
        (torch.ones(1), torch.ones(3), "swiglu", ValueError, r"preact has shape \[3\]; .*an even size 4 or 2"),
        (torch.ones(()), torch.ones(()), "swiglu", ValueError, r"preact has no dimension"),
        (torch.ones(()), torch.ones(()), "relu", ValueError, r"preact has no dimension; accepted with bias_grad: \[\.\.\., F\]"),
        (torch.ones(2), torch.ones(2), "mish", ValueError, "activation is 'mish'"),
        (torch.ones(2, device="meta"), torch.ones(2), "relu", ValueError, "preact is on cpu, but grad is on meta"),
    ],
)  # fmt: skip
def test_bad_input(grad, preact, activation, error, message):
    with pytest.raises(error, match=message):
        op._without_cpp_kernel(grad, preact, activation=activation, bias_grad=True)
    if grad.device == preact.device:
        with pytest.raises(RuntimeError, match=r"^activation_backward: "):
            torch.ops.amp_kernels.activation_backward(grad, preact, activation=activation, bias_grad=True)
