"""linear_log_probs as a training loop has it: autocast, weights that change or are frozen, main_grad, memory, compilers."""

import math

import pytest
import torch
import torch.nn.functional as F

import amp_kernels as ak
from amp_kernels._raw import cross_entropy_rows
from amp_kernels.ops import _head

from .test_linear_log_probs import HALF, derivatives, log_probs_of, problem


@pytest.mark.parametrize("dtype", HALF)
def test_autocast_takes_any_mix_of_dtypes(dtype):
    """The bf16 hidden states and fp32 head of trl#7077 failed in backward."""
    x, weight, target, bias = problem()
    x = x.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype):
        ours = log_probs_of(x, weight, target, bias, chunk_size=5)
        again = torch.ops.amp_kernels.linear_log_probs(x, weight, target, bias, entropy=True, chunk_size=5)
    want = log_probs_of(x.detach().to(dtype), weight.detach().to(dtype), target, bias.detach())
    for got, same, expected in zip(ours, again, want, strict=True):
        assert got.dtype == torch.float32
        assert torch.equal(got, same)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    (ours[0].sum() + ours[1].sum()).backward()
    assert [leaf.grad.dtype for leaf in (x, weight, bias)] == [torch.bfloat16, torch.float32, torch.float32]


def test_a_weight_that_changes_or_is_tied():
    """A stale fp32 copy after a sync (prime-rl#2438); a head that no longer shares the embedding's gradient (open-instruct#1387)."""
    _, weight, target, _ = problem(dtype=torch.float32)
    ids = torch.arange(23)
    optimizer = ak.optim.AdamW([weight], lr=0.1, shadow_dtype=torch.bfloat16)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            l = ak.linear_log_probs(F.embedding(ids, weight), weight, target)
        rounded = weight.detach().bfloat16()
        assert torch.equal(l, ak.linear_log_probs(rounded[ids], rounded, target))
        l.sum().backward()
        apart = [weight.detach().requires_grad_() for _ in range(2)]
        with torch.autocast("cpu", torch.bfloat16):
            ak.linear_log_probs(F.embedding(ids, apart[0]), apart[1], target).sum().backward()
        torch.testing.assert_close(weight.grad, apart[0].grad + apart[1].grad)
        optimizer.step()
        optimizer.zero_grad()


