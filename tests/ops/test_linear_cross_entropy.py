"""linear_cross_entropy against torch's two operations in float64: options, chunks, dtypes, memory, main_grad."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F

import amp_kernels as ak
from amp_kernels.ops import _head
from amp_kernels.ops import linear_cross_entropy as module
from amp_kernels.ops._head import default_chunk
from amp_kernels.ops.linear_cross_entropy import linear_cross_entropy

from ..helpers.bounds import UNIT_ROUNDOFF
from .tensors import head_problem as problem

HALF = [torch.float16, torch.bfloat16]


def reference(x, weight, target, bias, upstream=1.0, class_weight=None, **options):
    """Loss and gradients in float64, those of the logits times ``upstream``."""
    leaves = [None if t is None else t.detach().double().requires_grad_() for t in (x, weight, bias)]
    loss = ak.cross_entropy(
        F.linear(leaves[0], leaves[1], leaves[2]),
        target,
        None if class_weight is None else class_weight.double(),
        **options,
    )
    grads = torch.autograd.grad((loss * upstream).sum(), [leaf for leaf in leaves if leaf is not None])
    return loss.detach(), grads


def assert_close(got, want, dtype, factor=8):
    """Relative to the norm: logits and their gradient are rounded to ``dtype`` once each, before sums of random signs."""
    error = ((got.double() - want).norm() / want.norm()).item()
    assert error <= factor * max(UNIT_ROUNDOFF[dtype], 2.0**-22), error


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk_size", [None, 1, 7, 23])
@pytest.mark.parametrize("kind", ["plain", "everything"])
def test_every_option_and_chunk(dtype, reduction, chunk_size, kind):
    x, weight, target, bias = problem(dtype=dtype, bias=kind != "plain")
    options = {"reduction": reduction}
    class_weight = None
    if kind == "everything":
        options |= {"label_smoothing": 0.1, "z_loss": 0.01}
        class_weight = torch.rand(37) + 0.5
    loss = linear_cross_entropy(
        x, weight, target, linear_bias=bias, weight=class_weight, chunk_size=chunk_size, **options
    )
    assert loss.dtype == dtype
    upstream = torch.linspace(-1, 2, 23).to(dtype) if reduction == "none" else torch.tensor(0.5, dtype=dtype)
    want, grads = reference(x, weight, target, bias, upstream.double(), class_weight, **options)
    assert_close(loss.detach(), want, dtype)
    loss.backward(upstream)
    leaves = [leaf for leaf in (x, weight, bias) if leaf is not None]
    for leaf, grad in zip(leaves, grads, strict=True):
        assert leaf.grad.dtype == dtype
        assert_close(leaf.grad, grad, dtype)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast_takes_any_mix_of_dtypes(dtype, x_dtype, reduction):
    """torch's ignores autocast, and takes 16-bit x with an fp32 weight to a 16-bit loss. And no product goes past
    autocast (Liger-Kernel#1283)."""
    x, weight, target, bias = problem()
    x = x.detach().to(x_dtype).requires_grad_()
    want, grads = reference(x, weight, target, bias, reduction=reduction)
    with torch.autocast("cpu", dtype=dtype):
        loss = linear_cross_entropy(x, weight, target, linear_bias=bias, reduction=reduction, chunk_size=5)
    with torch.autocast("cpu", dtype=dtype):
        again = torch.ops.amp_kernels.linear_cross_entropy(x, weight, target, bias, reduction=reduction, chunk_size=5)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, again)
    loss.sum().backward()
    assert_close(loss.detach(), want, dtype)
    for leaf, grad in zip((x, weight, bias), grads, strict=True):
        assert leaf.grad.dtype == leaf.dtype
        assert_close(leaf.grad, grad, dtype)


