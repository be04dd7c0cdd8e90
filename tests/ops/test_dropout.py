"""dropout_add: the mask that backward makes again, what is kept and what is stored, and whose generator it comes from."""

import math
from functools import partial

import pytest
import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

import amp_kernels as ak
from amp_kernels._dispatch import policy
from amp_kernels._raw import dropout
from amp_kernels._raw._norm import statistics
from amp_kernels.testing.bounds import TINY, UNIT_ROUNDOFF, assert_within, norm_backward_bound, norm_forward_bound
from amp_kernels.testing.generators import normal
from amp_kernels.testing.poison import poisoned_allocations

from .targets import backends_on_cpu, device_for

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
device = device_for(dropout.op)


def mask_of(x, p, seed):
    """The elements that are kept, from ones."""
    return dropout.op(torch.ones(x.shape, device=x.device), seed, p=p, out_dtype=torch.float32) != 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stream", DTYPES)
@pytest.mark.parametrize("shape", [(5, 64), (3, 1031), (1,), (7,), (2, 3, 4)])
def test_result_and_gradients_are_those_of_one_mask(device, dtype, stream, shape):
    x, residual = normal(*shape, dtype=dtype, device=device), normal(*shape, dtype=stream, device=device, seed=1)
    x.requires_grad_(), residual.requires_grad_()
    p = 0.3
    torch.manual_seed(5)
    seed = dropout.draw_seed("dropout_add", x)
    torch.manual_seed(5)
    with poisoned_allocations():
        y = ak.dropout_add(x, residual, p)
        grad = normal(*shape, dtype=stream, device=device, seed=2)
        y.backward(grad)
    keep, scale = mask_of(x, p, seed), 1 / (1 - p)
    assert (y.dtype, x.grad.dtype, residual.grad.dtype) == (stream, dtype, stream)
    want = torch.where(keep, x.detach().double() * scale, 0.0) + residual.detach().double()
    size = x.detach().double().abs() * scale + residual.detach().double().abs()
    assert_within(y.detach(), want, UNIT_ROUNDOFF[stream] * want.abs() + 2.0**-22 * size + TINY[stream])
    of_x = torch.where(keep, grad.double() * scale, 0.0)
    assert_within(x.grad, of_x, UNIT_ROUNDOFF[dtype] * of_x.abs() + 2.0**-22 * of_x.abs() + TINY[dtype])
    assert torch.equal(residual.grad, grad)


def test_the_mask_is_the_same_everywhere():
    """And wherever an element begins in memory, for any length: known answers, once computed by the reference."""
    seed, p, n = torch.tensor([0x1234567890ABCDEF]), 0.4, 3000
    want = dropout.kept(seed, n, p)
    x = torch.ones(n + 5)
    for backend in backends_on_cpu(dropout.op):
        with ak.backend(backend):
            for begin, count in ((0, n), (1, n), (5, n), (3, 1025), (0, 7)):
                got = dropout.op(x[begin : begin + count], seed, p=p, out_dtype=torch.bfloat16) != 0
                assert torch.equal(got, want[:count]), backend
    # Salmon et al.'s known answer for counter 0 and key 0: 6627e8d5 e169c58d bc57ac4c 9b00dbd8.
    words = torch.tensor([0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]) / 2.0**32
    for p in (0.3, 0.5, 0.65, 0.8, 0.9):
        assert torch.equal(dropout.kept(torch.zeros(1, dtype=torch.int64), 4, p), words >= p)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_mask_is_a_binomial_sample(p):
    """Counts of all, of every column and of pairs of neighbours within six standard deviations; seeds are independent."""
    shape = (512, 1024)
    kept = torch.stack([mask_of(torch.ones(shape), p, torch.tensor([seed])) for seed in (1, 2, 2**40)]).double()

    def check(sample, probability, count):
        deviation = math.sqrt(probability * (1 - probability) * count)
        assert ((sample - probability * count).abs() <= 6 * deviation).all()

    q = 1 - p
    check(kept.sum((1, 2)), q, shape[0] * shape[1])
    check(kept.sum(1), q, shape[0])
    check(kept.sum(2), q, shape[1])
    check((kept[..., ::2] * kept[..., 1::2]).sum((1, 2)), q * q, shape[0] * shape[1] // 2)
    check((kept[:, ::2] * kept[:, 1::2]).sum((1, 2)), q * q, shape[0] * shape[1] // 2)
    check((kept[0] * kept[1]).sum(), q * q, shape[0] * shape[1])
    check((kept[0] * kept[2]).sum(), q * q, shape[0] * shape[1])


def test_nothing_and_everything(device):
    x, residual = normal(3, 9, device=device).requires_grad_(), normal(3, 9, device=device, seed=1).requires_grad_()
    x.data[0, 0], x.data[1, 1] = math.inf, math.nan
    for call in (ak.dropout_add(x, residual, 0.0), ak.dropout_add(x, residual, 0.9, training=False)):
        torch.testing.assert_close(call, x + residual, rtol=0, atol=0, equal_nan=True)
    gone = ak.dropout_add(x, residual, 1.0)
    assert torch.equal(gone, residual)
    gone.sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))
    assert torch.equal(residual.grad, torch.ones_like(x))
    mixed = ak.dropout_add(x.detach().bfloat16(), residual.half(), 0.0)
    assert mixed.dtype == torch.float16
    assert ak.dropout_add(x[:0], residual[:0]).shape == (0, 9)
    assert ak.dropout_add(*(torch.tensor(t, device=device) for t in (2.0, 1.0))).item() in (1.0, 5.0)


