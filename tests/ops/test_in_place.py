"""A result may be written in place, and detached, as one of torch's: none is a view that a Function returned. The version
counter guards the parts of a result that an op saved."""

import contextlib
import itertools

import pytest
import torch

import amp_kernels as ak
from amp_kernels._dispatch import nodes

from ..helpers.generators import normal
from .tensors import leaves

BF16 = torch.bfloat16


def classes(*shape):
    return torch.arange(torch.Size(shape).numel()).reshape(shape) % 6


#: Functions of x ``[..., 6]`` and of a square matrix and a vector, ``w`` and ``v``.
DIFFERENTIABLE = {
    "linear": lambda x, w, v: ak.linear(x, w, v),
    "linear gelu": lambda x, w, v: ak.linear(x, w, v, activation="gelu"),
    "mlp": lambda x, w, v: ak.mlp(x, w, v, w),
    "matmul": lambda x, w, v: ak.matmul(x, w),
    "matmul of batches": lambda x, w, v: ak.matmul(x.reshape(-1, 6).expand(2, 1, -1, 6), w.expand(4, 6, 6)),
    "matmul of vectors": lambda x, w, v: ak.matmul(x, v),
    "addmm": lambda x, w, v: ak.addmm(v, x.reshape(-1, 6), w),
    "baddbmm": lambda x, w, v: ak.baddbmm(v, x.reshape(1, -1, 6), w[None]),
    "layer_norm": lambda x, w, v: ak.layer_norm(x, 6, v, v),
    "rms_norm": lambda x, w, v: ak.rms_norm(x, (6,), v),
    "norm of a sum": lambda x, w, v: ak.layer_norm(x, 6, v, residual=x)[0],
    "sum of a norm": lambda x, w, v: ak.layer_norm(x, 6, v, residual=x)[1],
    "gelu": lambda x, w, v: ak.gelu(x),
    "swiglu": lambda x, w, v: ak.swiglu(x),
    "embedding": lambda x, w, v: ak.embedding(classes(*x.shape[:-1]), w),
    "cross_entropy": lambda x, w, v: ak.cross_entropy(
        x.movedim(-1, min(1, x.ndim - 1)), classes(*x.shape[:-1]), reduction="none"
    ),
    "linear_cross_entropy": lambda x, w, v: ak.linear_cross_entropy(x, w, classes(*x.shape[:-1]), reduction="none"),
}
SAVE_THEIR_RESULT = ("sum of a norm",)
ONCE = ("cross_entropy", "linear_cross_entropy")  # not differentiable twice
WRITE = (
    (lambda y: y.add_(0.5), lambda y: y.add(0.5)),
    (lambda y: y.relu_(), lambda y: y.relu()),
    (lambda y: y.mul_(-2), lambda y: y.mul(-2)),
)
SHAPES = ((6,), (1, 6), (4, 6), (2, 3, 6))
PATHS = {
    "nodes": contextlib.nullcontext,
    "python": nodes.refused,
    "batch_invariant": ak.batch_invariant,
    "reference": lambda: ak.backend("reference"),
}


@pytest.fixture(params=PATHS)
def path(request):
    with PATHS[request.param]():
        yield request.param


def arguments(shape):
    return [normal(*size, dtype=BF16, seed=i, grad=True, scale=0.5) for i, size in enumerate((shape, (6, 6), (6,)))]


def gradients(name, shape, write):
    """Gradients of a loss over the written result, and of these gradients where the function has second ones."""
    inputs = arguments(shape)
    torch.manual_seed(0)
    y = write(DIFFERENTIABLE[name](*inputs))
    loss = (y.float() ** 3).sum()
    first = torch.autograd.grad(loss, inputs, create_graph=name not in ONCE, allow_unused=True)
    if name in ONCE:
        return y.detach(), *first
    again = sum((g.float() ** 2).sum() for g in first if g is not None)
    return y.detach(), *first, *torch.autograd.grad(again, inputs, allow_unused=True)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_writing_in_place_is_writing_a_copy(path, name):
    for shape, (in_place, copied) in itertools.product(SHAPES, WRITE):
        expected = gradients(name, shape, copied)
        if name in SAVE_THEIR_RESULT:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                gradients(name, shape, in_place)
            continue
        for ours, own in zip(gradients(name, shape, in_place), expected, strict=True):
            assert (ours is None) == (own is None)
            assert ours is None or torch.equal(ours, own)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_detaching_in_place(path, name):
    for shape, recorded in itertools.product(SHAPES, (True, False)):
        with torch.set_grad_enabled(recorded):
            y = DIFFERENTIABLE[name](*arguments(shape))
        assert y.requires_grad == recorded
        assert not y._is_view()
        assert not y.detach_().requires_grad


@pytest.mark.parametrize("name", ["linear gelu", "mlp", "matmul of batches", "norm of a sum"])
def test_compiled(name):
    torch._dynamo.reset()
    compiled = torch.compile(lambda *t: DIFFERENTIABLE[name](*t).relu_(), fullgraph=True, backend="aot_eager")
    inputs = arguments((2, 3, 6))
    expected = leaves(inputs, BF16)
    compiled(*inputs).sum().backward()
    DIFFERENTIABLE[name](*expected).relu().sum().backward()
    for ours, own in zip(inputs, expected, strict=True):
        assert (ours.grad is None) == (own.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, own.grad)