@pytest.mark.parametrize("dtype", HALF)
def test_probabilities_of_large_logits_add_up_to_one(dtype):
    """Logits that are rounded where their sum is made and are not where they are used give probabilities that are 22 %
    off (marin#8217)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 64, generator=generator).mul(10).to(dtype)
    weight = torch.randn(50, 64, generator=generator).to(dtype)
    bias = torch.zeros(50, dtype=dtype, requires_grad=True)
    assert (x @ weight.t()).abs().max() > 80
    for row in x.split(1):
        loss = linear_cross_entropy(row, weight, torch.tensor([0]), linear_bias=bias)
        grad = torch.autograd.grad(loss, bias)[0].double()
        assert grad.sum().abs() <= 4 * UNIT_ROUNDOFF[dtype] * grad.abs().sum()


def test_the_weights_gradient_does_not_get_worse_with_more_chunks():
    """Summed in bf16 its error grows from 1.7e-3 with one chunk to 2.2e-2 with 256."""
    x, weight, target, _ = problem(rows=256, features=32, classes=50, dtype=torch.bfloat16, bias=False)
    (_, want), errors = reference(x, weight, target, None)[1], []
    for chunk_size in (256, 16, 1):
        grad = torch.autograd.grad(linear_cross_entropy(x, weight, target, chunk_size=chunk_size), weight)[0]
        errors.append(((grad.double() - want).norm() / want.norm()).item())
    assert max(errors) <= 1.05 * errors[0]


@pytest.mark.parametrize("options", [{}, {"z_loss": 0.5}], ids=["forward", "backward"])
def test_fp16_gradients_are_made_under_a_scale(options):
    x, weight, target, _ = problem(rows=64, dtype=torch.float16, bias=False)
    scale = 2.0**13
    (linear_cross_entropy(x, weight, target, **options).float() * scale).backward()
    for leaf, grad in zip((x, weight), reference(x, weight, target, None, scale, **options)[1], strict=True):
        assert_close(leaf.grad, grad, torch.float16)


def test_small_gradients_in_fp16_need_no_loss_scale():
    """Those of the logits are 2^-27 where nothing is the target, half of fp16's least number, in the sum they are 2^-19."""
    classes = 2**19
    x, weight = torch.ones(256, 2, requires_grad=True), torch.zeros(classes, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.float16):
        linear_cross_entropy(x, weight, torch.arange(256), chunk_size=64).backward()
    torch.testing.assert_close(weight.grad[256:], torch.full((classes - 256, 2), 1 / classes), rtol=2.0**-11, atol=0)


def test_the_largest_gradients_in_fp16_are_in_range():
    """A z-loss as large as the forward takes it, of logits as large as fp16 has them: 33 times the gradients of the loss."""
    x, weight = torch.full((1, 1), 255.0), torch.tensor([[256.0], [-255.0], [-255.0]])
    args, z_loss = (x.half().requires_grad_(), weight.half().requires_grad_(), torch.tensor([1])), module.MOST_Z_LOSS
    loss = linear_cross_entropy(*args, z_loss=z_loss, reduction="sum")
    grads = torch.autograd.grad(loss, args[:2], torch.tensor(2.0**-4, dtype=torch.float16))
    for got, want in zip(grads, reference(*args, None, 2.0**-4, z_loss=z_loss, reduction="sum")[1], strict=True):
        assert_close(got, want, torch.float16)


@pytest.mark.parametrize("upstream", [2.0**-26, 2.0**-20, 1.0, 2.0**18, 2.0**100, math.inf])
@pytest.mark.parametrize(
    "options", [{"reduction": "none"}, {"z_loss": 0.5}, {"weight": 20 * torch.ones(37)}], ids="".join
)
def test_gradients_of_any_size_in_fp16(upstream, options):
    """Those of the logits were 12 % off at 2^-20 and NaN at 2^18. What is infinite stays so: a loss scaler has to see it."""
    x, weight, target, bias = (t.detach().float().requires_grad_() if t.is_floating_point() else t for t in problem())
    with torch.autocast("cpu", dtype=torch.float16):
        loss = linear_cross_entropy(x, weight, target, linear_bias=bias, chunk_size=9, **options)
    grad = torch.full_like(loss, upstream)
    if loss.ndim:
        grad[0] = math.inf  # of an ignored row: it counts for nothing
    grads = torch.autograd.grad(loss, (x, weight, bias), grad)
    if upstream == math.inf:
        assert not any(grad.isfinite().all() for grad in grads[1:])
        return
    options = {"class_weight" if key == "weight" else key: value for key, value in options.items()}
    rounded = (t.detach().half().double() for t in (x, weight))
    _, want = reference(*rounded, target, bias, **options)
    for got, expected in zip(grads, want, strict=True):
        assert_close(got.double() / upstream, expected, torch.float16, factor=4)


def test_no_row_counts_in_fp16():
    x, weight, target, bias = problem(dtype=torch.float16)
    loss = linear_cross_entropy(x, weight, torch.full_like(target, -100), linear_bias=bias)
    loss.backward()
    assert loss.isnan()
    assert not any(leaf.grad.any() for leaf in (x, weight, bias))


@pytest.mark.parametrize(
    ("dtype", "options", "products"),
    [
        (torch.bfloat16, {}, (6, 0)),
        (torch.float16, {}, (6, 0)),
        (torch.float16, {"reduction": "sum", "label_smoothing": 0.1, "z_loss": 2.0**-12}, (6, 0)),
        (torch.float16, {"z_loss": 2.0**-11}, (2, 6)),
        (torch.float16, {"weight": torch.full((37,), 100.0)}, (2, 6)),
        (torch.bfloat16, {"reduction": "none"}, (2, 6)),
    ],
)
def test_products(dtype, options, products, monkeypatch):
    """Two chunks have three products each, and a fourth if the forward cannot make gradients."""
    x, weight, target, _ = problem(dtype=dtype, bias=False)
    counted = []
    for name in ("gemm", "gemm_accumulate_op"):
        op = getattr(_head, name)
        monkeypatch.setattr(_head, name, lambda *args, op=op, **kwargs: (counted.append(op), op(*args, **kwargs))[1])
    loss = linear_cross_entropy(x, weight, target, chunk_size=12, **options).sum()
    forward = len(counted)
    loss.backward()
    assert (forward, len(counted) - forward) == products


