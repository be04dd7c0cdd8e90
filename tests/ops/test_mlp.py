"""mlp: forward and gradients against float64, autocast and shadows, bad input; see test_differentiable.py."""

import pytest
import torch
import torch.nn.functional as F

from amp_kernels._checks.activations import ACTIVATIONS, GATED
from amp_kernels.ops._shadows import refresh_shadow
from amp_kernels.ops.linear import linear
from amp_kernels.ops.mlp import mlp, op

from ..helpers.bounds import assert_within, frobenius_gate, reference_and_bound
from ..helpers.generators import HALF_DTYPES, normal
from .tensors import leaves, relative

NAMES = ("x", "w1", "b1", "w2", "b2")


def problem(activation, dtype, *, grad=True, rows=(3, 20), scale=1.0, biases=True):
    """x [3, 20, 70], hidden size 40, out [3, 20, 30]."""
    generator = torch.Generator().manual_seed(0)
    columns = 80 if activation in GATED else 40
    shapes = ((*rows, 70), (columns, 70), (columns,), (30, 40), (30,))
    scales = (1.0, 0.12, 0.5, 0.15, 0.5)
    tensors = [
        (scale * s * torch.randn(shape, generator=generator)).to(dtype).requires_grad_(grad)
        for shape, s in zip(shapes, scales, strict=True)
    ]
    return tensors if biases else [tensors[0], tensors[1], None, tensors[3], None]


def exact(x, w1, b1, w2, b2, activation):
    return F.linear(ACTIVATIONS[activation or "none"](F.linear(x, w1, b1)), w2, b2)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("biases", [True, False])
def test_forward_is_that_of_two_linears_and_gradients_those_of_float64(dtype, activation, biases):
    tensors = problem(activation, dtype, biases=biases)
    x, w1, b1, w2, b2 = tensors
    out = mlp(x, w1, b1, w2, b2, activation=activation)
    assert out.dtype == dtype
    hidden = linear(x, w1, b1, activation=activation)
    assert torch.equal(out, linear(hidden, w2, b2))
    with torch.no_grad():
        assert torch.equal(out, mlp(x, w1, b1, w2, b2, activation=activation))
    assert_within(out, *reference_and_bound(hidden.detach(), w2.t(), b2, out_dtype=dtype))
    grad = normal(*out.shape, dtype=dtype, seed=3)
    out.backward(grad)
    doubles = leaves(tensors, torch.float64)
    exact(*doubles, activation).backward(grad.double())
    for name, actual, leaf in zip(NAMES, tensors, doubles, strict=True):
        if actual is not None:
            assert actual.grad.dtype == dtype
            # Up to three roundings to 16 bits: h or z, dz, and the gradient itself.
            assert relative(actual.grad, leaf.grad) < 3 * frobenius_gate(dtype, 70), name


def test_the_backward_is_fused(op_calls):
    """One gemm_dact, which is given the bias to sum; no gradient of the hidden layer."""
    for biases in (True, False):
        x, w1, b1, w2, b2 = problem("swiglu", torch.bfloat16, biases=biases)
        mlp(x, w1, b1, w2, b2, activation="swiglu").sum().backward()
    fused = [(args[0].shape, kwargs.get("bias_grad", False)) for args, kwargs in op_calls["gemm_dact"]]
    assert fused == [((60, 30), True), ((60, 30), False)]


@pytest.mark.parametrize("shape", [(70,), (4, 70), (2, 3, 4, 70), (0, 70), (2, 0, 3, 70)])
def test_leading_dimensions(shape):
    _, w1, b1, w2, b2 = problem("swiglu", torch.float16)
    x = torch.ones(shape, dtype=torch.float16, requires_grad=True)
    out = mlp(x, w1, b1, w2, b2, activation="swiglu")
    assert out.shape == (*shape[:-1], 30)
    out.sum().backward()
    assert x.grad.shape == x.shape
    assert w1.grad.shape == w1.shape
    assert x.numel() or not w2.grad.any()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (3,), (4,), (1, 2), (0, 4), (3, 4), (1, 3)])
