"""Norms and cross-entropy in C++ (csrc/autograd): bit by bit what the Python functions give, taken where a
call is plain and only there."""

import contextlib
import threading
from functools import partial

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

import amp_kernels as ak
from amp_kernels._dispatch import load, nodes

from ..helpers.generators import normal
from .test_nodes import autocast, python_calls

pytestmark = pytest.mark.skipif("nodes" in load.absent(), reason=f"no _nodes: {load.absent().get('nodes')}")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CLASSES = torch.tensor([3, 49, -100, 0])

FUNCTIONS = {
    "layer_norm": lambda x, weight, bias: ak.layer_norm(x, 50, weight, bias),
    "layer_norm of a part": lambda x, weight, bias: ak.layer_norm(x.view(4, 5, 10)[:, 1:], [4, 10]),
    "rms_norm": lambda x, weight, bias: ak.rms_norm(x, (50,), weight),
    "norm of a sum": lambda x, weight, bias: ak.layer_norm(x, 50, weight, bias, residual=x.float().flip(0))[0],
    "sum of a norm": lambda x, weight, bias: ak.rms_norm(x, 50, weight, residual=2 * x.detach())[1],
    "cross_entropy": lambda x, *_: ak.cross_entropy(x, CLASSES),
    "a smoothed sum": lambda x, *_: ak.cross_entropy(x, CLASSES, reduction="sum", label_smoothing=0.1, z_loss=0.01),
}
ONCE = ("cross_entropy", "a smoothed sum")  # not differentiable twice


def in_cpp(out):
    """True if the node of ``out``, or before a cast of the result, is not one of a Python function."""
    node = out.grad_fn
    before = [node, *(following for following, _ in node.next_functions)] if "Copy" in node.name() else [node]
    return not any(isinstance(n, torch.autograd.function.BackwardCFunction) for n in before)


def results(name, arguments, under_autocast):
    """Output and gradients, of a first and a kept graph, and where there are any, gradients of gradients."""
    arguments = [t.detach().clone().requires_grad_(t.requires_grad) for t in arguments]
    with autocast() if under_autocast else contextlib.nullcontext():
        out = FUNCTIONS[name](*arguments)
    found, wanted = [out.detach()], [t for t in arguments if t.requires_grad]
    if out.requires_grad:
        weights = torch.linspace(-1, 3, out.numel()).view(out.shape)
        options = {"allow_unused": True}
        if name not in ONCE:
            grads = torch.autograd.grad((out.float() ** 2 * weights).sum(), wanted, create_graph=True, **options)
            total = sum(g.float().square().sum() for g in grads if g is not None)
            found += [*grads, *(torch.autograd.grad(total, wanted, retain_graph=True, **options) if total else ())]
        for again in (True, False):
            found += torch.autograd.grad((out.float() * weights).sum(), wanted, retain_graph=again, **options)
    return found, out