def test_a_dropped_number_leaves_nothing_behind(device):
    """Neither an infinity nor a NaN, in the result or in the gradient."""
    for bad in (math.inf, math.nan):
        x = torch.full((1000,), bad, device=device).requires_grad_()
        y = ak.dropout_add(x, torch.zeros_like(x), 0.5)
        y.backward(torch.full_like(y, bad))
        dropped = y.detach() == 0
        assert 400 < dropped.sum() < 600
        assert torch.equal(x.grad == 0, dropped)


def test_backward_keeps_eight_bytes():
    x, residual = normal(64, 64).requires_grad_(), normal(64, 64).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ak.dropout_add(x, residual, 0.2)
    assert [(t.dtype, t.numel()) for t in kept] == [(torch.int64, 1)]


def test_the_generator_is_torchs(device):
    x, zero = torch.ones(400, device=device), torch.zeros(400, device=device)
    torch.manual_seed(3)
    first, second = ak.dropout_add(x, zero), ak.dropout_add(x, zero)
    torch.manual_seed(3)
    assert torch.equal(ak.dropout_add(x, zero), first)
    assert not torch.equal(first, second)
    state = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    ak.dropout_add(x, zero, 0.5, training=False)
    assert torch.equal(state, torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_recomputes_with_the_same_mask(device, use_reentrant):
    x, residual = normal(4, 64, device=device).requires_grad_(), normal(4, 64, device=device)

    def block(x):
        return ak.dropout_add(ak.dropout_add(x.sin(), residual, 0.4).cos(), residual, 0.3)

    results = []
    for run in (block, lambda x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=use_reentrant)):
        torch.manual_seed(11)
        y = run(x)
        results.append((y.detach(), torch.autograd.grad(y.square().sum(), x)[0] if run is block else None))
        if run is not block:
            y.square().sum().backward()
            results[-1] = y.detach(), x.grad
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_derivatives_of_every_kind_and_vmap():
    x, residual = normal(3, 8).requires_grad_(), normal(3, 8, seed=1).requires_grad_()
    torch.manual_seed(0)
    y = ak.dropout_add(x, residual, 0.5)
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    keep = first.detach() != 0
    torch.testing.assert_close(second, torch.where(keep, 8.0, 0.0))
    wide = ak.dropout_add(x.double(), residual.double(), 0.5)
    assert wide.dtype == torch.float64
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(ak.dropout_add)(x, residual)
    ones, zeros = torch.ones(5, 400), torch.zeros(5, 400)
    same = torch.vmap(ak.dropout_add, randomness="same")(ones, zeros)
    different = torch.vmap(ak.dropout_add, randomness="different")(ones, zeros)
    assert (same == same[0]).all()
    assert not (different == different[0]).all()
    assert set(different.unique().tolist()) == {0.0, 2.0}
    grad = torch.func.grad(lambda x: ak.dropout_add(x, zeros).sum())(ones)
    assert set(grad.unique().tolist()) == {0.0, 2.0}


def test_compile_fullgraph():
    x, residual = normal(4, 32).bfloat16().requires_grad_(), normal(4, 32).requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(ak.dropout_add, backend="aot_eager", fullgraph=True)
    results = []
    for function in (ak.dropout_add, compiled):
        torch.manual_seed(2)
        y = function(x, residual, 0.3)
        results.append((y.detach(), *torch.autograd.grad(y.sum(), (x, residual))))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_under_autocast_the_stream_keeps_its_dtype():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for stream in DTYPES:
            assert ak.dropout_add(torch.ones(4).bfloat16(), torch.ones(4, dtype=stream)).dtype == stream