def test_only_the_gradients_that_are_needed(needed, recompute):
    saved = []
    tensors = problem("gelu", torch.bfloat16, grad=False)
    full = [t.detach().clone().requires_grad_() for t in tensors]
    mlp(*full, activation="relu").sum().backward()
    for i in needed:
        tensors[i].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        out = mlp(*tensors, activation="relu", recompute=recompute)
    out.sum().backward()
    for i, (actual, expected) in enumerate(zip(tensors, full, strict=True)):
        assert (actual.grad is None) == (i not in needed)
        assert actual.grad is None or torch.equal(actual.grad, expected.grad)
    hidden = 60 * 40
    inner = [hidden, 30 * 40] if {0, 1, 2} & set(needed) else []
    expected = inner + [60 * 70] * (1 in needed) + [40 * 70] * (0 in needed)
    expected += [hidden] * (3 in needed and not (recompute and inner))
    assert sorted(saved) == sorted(expected)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_recomputed_activations(dtype, activation):
    """The result and all gradients keep their bits, but that of weight2, which is within the bound of the docstring."""
    results, u = [], {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    for recompute in (False, True):
        tensors = problem(activation, dtype)
        out = mlp(*tensors, activation=activation, recompute=recompute)
        grad = normal(*out.shape, dtype=dtype, seed=3)
        out.backward(grad)
        results.append([out, *(t.grad for t in tensors)])
    for i, (kept, made) in enumerate(zip(*results, strict=True)):
        assert i == 4 or torch.equal(kept, made)
    x, w1, b1 = (t.detach().double() for t in tensors[:3])
    z = F.linear(x, w1, b1).flatten(0, 1).requires_grad_()
    h = ACTIVATIONS[activation or "none"](z)
    # Each element's |z h'(z)|; of swiglu both halves of z count.
    moved = z * torch.autograd.grad(h.sum(), z)[0]
    moved = moved.abs().unflatten(1, (-1, h.shape[1])).sum(1)
    bound = u * grad.flatten(0, 1).double().t().abs() @ (moved + 2 * h.detach().abs())
    kept, made = results[0][4].double(), results[1][4].double()
    assert ((kept - made).abs() <= 1.01 * bound + 2 * u * kept.abs()).all()
    assert activation not in (None, "relu") or torch.equal(kept, made)


@pytest.mark.parametrize("autocast", HALF_DTYPES)
def test_autocast(autocast):
    """fp32 parameters get fp32 gradients that were never rounded to 16 bits."""
    tensors = problem("swiglu", torch.float32)
    narrow = [t.detach().to(autocast).requires_grad_() for t in tensors]
    for i in (2, 4):  # biases stay fp32
        narrow[i] = tensors[i].detach().clone().requires_grad_()
    with torch.autocast("cpu", autocast):
        out = mlp(*tensors, activation="swiglu")
    assert torch.equal(out, mlp(*narrow, activation="swiglu"))
    grad = normal(*out.shape, seed=3).to(autocast)
    out.backward(grad)
    hidden = linear(*(t.detach() for t in narrow[:3]), activation="swiglu")
    reference, bound = reference_and_bound(grad.flatten(0, 1).t(), hidden.flatten(0, 1), out_dtype=torch.float32)
    assert_within(tensors[3].grad, reference, bound)
    assert [t.grad.dtype for t in tensors] == [torch.float32] * 5


def test_autocast_reads_fresh_shadows():
    tensors = problem("gelu", torch.float32)
    x, w1, b1, w2, b2 = tensors
    shadows = []
    for weight in (w1, w2):
        shadows.append(torch.empty_like(weight, dtype=torch.bfloat16, requires_grad=False))
        refresh_shadow(weight, shadows[-1])
        shadows[-1].mul_(2)  # recognisable: no copies
    expected = mlp(x.bfloat16(), shadows[0], b1, shadows[1], b2)
    with torch.autocast("cpu", torch.bfloat16):
        out = mlp(*tensors)
        through_the_dispatcher = op(*tensors)
    assert torch.equal(out, expected)
    assert torch.equal(through_the_dispatcher, expected)
    out.sum().backward()
    assert w1.grad.dtype == w2.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "activation", "error", "message"),
    [
        ({0: torch.ones(2, 7)}, "gelu", ValueError, r"mlp: x has shape \[2, 7\].*accepted: \[..., in_features\]"),
        ({0: torch.ones(())}, "gelu", ValueError, r"x has shape \[\]"),
        ({3: torch.ones(4, 5)}, "gelu", ValueError, r"weight2 \[4, 5\]; accepted: .*\[hidden_features, in_features\]"),
        ({}, "swiglu", ValueError, r"accepted: .*\[2 hidden_features, in_features\]"),
        ({1: torch.ones(5, 3)}, "swiglu", ValueError, r"weight1 has shape \[5, 3\]; .* even size 6 or 4"),
        ({2: torch.ones(5)}, "gelu", ValueError, r"bias1 has shape \[5\]; accepted: \[6\]"),
        ({4: torch.ones(3)}, "gelu", ValueError, r"bias2 has shape \[3\]; accepted: \[4\]"),
        ({4: torch.ones(4).half()}, "gelu", TypeError, "bias2 has dtype float16; accepted: float32"),
        ({3: torch.ones(4, 6).half()}, "gelu", TypeError, "weight2 is float16; accepted: one dtype"),
        ({3: torch.ones(4, 6, device="meta")}, "gelu", ValueError, "weight2 is on meta, but x is on cpu"),
        ({}, "mish", ValueError, "mlp: activation is 'mish'"),
    ],
)
def test_bad_input(change, activation, error, message):
    tensors = [torch.ones(2, 3), torch.ones(6, 3), torch.ones(6), torch.ones(4, 6), torch.ones(4)]
    for position, tensor in change.items():
        tensors[position] = tensor
    with pytest.raises(error, match=message):
        mlp(*tensors, activation=activation)