@pytest.mark.parametrize("requires", [(True, True, True), (False, True, False), (True, False, False), (False,) * 3])
@pytest.mark.parametrize("under_autocast", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_bits_of_python(name, under_autocast, requires):
    for dtype, parameters in ((BF16, FP32), (FP16, FP16), (FP32, FP32), (FP32, BF16)):
        arguments = [
            normal(*shape, dtype=t, seed=i, grad=grad)
            for i, (shape, t, grad) in enumerate(
                zip([(4, 50), (50,), (50,)], (dtype, parameters, parameters), requires, strict=True)
            )
        ]
        ours, out = results(name, arguments, under_autocast)
        assert not out.requires_grad or in_cpp(out)
        with nodes.refused():
            theirs, python = results(name, arguments, under_autocast)
        assert not out.requires_grad or not in_cpp(python)
        torch.testing.assert_close([*ours], [*theirs], rtol=0, atol=0)


def of_sum(arguments, used, under_autocast):
    """Norm and sum, gradients of those of them that are used, and gradients of gradients."""
    x, weight, bias, residual = arguments = [t.detach().clone().requires_grad_(t.requires_grad) for t in arguments]
    with autocast() if under_autocast else contextlib.nullcontext():
        outputs = ak.layer_norm(x, (5, 10), weight, bias, residual=residual)
    wanted = [t for t in arguments if t.requires_grad]
    found = [out.detach() for out in outputs]
    loss = sum(
        (out.float() ** 2 * torch.linspace(-1, 3, 200).view(4, 5, 10)).sum()
        for out, use in zip(outputs, used, strict=True)
        if use
    )
    if wanted and loss.requires_grad:
        options = {"allow_unused": True, "retain_graph": True}
        found += torch.autograd.grad(loss, wanted, **options)
        grads = torch.autograd.grad(loss, wanted, create_graph=True, **options)
        found += grads
        total = sum(g.float().square().sum() for g in grads if g is not None and g.requires_grad)
        found += torch.autograd.grad(total, wanted, **options) if torch.is_tensor(total) else []
    return found, outputs


@pytest.mark.parametrize(
    "requires",
    [(True,) * 4, (True, False, False, False), (False, True, False, True), (False, True, True, False), (False,) * 4],
)
@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("under_autocast", [False, True])
def test_bits_of_python_with_a_residual(under_autocast, used, requires):
    for dtypes in (
        (BF16, FP32, FP32, FP32),
        (FP16, FP16, FP16, FP16),
        (FP32, FP32, BF16, BF16),
        (FP32, BF16, FP32, FP32),
    ):
        shapes = (4, 5, 10), (5, 10), (5, 10), (4, 5, 10)
        arguments = [
            normal(*shape, dtype=dtype, seed=i, grad=grad)
            for i, (shape, dtype, grad) in enumerate(zip(shapes, dtypes, requires, strict=True))
        ]
        ours, outputs = of_sum(arguments, used, under_autocast)
        assert not outputs[0].requires_grad or all(map(in_cpp, outputs))
        with nodes.refused():
            theirs, python = of_sum(arguments, used, under_autocast)
        assert not any(out.requires_grad and in_cpp(out) for out in python)
        torch.testing.assert_close([*ours], [*theirs], rtol=0, atol=0)


def test_what_is_not_plain_about_a_residual_is_pythons():
    x = normal(4, 50, dtype=BF16, grad=True)
    weight = normal(50, dtype=BF16)
    residual = normal(4, 50, dtype=BF16, grad=True)
    assert in_cpp(ak.rms_norm(x, 50, weight, residual=residual)[0])
    assert in_cpp(ak.rms_norm(x[:, ::2], 25, residual=residual.t()[:25].t())[0])
    wide = residual.detach().requires_grad_()
    wide.grad_dtype = FP32
    assert not in_cpp(ak.rms_norm(x, 50, weight, residual=wide)[0])
    with pytest.raises(ValueError, match="residual has shape"):
        ak.rms_norm(x, 50, weight, residual=residual[:1])
    with pytest.raises(TypeError, match="residual"):
        ak.rms_norm(x, 50, weight, residual=residual.double())
    with pytest.raises(TypeError, match="residual"):
        ak.rms_norm(x, 50, weight, residual=1.0)


def test_a_sum_that_changed_is_an_error():
    x, weight, residual = (normal(*shape, dtype=FP32, grad=True) for shape in ((4, 50), (50,), (4, 50)))
    y, total = ak.rms_norm(x, 50, weight, residual=residual)
    total.mul_(2)  # which records that, as for the sum of torch
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    "surroundings", [lambda: ak.backend("reference"), lambda: torch.overrides.BaseTorchFunctionMode(), nodes.refused]
)
def test_other_surroundings_take_python_in_the_forward_and_in_the_backward(name, surroundings):
    x, weight, bias = normal(4, 50, dtype=BF16, grad=True), normal(50, dtype=BF16), normal(50, dtype=BF16)
    with surroundings():
        assert not in_cpp(FUNCTIONS[name](x, weight, bias))
    out = FUNCTIONS[name](x, weight, bias)
    assert in_cpp(out)
    (expected,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    with surroundings():
        (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.allclose(grad, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "norm of a sum", "cross_entropy"])
def test_compiled_autograd_traces_the_node(name):
    x, weight, bias = normal(4, 50, dtype=FP32, grad=True), normal(50, dtype=FP32, grad=True), normal(50, dtype=FP32)
    grads = []
    for compiler in (lambda graph: graph, None):
        x.grad = None
        out = FUNCTIONS[name](x, weight, bias)
        assert in_cpp(out)
        with compiled_autograd._enable(compiler) if compiler else contextlib.nullcontext():
            (out * 3).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_compiled_autograd_traces_anew_for_another_number():
    target = torch.tensor([3, 0, 49, 7])
    for smoothing in (0.0, 0.25):
        grads = []
        for compiled in (True, False):
            logits = normal(4, 50, dtype=FP16, grad=True)  # fp16: the gradient is made in the backward
            loss = ak.cross_entropy(logits, target, label_smoothing=smoothing)
            assert in_cpp(loss)
            with compiled_autograd._enable(lambda graph: graph) if compiled else contextlib.nullcontext():
                loss.backward()
            grads.append(logits.grad)
        assert torch.equal(*grads)


def test_errors_are_pythons():
    x = normal(4, 50, dtype=FP32, grad=True)
    with pytest.raises(ValueError, match="weight"):
        ak.layer_norm(x, 50, torch.ones(49))
    with pytest.raises(ValueError, match=r"^cross_entropy: target\[1\] is 50"):
        ak.cross_entropy(x, torch.tensor([0, 50, 0, 0]))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_graph_is_used_once_and_what_it_saved_may_not_change(name):
    x, weight, bias = normal(4, 50, dtype=FP32, grad=True), normal(50, dtype=FP32, grad=True), normal(50, dtype=FP32)
    out = FUNCTIONS[name](x * 1, weight, bias)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()
    if name.startswith("layer_norm") or name == "rms_norm":
        changed = x * 1
        out = FUNCTIONS[name](changed, weight, bias)
        with torch.no_grad():
            changed.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("name", ["layer_norm", "cross_entropy"])
def test_python_is_called_a_few_times(name):
    x, weight, bias = normal(4, 50, dtype=FP32, grad=True), normal(50, dtype=FP32), normal(50, dtype=FP32)
    assert python_calls(lambda: FUNCTIONS[name](x, weight, bias)) <= 12
    with nodes.refused():
        assert python_calls(lambda: FUNCTIONS[name](x, weight, bias)) > 20


def test_other_threads_run_during_a_long_call():
    """A call of a few microseconds keeps the interpreter's lock, a longer one gives it up."""
    x, ticks, done = torch.zeros(4096, 1024), [], threading.Event()

    def tick():
        while not done.wait(1e-4):
            ticks.append(None)

    # Nothing of the interpreter's runs between these three, where it would let another thread in.
    calls = [partial(ticks.__len__), partial(nodes.norm, x, 1024, None, None, 1e-5, True, None), partial(ticks.__len__)]
    thread = threading.Thread(target=tick)
    thread.start()
    try:
        counts = (list(map(partial.__call__, calls)) for _ in range(10_000))  # the first is enough on most machines
        assert any(before < after for before, _, after in counts)
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("rows", [4, 400])
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_statistics_are_kept_for_a_backward_alone(kind, rows):
    """Without one, the statistics of the rows lie in memory of the call, with one in tensors: the same results."""
    x, weight, bias = normal(rows, 50, dtype=FP32), normal(50, dtype=FP32), normal(50, dtype=FP32)
    function = FUNCTIONS[kind]
    alone = function(x, weight, bias)
    recorded = function(x.clone().requires_grad_(), weight, bias)
    assert torch.equal(alone, recorded)


LAST = {
    "layer_norm": lambda x, w: ak.layer_norm(x, 64, w[0], w[1]),
    "rms_norm": lambda x, w: ak.rms_norm(x, (64,), w[0]),
    "cross_entropy": lambda x, w: ak.cross_entropy(x, torch.arange(len(x)) % 64),
    "linear": lambda x, w: ak.linear(x.bfloat16(), w.bfloat16()),
    "matmul": lambda x, w: ak.matmul(x.bfloat16(), w.bfloat16()),
}


@pytest.mark.parametrize("rows", [4, 400])  # the interpreter's lock is kept, or not
@pytest.mark.parametrize("name", LAST)
def test_the_last_function_of_a_checkpoint(name, rows):
    """torch.utils.checkpoint ends its second forward by an exception in the hook that saves the last tensor."""
    x, weight = normal(rows, 64, seed=1), normal(64, 64, seed=2)

    def gradients(run):
        arguments = [t.clone().requires_grad_() for t in (x, weight)]
        run(lambda x, w: LAST[name](torch.tanh(x), w), *arguments).float().square().sum().backward()
        return [t.grad for t in arguments]

    wanted = gradients(lambda f, *arguments: f(*arguments))
    torch.testing.assert_close(gradients(partial(checkpoint, use_reentrant=False)), wanted, rtol=0, atol=0)


def test_an_error_in_a_hook_of_saved_tensors_is_raised():
    def refuse(tensor):
        raise KeyError("kept nowhere")

    x = normal(4, 64, seed=1).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(refuse, lambda tensor: tensor), pytest.raises(KeyError, match="kept"):
        ak.layer_norm(x, 64)
