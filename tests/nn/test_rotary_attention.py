"""Attention as transformers' model files write it: its rotary embedding and the norms of queries and keys become one op, or stay."""

import copy
import functools
import pickle
import sys

import pytest
import torch
from torch import nn

import amp_kernels as ak
from amp_kernels.nn import rotary as module
from amp_kernels.testing.generators import normal

WIDTH, HEADS = 8, 3


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class LlamaRMSNorm(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(normal(width).abs() + 0.5), 1e-3

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


def deprecated(forward):
    @functools.wraps(forward)
    def call(self, *args, **kwargs):
        if "old" in kwargs:
            kwargs["scale"] = kwargs.pop("old")
        return forward(self, *args, **kwargs)

    return call


class Attention(nn.Module):
    normed = True

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(16, HEADS * WIDTH), nn.Linear(16, WIDTH)
        self.q_norm, self.k_norm = (LlamaRMSNorm() if self.normed else nn.Identity() for _ in range(2))

    @deprecated
    def forward(self, x, angles, *, scale=1.0):
        shape = (*x.shape[:-1], -1, WIDTH)
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *angles)
        return (q * scale) @ k.mT


class Plain(Attention):
    normed = False


class LooksAtItsQueries(Attention):
    def forward(self, x, angles):
        shape = (*x.shape[:-1], -1, WIDTH)
        normed = self.q_norm(self.q_proj(x).view(shape))
        q, k = normed.transpose(1, 2), self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *angles)
        return (q + normed.transpose(1, 2).square() + normed.transpose(2, 3).mean()) @ k.mT


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


class GoesToAFunction(Attention):
    """Past the functions that a subclass of Tensor sees."""

    def forward(self, x, angles):
        shape = (*x.shape[:-1], -1, WIDTH)
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        return apply_rotary_pos_emb(Squared.apply(q), self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2), *angles)[
            0
        ]


class Keeps(Attention):
    def forward(self, x, angles):
        self.last = apply_rotary_pos_emb(x[None], x[None], *angles)
        return self.last


ANGLES = normal(1, 5, WIDTH, seed=3), normal(1, 5, WIDTH, seed=4)
X = normal(2, 5, 16, seed=5)


@pytest.fixture
def calls(monkeypatch):
    """The names of the options of each call of the op."""
    found, own = [], module.rotary

    def noting(*args, **options):
        found.append(set(options))
        return own(*args, **options)

    monkeypatch.setattr(module, "rotary", noting)
    return found


def pair(kind):
    torch.manual_seed(0)
    plain = ak.convert(kind())
    return plain, ak.convert(copy.deepcopy(plain), fuse_rotary=True)


def assert_same(plain, ours, **options):
    results = [model(X, ANGLES, **options) for model in (plain, ours)]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    grads = [
        torch.autograd.grad(r.square().sum(), list(m.parameters())) for r, m in zip(results, (plain, ours), strict=True)
    ]
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


NORMS = {"interleaved", "q_weight", "k_weight", "eps"}


@pytest.mark.parametrize(
    ("kind", "options"), [(Attention, NORMS), (Plain, {"interleaved"}), (LooksAtItsQueries, NORMS)]
)
def test_one_op_in_place_of_many(kind, options, calls):
    plain, ours = pair(kind)
    assert_same(plain, ours)
    assert calls == [options]


def test_arguments_pass_through_decorators(calls):
    plain, ours = pair(Attention)
    assert_same(plain, ours, old=0.5)
    torch.testing.assert_close(ours(X, ANGLES, old=2.0), 2 * ours(X, ANGLES))
    assert len(calls) == 3


def test_a_norm_with_a_hook_runs_alone(calls):
    plain, ours = pair(Attention)
    seen = []
    for model in (plain, ours):
        model.q_norm.register_forward_hook(lambda *args: seen.append(args[-1]))
    assert_same(plain, ours)
    assert len(seen) == 2
    torch.testing.assert_close(*seen)
    assert calls == [{"interleaved"}]


def test_norms_that_differ_run_alone(calls):
    plain, ours = pair(Attention)
    for model in (plain, ours):
        model.k_norm.variance_epsilon = 0.5
    assert_same(plain, ours)
    assert calls == [{"interleaved"}]


def test_a_dtype_that_the_op_would_not_return_is_left_to_the_model(calls):
    """A 16-bit model with fp32 angles gets fp32 queries, unless autocast decides."""
    plain, ours = pair(Plain)
    half = [model.bfloat16() for model in (plain, ours)]
    results = [model(X.bfloat16(), ANGLES) for model in half]
    assert results[0].dtype == torch.float32
    assert torch.equal(*results)
    assert not calls
    with torch.autocast("cpu", torch.bfloat16):
        half[1](X, ANGLES)
    assert len(calls) == 1


def test_a_function_past_python_gets_no_wrong_gradient():
    plain, ours = pair(GoesToAFunction)
    with torch.no_grad():
        torch.testing.assert_close(plain(X, ANGLES), ours(X, ANGLES), rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match="queries or keys went to an autograd"):
        ours(X, ANGLES).sum().backward()


class Looks(Attention):
    def forward(self, x, angles):
        q = self.q_norm(self.q_proj(x).float().view(*x.shape[:-1], -1, WIDTH))
        self.seen = [q.shape, q.ndim, q.device, q.dtype, q.stride(), q.requires_grad, q.isnan().any().item()]
        return q


def test_a_norm_that_is_not_made_yet_says_what_it_will_be():
    """In autocast the norm of fp32 has 16 bits."""
    plain = Looks()
    ours = copy.deepcopy(ak.convert(plain))
    ours._modules["q_norm"] = module._LazyNorm(ours.q_norm)
    with torch.autocast("cpu", torch.bfloat16):
        results = [model(X, ANGLES) for model in (plain, ours)]
    assert plain.seen == ours.seen
    assert torch.equal(*results)
    assert not vars(results[1]).keys() & set(dir(torch.Tensor))


def test_another_formula_stays(monkeypatch):
    here = sys.modules[__name__]
    monkeypatch.setattr(here, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q * sin[:, None], k * cos[:, None]))
    module._rebound.cache_clear()
    assert type(ak.convert(Attention(), fuse_rotary=True)) is Attention
    module._rebound.cache_clear()


def test_a_forward_that_sets_attributes_stays():
    assert type(ak.convert(Keeps(), fuse_rotary=True)) is Keeps
    assert type(ak.convert(nn.Linear(2, 2), fuse_rotary=True)) is ak.nn.Linear


def test_globals_are_those_of_the_module_at_each_call(monkeypatch, calls):
    _, ours = pair(Plain)
    before = ours(X, ANGLES)
    monkeypatch.setattr(sys.modules[__name__], "WIDTH", 4)
    with pytest.raises((ValueError, RuntimeError)):
        ours(X, ANGLES)
    monkeypatch.undo()
    assert torch.equal(ours(X, ANGLES), before)


def test_copies_pickles_and_reverts():
    plain, ours = pair(Attention)
    for each in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert_same(plain, each)
    assert "amp_kernels.convert(fuse_rotary=True) in place of" in repr(ours)
    assert type(ak.revert(ours)) is Attention
    assert type(ak.convert(Attention(), skip=[Attention], fuse_rotary=True)) is Attention


def test_a_compiled_model_runs_its_own_forward(calls):
    _, ours = pair(Attention)
    result = torch.compile(ours, backend="eager", fullgraph=True)(X, ANGLES)
    assert not calls
    torch.testing.assert_close(result, ours(X, ANGLES), rtol=1e-5, atol=1e-5)
