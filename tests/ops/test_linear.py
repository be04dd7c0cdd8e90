"""linear: forward within the bound, gradients in the right dtype and rounded once, autocast, shadows; see test_differentiable.py."""

import pytest
import torch
import torch.nn.functional as F

from amp_kernels._checks.activations import ACTIVATIONS
from amp_kernels.ops._shadows import refresh_shadow
from amp_kernels.ops.linear import linear, op

from ..helpers.bounds import assert_within, frobenius_gate, reference_and_bound
from ..helpers.generators import HALF_DTYPES, normal
from .tensors import leaves, relative

pytestmark = pytest.mark.usefixtures("implementation")

PUBLIC_ACTIVATIONS = [None, "relu", "gelu", "gelu_tanh", "silu", "swiglu"]


def problem(dtype, bias_dtype, grad=False, rows=(3, 20)):
    """x [3, 20, 70], weight [50, 70], bias [50]."""
    return (
        normal(*rows, 70, dtype=dtype, grad=grad),
        normal(50, 70, dtype=dtype, seed=1, grad=grad, scale=0.12),
        None if bias_dtype is None else normal(50, dtype=bias_dtype, seed=2, grad=grad),
    )


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("bias", [None, "own", "float32"])
@pytest.mark.parametrize("activation", PUBLIC_ACTIVATIONS)
def test_forward_is_within_the_bound(dtype, bias, activation):
    x, weight, bias = problem(dtype, {None: None, "own": dtype, "float32": torch.float32}[bias])
    out = linear(x, weight, bias, activation=activation)
    assert out.dtype == dtype
    reference, bound = reference_and_bound(x, weight.t(), bias, activation=activation, out_dtype=dtype)
    assert_within(out, reference, bound)
    recorded = linear(x.requires_grad_(), weight, bias, activation=activation)
    assert torch.equal(recorded, out)


@pytest.mark.parametrize("shape", [(70,), (4, 70), (2, 3, 4, 70), (0, 70), (2, 0, 3, 70)])
def test_leading_dimensions(shape):
    x, weight = normal(*shape, dtype=torch.float16, grad=True), normal(50, 70, dtype=torch.float16, seed=1, grad=True)
    out = linear(x, weight, activation="gelu")
    assert out.shape == (*shape[:-1], 50)
    out.sum().backward()
    assert x.grad.shape == x.shape
    assert weight.grad.shape == weight.shape
    assert x.numel() or not weight.grad.any()


def test_no_input_features_leave_the_activated_bias():
    x = torch.zeros(3, 0, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(4, 0, dtype=torch.float16, requires_grad=True)
    bias = torch.tensor([-1.0, 0.0, 1.0, 2.0], requires_grad=True)
    out = linear(x, weight, bias, activation="relu")
    assert torch.equal(out, bias.detach().relu().half().expand(3, 4))
    out.sum().backward()
    assert (x.grad.shape, weight.grad.shape) == ((3, 0), (4, 0))
    assert bias.grad.tolist() == [0, 0, 3, 3]
    no_outputs = linear(
        torch.zeros(3, 5, dtype=torch.float16), torch.zeros(0, 5, dtype=torch.float16), activation="silu"
    )
    assert no_outputs.shape == (3, 0)


# ---- gradients


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("activation", PUBLIC_ACTIVATIONS)
@pytest.mark.parametrize("bias", [None, "own", "float32"])
def test_gradients(dtype, activation, bias):
    x, weight, bias = problem(dtype, {None: None, "own": dtype, "float32": torch.float32}[bias], grad=True)
    out = linear(x, weight, bias, activation=activation)
    grad = normal(*out.shape, dtype=dtype, seed=3)
    out.backward(grad)
    exact = leaves((x, weight, bias), torch.float64)
    ACTIVATIONS[activation or "none"](F.linear(*exact)).backward(grad.double())
    for actual, leaf in zip((x, weight, bias), exact, strict=True):
        if actual is not None:
            assert actual.grad.dtype == actual.dtype
            # Up to three roundings to 16 bits: z, dz and the gradient itself.
            assert relative(actual.grad, leaf.grad) < (1 if activation is None else 3) * frobenius_gate(dtype, 70)


@pytest.mark.parametrize("autocast", HALF_DTYPES)
@pytest.mark.parametrize("weight_dtype", [torch.float32, *HALF_DTYPES])
@pytest.mark.parametrize("x_dtype", [torch.float32, *HALF_DTYPES])
def test_autocast(autocast, weight_dtype, x_dtype):
    """Computes in the user's dtype, and each gradient comes in the dtype of its tensor, with one rounding and no cast
    before."""
    x = normal(6, 70, dtype=x_dtype, grad=True)
    weight = normal(50, 70, dtype=weight_dtype, seed=1, grad=True)
    bias = None
    if weight_dtype == torch.float32:
        bias = normal(50, seed=2, grad=True)
    with torch.autocast("cpu", autocast):
        out = linear(x, weight, bias)
    assert out.dtype == autocast
    x16, weight16 = x.detach().to(autocast), weight.detach().to(autocast)
    assert_within(out, *reference_and_bound(x16, weight16.t(), bias, out_dtype=autocast))
    grad = normal(6, 50, dtype=autocast, seed=3)
    out.backward(grad)
    for tensor, operands in ((x, (grad, weight16)), (weight, (grad.t(), x16))):
        assert tensor.grad.dtype == tensor.dtype
        assert_within(tensor.grad, *reference_and_bound(*operands, out_dtype=tensor.dtype))
    if bias is not None:
        torch.testing.assert_close(bias.grad, grad.double().sum(0).float(), rtol=1e-6, atol=1e-6)


def test_autocast_saves_16_bit_tensors_only():
    saved = []
    x, weight, bias = problem(torch.float32, torch.float32, grad=True)
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        linear(x, weight, bias, activation="gelu")
    assert sorted(t.numel() for t in saved) == sorted((x.numel(), weight.numel(), 60 * 50))
    assert all(t.dtype == torch.bfloat16 for t in saved)


def test_only_the_gradients_that_are_needed():
    """A frozen weight needs no saved x, and one product; a frozen input needs no saved weight."""
    for frozen, kept in ((1, 50 * 70), (0, 60 * 70)):
        saved, tensors = [], list(problem(torch.bfloat16, None, grad=True))
        tensors[frozen].requires_grad_(False)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):  # noqa: B023
            out = linear(*tensors)
        assert saved == [kept]
        out.sum().backward()
        assert tensors[frozen].grad is None
        assert tensors[1 - frozen].grad is not None