def test_backward_looks_at_the_losss_gradient_once(monkeypatch):
    """On the device, for all gradients together: what is made in the forward is not touched where that is 1."""
    x, weight, target, bias = problem()
    calls = []
    monkeypatch.setattr("amp_kernels._raw.unscale.op", lambda grads, *args: calls.append((len(grads), *args)))
    linear_cross_entropy(x, weight, target, linear_bias=bias).backward()
    assert calls == [(3, None, torch.tensor(1.0))]


def test_default_chunk():
    """On Tensor Cores a fourth of the rows: of the 12 bytes and more that torch's two operations hold for a logit, 2 are a
    chunk's at most, where all rows are one."""
    for rows, dtype, device, chunk in (
        (32768, torch.bfloat16, "cuda", 8192),
        (4097, torch.float16, "cuda", 2048),
        (100, torch.bfloat16, "cuda", 2048),
        (32768, torch.float32, "cuda", 4096),
        (32768, torch.bfloat16, "cpu", 4096),
        (100, torch.bfloat16, "cpu", 1024),
    ):
        assert default_chunk(rows, dtype, device) == chunk


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_into_main_grad(reduction):
    layer = ak.nn.LinearCrossEntropyLoss(16, 37, dtype=torch.bfloat16, reduction=reduction, chunk_size=6)
    weight = layer.linear.weight
    want = torch.zeros_like(weight, dtype=torch.float64)
    with ak.nn.accumulate_fp32(layer):
        for seed in range(3):
            x, _, target, _ = problem(dtype=torch.bfloat16, seed=seed)
            layer(x.detach(), target).sum().backward()
            want += reference(x, weight, target, None, reduction=reduction)[1][1]
            assert weight.grad.dtype == torch.float32
            assert weight.grad.data_ptr() == weight.main_grad.data_ptr()
            assert_close(weight.grad, want, torch.bfloat16)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_backward_twice(reduction):
    x, weight, target, bias = problem()
    loss = linear_cross_entropy(x, weight, target, linear_bias=bias, reduction=reduction, chunk_size=4).sum()
    first = [g.clone() for g in torch.autograd.grad(loss, (x, weight, bias), torch.tensor(3.0), retain_graph=True)]
    for retain in (True, False):
        again = torch.autograd.grad(loss, (x, weight, bias), torch.tensor(3.0), retain_graph=retain)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_ignored_rows_may_hold_anything(dtype, reduction):
    """0 times NaN reached the gradient of the weight."""
    grads = []
    for held in (0.0, math.nan, math.inf):
        x, weight, target, bias = problem(dtype=dtype)
        with torch.no_grad():
            x[target == -100] = held
        with ak.batch_invariant() if held == math.inf else contextlib.nullcontext():
            loss = linear_cross_entropy(x, weight, target, linear_bias=bias, chunk_size=3, reduction=reduction).sum()
        grads.append(torch.autograd.grad(loss, (x, weight, bias)))
        assert not grads[-1][0][target == -100].any()
    for plain, nan, chained in zip(*grads, strict=True):
        assert torch.equal(plain, nan)
        assert_close(chained, plain, dtype)


def test_empty_rows():
    x, weight, target, _ = problem(bias=False)
    for reduction in ("mean", "sum"):
        empty = x[:0].detach().requires_grad_()
        loss = linear_cross_entropy(empty, weight, target[:0], reduction=reduction)
        torch.testing.assert_close(
            loss, F.cross_entropy(empty @ weight.t(), target[:0], reduction=reduction), equal_nan=True
        )
        dx, dw = torch.autograd.grad(loss, (empty, weight))
        assert dx.shape == (0, 16)
        assert not dw.any()
    featureless = [torch.empty(n, 0, requires_grad=True) for n in (5, 8)]  # uniform probabilities
    loss = linear_cross_entropy(*featureless, torch.arange(5))
    torch.testing.assert_close(loss.item(), math.log(8))
    assert [g.shape for g in torch.autograd.grad(loss, featureless)] == [(5, 0), (8, 0)]


@pytest.mark.parametrize("which", [0, 1, 3])
def test_only_the_gradients_that_are_asked_for(which):
    args = list(problem())
    _, grads = reference(*args)
    for i in (0, 1, 3):
        args[i] = args[i].detach().requires_grad_(i == which)
    x, weight, target, bias = args
    linear_cross_entropy(x, weight, target, linear_bias=bias, chunk_size=4).backward()
    assert_close(args[which].grad, grads[(0, 1, 3).index(which)], torch.float32)
    assert all(args[i].grad is None for i in (0, 1, 3) if i != which)