class Ops(TorchDispatchMode):
    """Names the ops that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("norm", [ak.layer_norm, ak.rms_norm])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "p"), [(40, 0.3), (41, 0.3), (1031, 0.3), (1100, 0.9999), (8, 1.0)])
def test_a_norm_with_dropout_is_dropout_add_and_the_norm(device, norm, dtype, columns, p):
    """Bit for bit, in both results and all gradients, also in long rows that begin within a group of random words; and nothing more is
    kept than without, but the seed. Triton chooses the order of a row's sum by the layout of the loads before it, so on a GPU the
    results after such a sum agree but for rounding."""
    same = torch.equal
    if device == "cuda" and policy.requested_backend() == "triton":
        same = partial(torch.allclose, rtol=2 * UNIT_ROUNDOFF[dtype], atol=2.0**-18)
    weight = normal(columns, device=device, seed=3).requires_grad_()
    fused, apart, kept = [], [], []
    for results in (fused, apart):
        x, residual = normal(6, columns, dtype=dtype, device=device), normal(6, columns, device=device, seed=1)
        x.requires_grad_(), residual.requires_grad_()
        torch.manual_seed(4)
        if results is fused:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
                y, total = norm(x, columns, weight, residual=residual, dropout_p=p)
        else:
            total = ak.dropout_add(x, residual, p)
            y = norm(total, columns, weight)
        grads = torch.autograd.grad(y.square().sum() + 3 * total.sum(), (x, residual, weight))
        results += [y.detach(), total.detach(), *grads]
    assert (fused[2] == 0).sum() > 0.2 * p * x.numel()
    assert torch.equal(fused[1], apart[1])
    for one, other in zip(fused, apart, strict=True):
        assert same(one, other)
    assert [t.numel() for t in kept if t.dtype == torch.int64] == [1]
    assert sum(t.numel() for t in kept) <= 6 * columns + columns + 2 * 6 + 1


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_a_norm_of_a_sum_is_one_kernel_each_way(p):
    """The dropout and the branch's dtype included: no kernel in front of the norm, none after its backward."""
    x, residual = normal(4, 24, dtype=torch.bfloat16).requires_grad_(), normal(4, 24, seed=1).requires_grad_()
    grad = normal(4, 24, seed=2)
    with ak.backend("cpu"), Ops() as ops:
        y, total = ak.layer_norm(x, 24, residual=residual, dropout_p=p)
        torch.autograd.grad([y, total], [x, residual], [grad, grad])
    drawn = {"aten::randint"} if p > 0 else set()
    views = {"aten::view", "aten::detach"}
    kernels = [name for name in ops.names if name not in views | drawn]
    assert kernels == ["amp_kernels::norm_forward", "amp_kernels::norm_backward"]


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("centred", [False, True])
def test_a_norm_with_dropout_within_bounds_of_float64(device, centred, p):
    """16 bits are added to fp32, under autocast; gradients of the branch have 16 bits."""
    norm, columns = ak.layer_norm if centred else ak.rms_norm, 72
    x, residual = normal(5, columns, dtype=torch.bfloat16, device=device), normal(5, columns, device=device, seed=1)
    weight, grad = (
        normal(columns, device=device, seed=2),
        normal(5, columns, dtype=torch.bfloat16, device=device, seed=3),
    )
    leaves = x.requires_grad_(), residual.requires_grad_(), weight.requires_grad_()
    torch.manual_seed(6)
    seed = dropout.draw_seed("norm", x)
    torch.manual_seed(6)
    with torch.autocast(device, dtype=torch.bfloat16), poisoned_allocations():
        y, total = norm(x, columns, weight, eps=1e-5, residual=residual, dropout_p=p)
        of_x, of_residual, of_weight = torch.autograd.grad(y, leaves, grad)
    assert (y.dtype, total.dtype, of_x.dtype, of_residual.dtype) == (
        torch.bfloat16,
        torch.float32,
        torch.bfloat16,
        torch.float32,
    )
    keep = mask_of(x, p, seed) if p > 0 else torch.ones_like(x, dtype=torch.bool)
    scale = 1 / (1 - p)
    want = torch.where(keep, x.detach().double() * scale, 0.0) + residual.detach().double()
    size = x.detach().double().abs() * scale + residual.detach().double().abs()
    assert_within(total.detach(), want, 2.0**-22 * size)
    options = {"eps": 1e-5, "centred": centred, "out_dtype": torch.bfloat16}
    assert_within(y.detach(), *norm_forward_bound(total.detach(), weight.detach(), None, **options))
    mean, rstd = statistics(total.detach(), 1e-5, centred)
    dx, dx_bound, sums, sums_bound = norm_backward_bound(
        grad, total.detach(), rstd, mean if centred else None, weight.detach(), None
    )
    assert_within(of_residual, dx, dx_bound, "of_residual")
    branch = torch.where(keep, dx * scale, 0.0)
    assert_within(
        of_x, branch, torch.where(keep, dx_bound * scale, 0.0) + 2.0**-8 * (branch.abs() + dx_bound * scale), "of_x"
    )
    assert_within(of_weight, sums[0], sums_bound[0], "of_weight")