# ---- shadows


def test_a_shadow_is_read_in_place_of_the_weight():
    x, weight = normal(4, 8), normal(3, 8, seed=1, grad=True)
    shadow = normal(3, 8, seed=9, dtype=torch.bfloat16)  # recognisable: it is no copy of the weight
    out = op(x, weight, None, shadow, compute_dtype=torch.bfloat16)
    assert torch.equal(out, linear(x.bfloat16(), shadow))
    out.float().sum().backward()
    assert weight.grad.dtype == torch.float32
    assert torch.equal(weight.grad, x.bfloat16().float().sum(0).expand(3, 8))


def keep_shadow(weight, dtype, seed=9):
    """A shadow as an optimizer keeps it, with values that tell it from a copy of the weight."""
    shadow = torch.empty_like(weight, dtype=dtype, requires_grad=False)
    refresh_shadow(weight, shadow)
    return shadow.copy_(normal(*weight.shape, seed=seed))


def test_autocast_looks_for_a_fresh_shadow():
    x, weight = normal(4, 8), normal(3, 8, seed=1, grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear(x, weight), linear(x, weight.detach().bfloat16()))
    shadow = keep_shadow(weight, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear(x, weight), linear(x.bfloat16(), shadow))
    with torch.autocast("cpu", torch.float16):  # the shadow is of another dtype
        assert torch.equal(linear(x, weight), linear(x, weight.detach().half()))
    assert linear(x, weight).dtype == torch.float32


def test_a_shadow_changed_before_backward_is_an_error():
    """As in autograd everywhere: backward must not silently use the weights of the next step."""
    x, weight = normal(4, 8, grad=True), normal(3, 8, seed=1, grad=True)
    shadow = keep_shadow(weight, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        out = linear(x, weight)
    shadow.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# ---- strides, bad input


def test_expanded_and_transposed_inputs():
    x, weight, _ = problem(torch.bfloat16, None)
    wide = x[:1].expand(5, 20, 70)
    assert torch.equal(linear(wide, weight), linear(wide.contiguous(), weight))
    assert torch.equal(linear(x.transpose(0, 1), weight), linear(x, weight).transpose(0, 1))
    assert torch.equal(linear(x, weight.t().contiguous().t()), linear(x, weight))


X, W = torch.ones(2, 3), torch.ones(4, 3)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((X.half(), W), TypeError, "x is float16, weight is float32; accepted: one dtype"),
        ((X.half(), W.bfloat16()), TypeError, "x is float16, weight is bfloat16"),
        ((X.long(), W), TypeError, "x has dtype int64"),
        ((X, W.cfloat()), TypeError, "weight has dtype complex64"),
        ((X, W[:, 0]), ValueError, r"weight \[4\]; accepted: \[..., in_features\]"),
        ((X, W[:, :2]), ValueError, r"x has shape \[2, 3\] and weight \[4, 2\]"),
        ((X[0, 0], W), ValueError, r"x has shape \[\]"),
        ((X, W, X[0]), ValueError, r"bias has shape \[3\]; accepted: \[4\]"),
        ((X, W, W[:, 0].half()), TypeError, "bias has dtype float16; accepted: float32"),
        ((X.half(), W.half(), W[:, 0].bfloat16()), TypeError, "bias has dtype bfloat16"),
        ((X, W.to("meta")), ValueError, "weight is on meta, but x is on cpu"),
        ((X, W, None, "tanh"), ValueError, "activation is 'tanh'; accepted: None, 'none', 'relu'"),
        ((X, W, None, torch.relu), ValueError, "activation is <built-in"),
    ],
)
def test_bad_input(arguments, error, message):
    x, weight, bias, activation = (*arguments, None, None)[:4]
    with pytest.raises(error, match=message):
        linear(x, weight, bias, activation=activation)


def test_a_bad_shadow():
    with pytest.raises(TypeError, match="shadow has dtype float16; accepted: bfloat16"):
        op(X, W, None, W.half(), compute_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="shadow has shape"):
        op(X, W, None, W.t().half(), compute_dtype=torch.float16)
