"""Norms that make the addition in front of them: in which blocks, with which bits, and where they leave it alone."""

import copy
import pickle

import pytest
import torch

import amp_kernels as ak
from amp_kernels.nn import residual_blocks

from .blocks import BLOCKS, GPT, WIDTH, Checkpointed, check_same, inputs, is_fused, pair, results

nn = torch.nn


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("amp", [True, False])
def test_bits_of_the_separate_addition(kind, dtype, amp, fused):
    plain, ours = pair(kind())
    if not amp:
        plain, ours = plain.to(dtype), ours.to(dtype)
    assert is_fused(ours)
    assert not is_fused(plain)
    xs = inputs(kind, dtype)
    fused()
    got = results(ours, xs, amp)
    assert fused() == 1
    want = results(plain, xs, amp)
    assert fused() == 0
    # The gradients of a 16-bit stream are rounded once less where they meet.
    check_same(got, want, rtol=2**-6 if dtype == torch.bfloat16 else 1e-5, atol=0.05 * (dtype != torch.float32) + 1e-5)
    assert results(ours.train(False), xs, amp)[0].shape == want[0].shape


def test_arguments_pass_and_hooks_see_tensors(fused):
    _, ours = pair(GPT())
    seen = []
    ours.attn.register_forward_hook(
        lambda module, args, kwargs, output: seen.append((args, kwargs, output)), with_kwargs=True
    )
    ours.mlp.register_forward_hook(lambda module, args, output: seen.append((args, output)))
    x = inputs(GPT)[0]
    assert torch.equal(results(ours, [x], scale=1.0)[0], results(ours, [x])[0])
    assert not torch.equal(results(ours, [x], scale=0.5)[0], results(ours, [x])[0])
    (args, kwargs, output), (mlp_args, mlp_output) = seen[:2]
    assert kwargs == {"scale": 1.0, "use_cache": False}
    assert {type(t) for t in (*args, output[0], *mlp_args, mlp_output)} == {torch.Tensor}
    assert type(ours(x)) is torch.Tensor


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Free(GPT):
    """Does with its submodules' results whatever a tensor can take."""

    def forward(self, x):
        a, _ = self.attn(self.ln_1(x))
        a += 1
        assert isinstance(a, torch.Tensor)
        assert (a == a).all()
        assert len(a) == a.shape[0]
        a = torch.cat([a[:1], a.unbind()[1][None]]) + Double.apply(a) - torch.add(a, a, alpha=2)
        x = x + torch.nn.functional.dropout(self.attn(a)[0], 0.25, self.training)
        y = self.mlp(self.ln_2(x))
        return Double.apply(x + y) if self.training else x + y


ak.nn.register_block(Free, "ln_1", "+", "ln_2")


@pytest.mark.parametrize("training", [True, False])
def test_results_of_submodules_are_tensors_to_whoever_asks(training, fused):
    plain, ours = (m.train(training) for m in pair(Free()))
    x = inputs(GPT)
    fused()
    got = results(ours, x)
    assert fused() == 1
    want = results(plain, x)
    check_same(got, want, rtol=1e-5, atol=0.05)


def test_a_norm_with_a_hook_gets_the_sum(fused):
    plain, ours = pair(GPT())
    seen = []
    ours.ln_2.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    x = inputs(GPT)
    fused()
    got = results(ours, x)
    assert fused() == 0
    assert type(seen[0]) is torch.Tensor
    assert torch.equal(got[0], results(plain, x)[0])