def test_a_norm_draws_what_dropout_add_draws(device):
    """The generator advances alike, on a GPU by torch's own offset, which a captured graph makes anew."""
    x, residual = normal(4, 16, device=device), normal(4, 16, device=device, seed=1)
    states = []
    for call in (
        lambda: ak.dropout_add(x, residual, 0.5),
        lambda: ak.layer_norm(x, 16, residual=residual, dropout_p=0.5)[1],
    ):
        torch.manual_seed(8)
        first, second = call(), call()
        assert not torch.equal(first, second)
        states.append((first, second, torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()))
    for one, other in zip(*states, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_one_of_branch_and_residual_needs_a_gradient(device, needs):
    x, residual = normal(4, 16, dtype=torch.bfloat16, device=device), normal(4, 16, device=device, seed=1)
    leaves = [t.requires_grad_(needed) for t, needed in zip((x, residual), needs, strict=True)]
    torch.manual_seed(9)
    total = ak.dropout_add(*leaves, 0.5)
    want = torch.autograd.grad(ak.layer_norm(total, 16).square().sum(), [t for t in leaves if t.requires_grad])
    torch.manual_seed(9)
    y, _ = ak.layer_norm(x, 16, residual=residual, dropout_p=0.5)
    got = torch.autograd.grad(y.square().sum(), [t for t in leaves if t.requires_grad])
    assert torch.equal(got[0], want[0])


def test_a_norm_with_dropout_in_transforms_and_compiled():
    x, residual = normal(3, 8).requires_grad_(), normal(3, 8, seed=1)
    torch.manual_seed(1)
    y, total = ak.layer_norm(x, 8, residual=residual, dropout_p=0.5)
    (first,) = torch.autograd.grad((y * residual).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    assert torch.equal(second == 0, total == residual)
    torch.manual_seed(1)
    assert torch.equal(ak.layer_norm(x.double(), 8, residual=residual.double(), dropout_p=0.5)[1].float(), total)
    torch._dynamo.reset()
    compiled = torch.compile(ak.rms_norm, backend="aot_eager", fullgraph=True)
    results = []
    for function in (ak.rms_norm, compiled):
        torch.manual_seed(2)
        y, total = function(x, 8, residual=residual, dropout_p=0.5)
        results.append((y, total, torch.autograd.grad(y.sum() + total.sum(), x)[0]))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: ak.layer_norm(x, 3, dropout_p=0.1), ValueError, "layer_norm: dropout_p is 0.1; accepted without a residual: 0.0"),
        (lambda x: ak.rms_norm(x, 3, residual=x, dropout_p=-1), ValueError, "rms_norm: dropout_p is -1; accepted: a number from 0 to 1"),
        (lambda x: ak.dropout_add(x, x, 1.5), ValueError, "dropout_add: p is 1.5; accepted: a number from 0 to 1"),
        (lambda x: ak.dropout_add(x, x, math.nan), ValueError, "dropout_add: p is nan"),
        (lambda x: ak.dropout_add(x, x[:1]), ValueError, r"dropout_add: residual has shape \[1, 3\]; accepted: \[2, 3\]"),
        (lambda x: ak.dropout_add(x.int(), x), TypeError, "dropout_add: x has dtype int32"),
        (lambda x: ak.dropout_add(x, x.double()), TypeError, "dropout_add: residual has dtype float64"),
        (lambda x: ak.dropout_add(x, x.to("meta")), ValueError, "dropout_add: residual is on meta, but x is on cpu"),
    ],
)  # fmt: skip
def test_bad_calls(call, error, text):
    with pytest.raises(error, match=text):
        call(torch.ones(2, 3))


def test_the_raw_op_guards_memory():
    x, seed = torch.ones(2, 3), torch.tensor([1])
    options = {"p": 0.5, "out_dtype": torch.float32}
    for namespace in ("overload", "emulated"):
        raw = getattr(dropout.op, namespace)
        with pytest.raises(RuntimeError, match="dropout: residual must have the shape of x"):
            raw(x, seed, x[:1], **options)
        with pytest.raises(RuntimeError, match="dropout: seed must have one element"):
            raw(x, seed.repeat(2), **options)
        with pytest.raises(RuntimeError, match="dropout: seed"):
            raw(x, seed.int(), **options)
        with pytest.raises(RuntimeError, match="dropout: p must be from 0 to 1; got 2"):
            raw(x, seed, p=2.0, out_dtype=torch.float32)
        with pytest.raises(RuntimeError, match="dropout: out_dtype"):
            raw(x, seed, p=0.5, out_dtype=torch.float64)
