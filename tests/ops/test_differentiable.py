"""Properties that linear, mlp, matmul, baddbmm and addmm share: derivatives of any order, torch's own arithmetic in fp32 and fp64,
torch.compile, and eager calls that skip the dispatcher."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

import amp_kernels as ak
from amp_kernels._checks.activations import ACTIVATIONS
from amp_kernels.ops._shadows import refresh_shadow

from ..helpers.generators import normal
from .tensors import gradient_penalty, leaves, relative, within

SMALL = {"m": 2, "k": 3, "n": 4, "h": 6, "g": 3, "a": 2, "b": 3}
LARGE = {"m": 24, "k": 16, "n": 20, "h": 40, "g": 20, "a": 2, "b": 3}


@dataclass(frozen=True)
class Case:
    """``ours`` and ``stock``, torch's own form, of tensors whose sizes are letters: ``mk`` is ``[m, k]``. The op itself is called with
    ``options``, and after the tensors with shadows of those numbered ``weights``."""

    ours: Callable
    stock: Callable
    shapes: str
    op: ak._dispatch.library.Op
    options: dict = field(default_factory=dict)
    weights: tuple[int, ...] = ()

    def tensors(self, sizes=LARGE, dtype=torch.float32, scale=0.3):
        shapes = [[sizes[letter] for letter in word if letter != "-"] for word in self.shapes.split()]
        return [normal(*shape, dtype=dtype, seed=i, scale=scale, grad=True) for i, shape in enumerate(shapes)]

    def run(self, tensors, compute_dtype=None, with_shadows=False):
        shadows = [tensors[i].detach().to(compute_dtype) for i in self.weights] if with_shadows else []
        return self.op(*tensors, *shadows, **self.options, compute_dtype=compute_dtype)


def linear(activation):
    return Case(
        lambda *t: ak.linear(*t, activation=activation),
        lambda *t: ACTIVATIONS[activation](F.linear(*t)),
        "mk nk n",
        ak.ops.linear.op,
        {"activation": activation},
        (1,),
    )


def mlp(activation):
    return Case(
        lambda *t: ak.mlp(*t, activation=activation),
        lambda x, w1, b1, w2, b2: F.linear(ACTIVATIONS[activation](F.linear(x, w1, b1)), w2, b2),
        "mk hk h ng n" if activation == "swiglu" else "mk gk g ng n",
        ak.ops.mlp.op,
        {"activation": activation},
        (1, 3),
    )


def add(ours, stock, shapes):
    options = {"beta": 0.5, "alpha": -2.0}
    return Case(lambda *t: ours(*t, **options), lambda *t: stock(*t, **options), shapes, ak.ops.baddbmm.op, options)


CASES = {
    **{f"linear {name}": linear(name) for name in ACTIVATIONS},
    **{f"mlp {name}": mlp(name) for name in ACTIVATIONS},
    **{
        f"matmul {s}": Case(ak.matmul, torch.matmul, s, ak.ops.matmul.op)
        for s in ("mk kn", "amk kn", "abmk bkn", "k k")
    },
    "baddbmm": add(ak.baddbmm, torch.baddbmm, "n amk akn"),
    "addmm": add(ak.addmm, torch.addmm, "mn mk kn"),
}
EACH = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
AUTOCAST = pytest.mark.parametrize("autocast", [None, torch.float16, torch.bfloat16])


@EACH
def test_gradcheck_in_float64(case):
    tensors = case.tensors(SMALL, torch.float64)
    assert gradcheck(case.ours, tensors)
    assert gradgradcheck(case.ours, tensors)


@EACH
@AUTOCAST
@pytest.mark.parametrize("with_shadows", [False, True])
def test_double_backward(case, autocast, with_shadows):
    if with_shadows and not (case.weights and autocast):
        return  # the same as without
    tensors = case.tensors()
    for inputs in (1, len(tensors)):
        expected = gradient_penalty(case.stock, leaves(tensors, torch.float64), inputs)
        actual = gradient_penalty(
            lambda *t: case.run(t, autocast, with_shadows),
            leaves(tensors, torch.float32 if autocast else torch.float16),
            inputs,
        )
        for one, other in zip(actual, expected, strict=True):
            assert one.dtype == (torch.float32 if autocast else torch.float16)
            # some ten roundings, each of half an ulp at most
            assert relative(one, other) < (8e-2 if autocast == torch.bfloat16 else 5e-3)


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_types_are_torchs_own(case, dtype):
    tensors = case.tensors(dtype=dtype)
    assert torch.equal(case.ours(*tensors), case.stock(*tensors))
    if dtype == torch.float64:  # not eligible for autocast
        with within(torch.bfloat16):
            assert torch.equal(case.ours(*tensors), case.stock(*tensors))


def same_results(tensors, *functions):
    """Results and gradients of all functions, bit for bit."""
    results = []
    for function in functions:
        copies = leaves(tensors, tensors[0].dtype)
        out = function(*copies)
        out.float().pow(2).sum().backward()
        results.append([out.detach(), *(t.grad for t in copies)])
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["linear gelu", "mlp gelu", "mlp swiglu", "matmul amk kn", "baddbmm"])
@AUTOCAST
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(name, autocast, dynamic):
    case, options = CASES[name], {"out_dtype": torch.float32} if "matmul" in name else {}

    def step(*tensors):
        with within(autocast):
            return case.ours(*tensors, **options)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for m in (4, 6) if dynamic else (4,):
        same_results(case.tensors({**LARGE, "m": m}, torch.float32 if autocast else torch.bfloat16), step, compiled)


@EACH
@AUTOCAST
@pytest.mark.parametrize("with_shadows", [False, True])
def test_eager_calls_do_what_the_dispatcher_does(case, autocast, with_shadows, monkeypatch):
    """The public function runs the op as plain Python where it can, and leaves the dispatcher out."""
    through, overload = [], case.op.overload
    monkeypatch.setattr(case.op, "overload", lambda *a, **k: through.append(1) or overload(*a, **k))

    def call(function, weight_copies, *tensors):
        for i in case.weights if with_shadows and autocast else ():
            weight_copies.append(torch.empty_like(tensors[i], dtype=autocast, requires_grad=False))
            refresh_shadow(tensors[i], weight_copies[-1])
            weight_copies[-1].mul_(2)  # recognisable: no copies
        with within(autocast):
            return function(*tensors)

    tensors, kept = case.tensors(dtype=torch.float32 if autocast else torch.bfloat16), []
    eager = call(case.ours, kept, *leaves(tensors, tensors[0].dtype))
    assert not through
    same_results(
        tensors, lambda *t: call(case.ours, kept, *t), lambda *t: call(lambda *t: case.op(*t, **case.options), kept, *t)
    )
    assert through
    assert not kept or not torch.equal(eager, case.run(tensors, autocast))


TARGET = torch.tensor([0, 3, -100, 1])
BIASED = {
    "linear": lambda x, w, b: ak.linear(x, w, b, activation="silu"),
    "mlp": lambda x, w, b: ak.mlp(x, w, b, w),
    "mlp, second layer": lambda x, w, b: ak.mlp(x, w, None, w, b),
    "linear_cross_entropy": lambda x, w, b: ak.linear_cross_entropy(x, w, TARGET, linear_bias=b),
    "linear_cross_entropy of each row": lambda x, w, b: ak.linear_cross_entropy(
        x, w, TARGET, linear_bias=b, reduction="none"
    ),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("autocast", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", BIASED)
def test_autocast_rounds_a_bias_of_the_other_16_bit_dtype(name, autocast, grad):
    """As torch's autocast does: a model in fp16 runs in bf16. The bias gets the gradient of what it was rounded to, rounded once to
    its own dtype."""
    other = torch.bfloat16 if autocast == torch.float16 else torch.float16
    x, w = normal(4, 8, dtype=other, seed=1, grad=grad), normal(8, 8, dtype=other, seed=2, grad=grad)
    bias = normal(8, dtype=other, seed=3, grad=grad)
    rounded = bias.detach().to(autocast).float().requires_grad_(grad)
    with within(autocast):
        ours, expected = BIASED[name](x, w, bias), BIASED[name](x, w, rounded)
    assert torch.equal(ours, expected)
    if grad:
        for y in (ours, expected):
            y.float().square().sum().backward()
        assert bias.grad.dtype == other
        assert torch.equal(bias.grad, rounded.grad.to(other))
    with pytest.raises(TypeError, match=r"bias[12]? has dtype"):
        BIASED[name](x.detach(), w.detach(), bias.detach().to(autocast))