def test_a_sum_of_another_dtype_or_shape_is_torchs(fused):
    plain, ours = pair(GPT())
    f32, f64 = torch.float32, torch.float64
    for dtype, branch in ((torch.bfloat16, f32), (f32, f32), (f64, f64), (f64, f32)):  # outside autocast
        x = torch.randn(2, 3, WIDTH).to(dtype)
        one, other = (copy.deepcopy(m).to(f64 if dtype == f64 else f32) for m in (plain, ours))
        if branch != dtype:
            one.attn.forward = other.attn.forward = lambda h, branch=branch, **_: ((h * 2).to(branch), None)
            one.mlp.forward = other.mlp.forward = lambda h, branch=branch: h.to(branch)
        assert torch.equal(one(x), other(x))
        assert one(x).dtype == other(x).dtype
    fused()
    plain.attn.forward = ours.attn.forward = lambda h, **_: (h[:, :1], None)
    assert torch.equal(plain(x.float()), ours(x.float()))
    assert fused() == 0


class NormOfBranch(GPT):
    def forward(self, hidden_states):
        return hidden_states + self.ln_2(self.mlp(self.ln_1(hidden_states)))


class Counts(GPT):
    calls = 0

    def forward(self, hidden_states):
        self.calls += 1
        self.last = self.mlp(self.ln_1(hidden_states))
        return super().forward(hidden_states)


class Unknown(GPT):
    """A subclass of a known class may override its forward."""


@pytest.mark.parametrize("kind", [Unknown, lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(8, 8))])
def test_other_blocks_stay_as_they_are(kind):
    plain, ours = pair(kind())
    assert type(ours) is type(plain)


@pytest.mark.parametrize(("kind", "norms"), [(NormOfBranch, ()), (GPT, ("ln_2", "ln_1"))])
def test_a_wrong_description_costs_one_norm(kind, norms, monkeypatch, fused):
    """Nobody fetches its result, so no other is made."""
    monkeypatch.setitem(residual_blocks._registered, kind, norms)
    plain, ours = pair(nn.Sequential(kind(), nn.LayerNorm(WIDTH)))
    assert is_fused(ours[0])
    x, counts = inputs(GPT), []
    for _ in range(3):
        fused()
        got = results(ours, x)
        counts.append(fused())
        check_same(got, results(plain, x), rtol=1e-5, atol=0.05)
    assert counts[0] >= counts[1] == counts[2]


def test_attributes_that_a_block_writes_stay(monkeypatch):
    monkeypatch.setitem(residual_blocks._registered, Counts, ("ln_1", "ln_2"))
    _, ours = pair(Counts())
    for _ in range(2):
        ours(inputs(GPT)[0])
    assert (ours.calls, type(ours.last)) == (2, torch.Tensor)


def test_a_description_is_checked(monkeypatch):
    with pytest.raises(TypeError, match=r"register_block: kind is 3; accepted: a subclass of torch.nn.Module"):
        ak.nn.register_block(3)
    with pytest.raises(TypeError, match=r"register_block: norms holds 3, of type int; accepted: names"):
        ak.nn.register_block(GPT, "ln_1", 3)
    monkeypatch.setitem(residual_blocks._registered, GPT, ("ln_1", "norm"))
    model = nn.Sequential(GPT())
    with pytest.raises(ValueError, match=r"convert: GPT was registered with 'norm'; accepted: names of its submodules"):
        ak.convert(model, fuse_residuals=True)
    assert type(model[0].mlp) is nn.Linear


def test_skip_revert_copies_and_a_second_call():
    block = GPT()
    model = nn.ModuleList([copy.deepcopy(block), block])
    ak.convert(model, fuse_residuals=True, skip=["0"])
    assert [is_fused(m) for m in model] == [False, True]
    ak.convert(model, fuse_residuals=True)
    assert [is_fused(m) for m in model] == [True, True]
    x = inputs(GPT)[0]
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert is_fused(other)
        assert torch.equal(other(x), block(x))
    assert [type(m) for m in ak.revert(model)] == [GPT, GPT]
    assert vars(block).keys() == vars(GPT()).keys()


def test_checkpoint_and_compile():
    plain, ours = pair(GPT())
    x = inputs(GPT)[0]
    want = results(plain, [x])
    torch.testing.assert_close([*results(Checkpointed(ours), [x])], [*want])
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(x), ours(x), rtol=2**-6, atol=2**-6)