def test_into_main_grad():
    layer = ak.nn.Linear(16, 37, bias=False, dtype=torch.bfloat16)
    want = 0
    with ak.nn.accumulate_fp32(layer):
        for seed in range(3):
            x, _, target, _ = problem(dtype=torch.bfloat16, seed=seed)
            ak.linear_log_probs(x.detach(), layer.weight, target, chunk_size=6).sum().backward()
            wide = layer.weight.detach().double().requires_grad_()
            want += torch.autograd.grad(ak.linear_log_probs(x.detach().double(), wide, target).sum(), wide)[0]
            assert layer.weight.grad.data_ptr() == layer.weight.main_grad.data_ptr()
        assert ((layer.weight.grad - want).norm() / want.norm()).item() <= 2.0**-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_twice_writes_to_nothing_that_is_given(dtype):
    """SkyRL#1650 and verl write into what was saved."""
    x, weight, target, bias = problem(dtype=dtype)
    temperature = torch.linspace(0.5, 2, 23)
    given = [x, weight, target, bias, temperature]
    before = [t.detach().clone() for t in given]
    l, h = log_probs_of(x, weight, target, bias, temperature=temperature, chunk_size=4)
    shown = h.detach().clone()
    with torch.no_grad():
        h.mul_(0)  # a result is the user's
    grads = [torch.autograd.grad(l.sum() + 2 * h.sum(), (x, weight), retain_graph=True) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
    assert shown.any()
    with pytest.raises(RuntimeError, match="linear_log_probs: a second derivative"):
        torch.autograd.grad(l.sum(), x, create_graph=True)


def test_frozen_weights_and_evaluation(monkeypatch):
    x, weight, target, bias = problem(dtype=torch.bfloat16)
    calls = []
    op = _head.gemm_accumulate_op
    monkeypatch.setattr(_head, "gemm_accumulate_op", lambda *args, **kwargs: calls.append(op(*args, **kwargs)))
    ak.linear_log_probs(x, weight.detach(), target).sum().backward()
    assert calls == []
    with torch.no_grad():
        assert log_probs_of(x, weight, target, bias)[1].grad_fn is None
    rows = []
    raw = cross_entropy_rows.op
    monkeypatch.setattr(cross_entropy_rows, "op", lambda *args, **more: (rows.append(len(args[0])), raw(*args, **more)))
    ak.linear_log_probs(x, weight, target, chunk_size=9).sum().backward()
    assert rows == [9, 9, 5] * 2  # one read of each chunk's logits each way


def test_memory():
    """The most beyond what lives before: a chunk's fp32 logits, their 16-bit gradient, and the fp32 gradient of the weight if it is
    needed. Nothing as large as the logits of all rows, nor a one_hot of them (SkyRL#1650)."""
    rows, features, classes, chunk = 512, 8, 50257, 64
    x, weight, target, _ = problem(rows, features, classes, torch.bfloat16, bias=False)

    def peak(call):
        live = most = 0
        with torch.profiler.profile(profile_memory=True) as profile:
            result = call()
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                live += event.nbytes()
                most = max(most, live)
        return most, live, result

    logits, gradient, small = 4 * chunk * classes, 4 * classes * features, 2**20
    with torch.no_grad():
        most, left, _ = peak(lambda: log_probs_of(x, weight, target, chunk_size=chunk))
    assert most <= logits + small
    assert left <= 2 * 4 * rows + 64
    most, left, l = peak(lambda: ak.linear_log_probs(x, weight, target, chunk_size=chunk))
    assert left <= 4 * 4 * rows + 64  # two statistics, the result, and the targets
    most, _, _ = peak(lambda: torch.autograd.grad(l.sum(), (x, weight)))
    assert most <= 1.5 * logits + 1.5 * gradient + small
    l = ak.linear_log_probs(x, weight.detach(), target, chunk_size=chunk)
    most, _, _ = peak(lambda: torch.autograd.grad(l.sum(), x))
    assert most <= 1.5 * logits + small


def test_log_probs_are_never_above_zero():
    """Up to +0.125 in maxtext#5231. Entropies of logits a thousand apart are not below zero either."""
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-3, 1.0, 1e3):
        x = torch.randn(64, 8, generator=generator) * scale
        weight = torch.randn(50, 8, generator=generator)
        target = (x @ weight.t()).argmax(1)
        for dtype in (torch.float32, *HALF):
            l, h = log_probs_of(x.to(dtype), weight.to(dtype), target)
            assert l.max() <= 0
            assert h.min() >= 0


def test_gradcheck_in_float64():
    x, weight, target, bias = problem(4, 3, 5, torch.float64)
    with torch.no_grad():
        bias[4] = -math.inf
    target[1:] = torch.tensor([0, 1, 3])
    call = lambda x, w: log_probs_of(x, w, target, bias.detach(), temperature=0.8)  # noqa: E731
    assert torch.autograd.gradcheck(call, (x, weight))
    assert torch.autograd.gradgradcheck(call, (x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_compiled_and_transformed(dtype):
    x, weight, target, bias = problem(rows=12, dtype=dtype)
    temperature = torch.linspace(0.5, 2, 12)

    def call(x, weight, bias, target, temperature):
        return log_probs_of(x, weight, target, bias, temperature=temperature)

    want, want_grads = derivatives(lambda *t: call(*t, target, temperature), (x, weight, bias), (torch.ones(12),) * 2)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    got, grads = derivatives(lambda *t: compiled(*t, target, temperature), (x, weight, bias), (torch.ones(12),) * 2)
    torch.testing.assert_close((*got, *grads), (*want, *want_grads))
    gradient = torch.func.grad(lambda *t: call(*t)[0].sum() + call(*t)[1].sum())
    leaves = x.detach(), weight.detach(), bias.detach()
    torch.testing.assert_close(gradient(*leaves, target, temperature), want_grads[0], rtol=2e-2, atol=2e-2)
    each = torch.vmap(call, in_dims=(0, None, None, 0, 0))(leaves[0], *leaves[1:], target, temperature)
    torch.testing.assert_close(each[0], want[0], rtol=1e-4, atol=1e-4)
