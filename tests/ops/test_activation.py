"""gelu, silu and swiglu: every 16-bit input and its gradient against float64, and what autograd and torch.compile make of them."""

import math

import pytest
import torch

import amp_kernels as ak
from amp_kernels._checks.activations import ACTIVATIONS
from amp_kernels._raw.activation_forward import op as forward_op

from ..helpers.bounds import TINY, UNIT_ROUNDOFF, assert_within
from ..helpers.generators import HALF_DTYPES, normal
from ..helpers.poison import poisoned_allocations
from .targets import device_for

device = device_for(forward_op, without=("reference",))
FUNCTIONS = {
    "gelu": ak.gelu,
    "gelu_tanh": lambda x: ak.gelu(x, approximate="tanh"),
    "silu": ak.silu,
    "swiglu": ak.swiglu,
}
ALL = pytest.mark.parametrize("name", FUNCTIONS)


def codes(dtype, device, name):
    """Every finite number of a 16-bit dtype; of swiglu each as a gate and as a value, beside one of ordinary size."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = x[x.abs() < (1e12 if name == "gelu_tanh" else 1e37)]  # beyond, torch's own cubes and products overflow
    if name == "swiglu":
        others = normal(*x.shape, dtype=dtype)
        x = torch.stack([torch.cat([x, others]), torch.cat([others, x])])
    return x.to(device)


def check(x, name):
    """Result and gradient against float64."""
    dtype = x.dtype
    x = x.detach().requires_grad_()  # of the same memory
    with poisoned_allocations():
        y = FUNCTIONS[name](x)
        y.backward(torch.ones_like(y))
    x64 = x.detach().double().requires_grad_()
    want = ACTIVATIONS[name](x64)
    want.sum().backward()
    # csrc/activation/formula.h: 4 u |x|, and in the tail where the result is far below that, 2^-10 of it or 2^-33.
    size = x.detach().double().abs() if name != "swiglu" else x.detach().double().chunk(2, -1)[1].abs()
    slack = 4 * 2.0**-24 * size + 2.0**-10 * want.abs() * (want.abs() < 2.0**-10) + 2.0**-33
    slack = slack + (2.0**-22 * want.abs() if name == "swiglu" else 0.0)
    assert_within(y.detach(), want.detach(), slack.detach() + UNIT_ROUNDOFF[dtype] * want.detach().abs() + TINY[dtype])
    scale = x64.grad.abs() + (x.detach().double().abs().roll(x.shape[-1] // 2, -1) + 1 if name == "swiglu" else 1)
    bound = UNIT_ROUNDOFF[dtype] * x64.grad.abs() + 2.0**-20 * scale + TINY[dtype]
    assert x.grad.dtype == y.dtype == dtype
    assert_within(x.grad, x64.grad, bound)


@ALL
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_every_number(device, dtype, name):
    check(codes(dtype, device, name), name)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu"])
def test_nan_and_the_limits(device, name):
    x = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0], device=device).requires_grad_()
    y = FUNCTIONS[name](x)
    assert y[:2].tolist() == [math.inf, 0.0]
    assert y[2].isnan()
    assert y[3:].tolist() == [0.0, 0.0]
    y.backward(torch.ones_like(y))
    assert x.grad[:2].tolist() == [1.0, 0.0]
    assert x.grad[2].isnan()
    assert x.grad[3:].tolist() == [0.5, 0.5]


@ALL
def test_derivatives_of_every_kind(name):
    x = normal(3, 6)
    assert torch.autograd.gradgradcheck(FUNCTIONS[name], x.double().requires_grad_())
    second = []
    for t in (x.clone().requires_grad_(), x.double().requires_grad_()):
        (first,) = torch.autograd.grad(FUNCTIONS[name](t).square().sum(), t, create_graph=True)
        second.append(torch.autograd.grad(first.square().sum(), t)[0].double())
    torch.testing.assert_close(*second, rtol=1e-4, atol=1e-4)
    half = x.bfloat16()
    torch.testing.assert_close(torch.vmap(FUNCTIONS[name])(half), FUNCTIONS[name](half))
    _, tangent = torch.func.jvp(FUNCTIONS[name], (x,), (torch.ones_like(x),))
    _, wanted = torch.func.jvp(ACTIVATIONS[name], (x,), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, wanted)


@ALL
def test_compile_fullgraph_saves_nothing_but_the_input(name):
    x = normal(5, 12).bfloat16()
    torch._dynamo.reset()
    compiled = torch.compile(FUNCTIONS[name], backend="aot_eager", fullgraph=True)
    one, two = (x.clone().requires_grad_() for _ in range(2))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = FUNCTIONS[name](one)
    assert [t.data_ptr() for t in kept] == [one.data_ptr()]
    z = compiled(two)
    assert torch.equal(y, z)
    y.sum().backward()
    z.sum().backward()
    assert torch.equal(one.grad, two.grad)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: ak.gelu(torch.ones(2), approximate="erf"), ValueError, "gelu: approximate is 'erf'; accepted: 'none', 'tanh'"),
        (lambda: ak.silu(torch.ones(2).int()), TypeError, "silu: input has dtype int32"),
        (lambda: ak.swiglu(torch.ones(3)), ValueError, r"swiglu: input has shape \[3\]"),
        (lambda: ak.swiglu(torch.tensor(1.0)), ValueError, "swiglu: input has no dimension"),
        (lambda: ak.swiglu(torch.ones(2, 2).to_sparse()), TypeError, "swiglu: input has layout"),
        (lambda: ak.swiglu(torch.ones(3).double()), ValueError, r"swiglu: input has shape \[3\]"),
    ],
)  # fmt: skip
def test_bad_calls(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_the_raw_op_guards_memory():
    for namespace in ("overload", "emulated"):
        raw = getattr(forward_op, namespace)
        with pytest.raises(RuntimeError, match="activation_forward: preact must have an even number of columns"):
            raw(torch.ones(2, 3), activation="swiglu")
        with pytest.raises(RuntimeError, match="activation_forward: activation is 'mish'"):
            raw(torch.ones(2, 3), activation="mish")
        with pytest.raises(RuntimeError, match="activation_forward: preact"):
            raw(torch.ones(2, 3).double(), activation="gelu")