def test_probabilities_and_leading_dimensions():
    x, weight, target, bias = problem(rows=24)
    soft = torch.randn(24, 37).softmax(1)
    for y in (target, soft):
        flat = linear_cross_entropy(x, weight, y, linear_bias=bias, reduction="none", chunk_size=5)
        torch.testing.assert_close(flat, F.cross_entropy(F.linear(x, weight, bias), y, reduction="none"))
        shaped = linear_cross_entropy(
            x.view(2, 12, 16), weight, y.view(2, 12, *y.shape[1:]), linear_bias=bias, reduction="none", chunk_size=5
        )
        assert torch.equal(shaped, flat.view(2, 12))


def test_gradcheck_in_float64():
    x, weight, target, bias = problem(4, 3, 5, torch.float64)

    def call(*leaves):
        return linear_cross_entropy(
            leaves[0], leaves[1], target, linear_bias=leaves[2], z_loss=0.1, label_smoothing=0.1
        )

    assert torch.autograd.gradcheck(call, (x, weight, bias))
    assert torch.autograd.gradgradcheck(call, (x, weight, bias))
    x, weight, target, _ = problem(bias=False)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(linear_cross_entropy(x, weight, target), x, create_graph=True)


def test_the_module():
    layer = ak.nn.LinearCrossEntropyLoss(16, 37, bias=True, weight=torch.rand(37), label_smoothing=0.1)
    assert list(layer.state_dict()) == ["weight", "linear.weight", "linear.bias"]
    x, _, target, _ = problem()
    want = F.cross_entropy(layer.linear(x), target, layer.weight, label_smoothing=0.1)
    torch.testing.assert_close(layer(x, target), want)


X, W, Y = torch.zeros(4, 3), torch.zeros(5, 3), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("args", "options", "error", "message"),
    [
        ((X, W[:, :2], Y), {}, ValueError, r"input has shape \[4, 3\] and linear_weight \[5, 2\]"),
        ((X, W[0], Y), {}, ValueError, "linear_weight"),
        ((X, W, Y[:3]), {}, ValueError, r"target has shape \[3\]; accepted: \[4\]"),
        ((X, W, torch.zeros(4, 4)), {}, ValueError, "that of probabilities, and shape"),
        ((X, W, Y), {"linear_bias": torch.zeros(4)}, ValueError, r"linear_bias has shape \[4\]; accepted: \[5\]"),
        ((X, W, Y), {"weight": torch.zeros(4)}, ValueError, r"weight has shape \[4\]; accepted: \[5\]"),
        ((X, W, Y), {"chunk_size": 0}, ValueError, "chunk_size is 0; accepted: a whole number from 1"),
        ((X, W, Y), {"reduction": "all"}, ValueError, "reduction is 'all'"),
        ((X.half(), W, Y), {}, TypeError, "input is float16"),
        ((X, W, Y.to("meta")), {}, ValueError, "target is on meta"),
    ],
)
def test_bad_input(args, options, error, message):
    with pytest.raises(error, match=f"linear_cross_entropy: .*{message}"):
        linear_cross_entropy(*args, **options)


@pytest.mark.parametrize("options", [{}, {"reduction": "sum", "label_smoothing": 0.1, "z_loss": 0.01}], ids=str)
def test_per_sample_gradients(options):
    """vmap over func.grad, of samples of several rows each; and of a batch of weights."""
    x, weight, target, bias = (None if t is None else t.detach() for t in problem(rows=12))
    x, target = x.view(4, 3, 16), target.abs().clamp(max=36).view(4, 3)

    def loss(x, weight, bias, target):
        return linear_cross_entropy(x, weight, target, linear_bias=bias, chunk_size=2, **options)

    def stock(x, weight, bias, target):
        return ak.cross_entropy(F.linear(x, weight, bias), target, **options)

    gradient = torch.func.grad(loss, argnums=(0, 1, 2))
    found = torch.vmap(gradient, in_dims=(0, None, None, 0))(x, weight, bias, target)
    for i in range(4):
        leaves = [t.clone().double().requires_grad_() for t in (x[i], weight, bias)]
        want = torch.autograd.grad(stock(*leaves, target[i]), leaves)
        for got, expected in zip(found, want, strict=True):
            assert_close(got[i], expected, torch.float32)
    weights = torch.stack([weight, -weight])
    losses = torch.vmap(loss, in_dims=(None, 0, None, None))(x[0], weights, bias, target[0])
    for got, w in zip(losses, weights, strict=True):
        assert_close(got, stock(x[0].double(), w.double(), bias.double(), target[0]), torch.float32)
