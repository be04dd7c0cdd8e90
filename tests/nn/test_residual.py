"""Norms that make the addition in front of them: in which blocks, with which bits, and where they leave it alone."""

import copy
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import amp_kernels as ak
from amp_kernels.nn import residual
from amp_kernels.testing.generators import normal

nn = torch.nn
WIDTH = 8


class Attention(nn.Module):
    def __init__(self, results=2):
        super().__init__()
        self.proj, self.results = nn.Linear(WIDTH, WIDTH), results

    def forward(self, hidden_states, scale=1.0, **kwargs):
        y = self.proj(hidden_states) * scale
        return y if self.results == 1 else (y, None)


class Copied(nn.Module):
    """LlamaRMSNorm."""

    def __init__(self):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.rand(WIDTH)), 1e-6

    def forward(self, hidden_states):
        dtype = hidden_states.dtype
        x = hidden_states.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(dtype)


Copied.__name__ = "CopiedRMSNorm"


class GPT(nn.Module):
    def __init__(self, norm=lambda: nn.LayerNorm(WIDTH)):
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = norm(), Attention(), norm(), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states, scale=1.0, *, use_cache=False):
        residual = hidden_states
        attn_output, _ = self.attn(self.ln_1(hidden_states), scale=scale, use_cache=use_cache)
        hidden_states = attn_output + residual
        residual = hidden_states
        hidden_states = residual + self.mlp(self.ln_2(hidden_states))
        return hidden_states


class Bert(nn.Module):
    """After the addition, and of two tensors."""

    def __init__(self):
        super().__init__()
        self.dense, self.LayerNorm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.5)

    def forward(self, hidden_states, input_tensor):
        return self.LayerNorm(self.dropout(self.dense(hidden_states)) + input_tensor)


class Vit(GPT):
    """The result first in a tuple, a dropout between, and everything by name."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden_states, scale=1.0):
        attention, weights = self.attn(hidden_states=self.ln_1(hidden_states), scale=scale)
        hidden_states = self.dropout(attention) + hidden_states
        return self.dropout(self.mlp(self.ln_2(hidden_states))) + hidden_states, weights


class Copies(GPT):
    def __init__(self):
        super().__init__(Copied)


BLOCKS = {GPT: 1, Copies: 1, Bert: 2, Vit: 1}  # and the number of tensors that they take


def inputs(kind, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(2, 3, WIDTH, generator=generator).to(dtype).requires_grad_() for _ in range(BLOCKS.get(kind, 1))
    ]


def first(result):
    return result[0] if isinstance(result, tuple) else result


def results(block, xs, amp=True, **kwargs):
    """The result and all gradients."""
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        y = first(block(*xs, **kwargs))
    factor = normal(*y.shape, seed=5)
    grads = torch.autograd.grad((y.float() * factor).sum(), [*xs, *block.parameters()])
    return [y.detach(), *grads]


@pytest.fixture
def fused(op_calls):
    """Number of norms that made an addition since the last call."""

    def count():
        found = sum(len(args) > 3 and args[3] is not None for args, _ in op_calls.pop("norm_forward", []))
        op_calls.clear()
        return found

    return count


def pair(block):
    """Converted with and without fused residuals."""
    torch.manual_seed(0)
    return ak.convert(copy.deepcopy(block)), ak.convert(copy.deepcopy(block), fuse_residuals=True)


def is_fused(block):
    return type(block).forward is residual.forward


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
    assert torch.equal(got[0], want[0])
    for one, other in zip(
        got[1:], want[1:], strict=True
    ):  # where a 16-bit stream's gradients meet, ours round once less
        torch.testing.assert_close(
            one, other, rtol=2**-6 if dtype == torch.bfloat16 else 1e-5, atol=0.05 * (dtype != torch.float32) + 1e-5
        )
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


def test_a_stand_in_is_a_tensor_to_whoever_asks():
    x, y = torch.arange(4.0), torch.ones(4)
    for stand_in in (residual.Branch(x + 1), residual.Sum(x, y)):
        assert isinstance(stand_in, torch.Tensor)
        assert stand_in.shape == (4,)
        assert torch.equal(stand_in * 2, 2 * stand_in)
        assert torch.equal(torch.cat([stand_in, x]), torch.tensor([1.0, 2, 3, 4, 0, 1, 2, 3]))
        assert stand_in[1] == 2
        assert (stand_in == x + 1).all()
        assert (stand_in < 5).all()
        assert torch.equal(stand_in - stand_in, 0 * x)
        assert len(stand_in) == 4


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
    for x in (torch.randn(2, 3, WIDTH).bfloat16(), torch.randn(2, 3, WIDTH), torch.randn(2, 3, WIDTH).double()):
        one, other = (copy.deepcopy(m).double() if x.dtype == torch.float64 else m for m in (plain, ours))
        if x.dtype == torch.bfloat16:  # fp32 branches, outside autocast
            one.attn.forward = other.attn.forward = lambda h, **_: (h.float() * 2, None)
            one.mlp.forward = other.mlp.forward = lambda h: h.float()
        assert torch.equal(one(x), other(x))
        assert one(x).dtype == other(x).dtype
        for m in (one, other):
            vars(m.attn).pop("forward", None)
            vars(m.mlp).pop("forward", None)
    fused()
    plain.attn.forward = ours.attn.forward = lambda h, **_: (h[:, :1], None)
    assert torch.equal(plain(x.float()), ours(x.float()))
    assert fused() == 0


class Counts(GPT):
    calls = 0

    def forward(self, hidden_states):
        self.calls += 1
        return super().forward(hidden_states)


class NormOfBranch(GPT):
    def forward(self, hidden_states):
        return hidden_states + self.ln_2(self.mlp(self.ln_1(hidden_states)))


class Scaled(GPT):
    """The sum that the norm gets is of something else than what a submodule returned."""

    def forward(self, hidden_states):
        hidden_states = hidden_states + 0.5 * self.mlp(self.ln_1(hidden_states))
        return hidden_states + self.mlp(self.ln_2(hidden_states))


@pytest.mark.parametrize(
    "kind", [Counts, NormOfBranch, Scaled, lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(8, 8))]
)
def test_other_blocks_stay_as_they_are(kind):
    plain, ours = pair(kind())
    assert type(ours) is type(plain)


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
    for one, other in zip(results(Checkpointed(ours), [x]), want, strict=True):
        torch.testing.assert_close(one, other)
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(x), ours(x), rtol=2**-6, atol=2**-6)


class Checkpointed(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


# ---- the addition at the end of a block


class Sublayer(nn.Module):
    """T5's."""

    def __init__(self):
        super().__init__()
        self.attention, self.norm, self.dropout = Attention(), Copied(), nn.Dropout(0.1)

    def forward(self, hidden_states, mask=None):
        output = self.attention(self.norm(hidden_states), scale=0.5)
        return (hidden_states + self.dropout(output[0]), *output[1:])


class Stack(nn.Module):
    def __init__(self, kind, count=3):
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(count))
        self.order = range(count)

    def forward(self, x):
        for i in self.order:
            x = first(self.blocks[i](x))
        return x


STACKS = {GPT: (3, 2), Copies: (3, 2), Vit: (3, 2), Sublayer: (0, 2)}  # additions inside and between blocks


@pytest.mark.parametrize("kind", STACKS)
@pytest.mark.parametrize("amp", [True, False])
def test_the_next_block_s_norm_makes_the_last_addition(kind, amp, fused):
    plain, ours = pair(Stack(kind))
    x = inputs(kind)
    fused()
    for _ in range(2):
        got = results(ours, x, amp)
        assert fused() == sum(STACKS[kind])
    want = results(plain, x, amp)
    assert torch.equal(got[0], want[0])
    for one, other in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=0.05 * amp + 1e-5)
    fused()
    with torch.no_grad():
        assert torch.equal(ours.eval()(*x), plain.eval()(*x))
    assert fused() == sum(STACKS[kind])


def test_blocks_in_another_order_cost_one_norm(fused):
    """Nobody fetches the first result that waits, so no other is made."""
    plain, ours = pair(Stack(GPT, 2))
    plain.order = ours.order = (1, 0)
    x = inputs(GPT)
    for expected in (3, 2, 2):
        fused()
        assert torch.equal(results(ours, x)[0], results(plain, x)[0])
        assert fused() == expected


@pytest.mark.parametrize(
    "change", ["in place", "hook on the block", "hook on the norm", "autocast", "no grad", "checkpoint"]
)
def test_a_norm_that_waits_is_for_the_same_tensor_and_setting(change, fused, monkeypatch):
    plain, ours = pair(Stack(GPT, 2))
    x = inputs(GPT)[0]

    def forward(self, x):
        y = self.blocks[0](x)
        if change == "in place":
            y.mul_(2)
        if change == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                return self.blocks[1](y)
        if change == "no grad":
            with torch.no_grad():
                return self.blocks[1](y)
        if change == "checkpoint":
            return checkpoint(self.blocks[1], y, use_reentrant=False)
        return self.blocks[1](y)

    monkeypatch.setattr(Stack, "forward", forward)
    if "hook" in change:
        for model in (plain, ours):
            module = model.blocks[1] if "block" in change else model.blocks[1].ln_1
            module.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    for _ in range(2):
        assert torch.equal(ours(x), plain(x))
    if change not in ("no grad", "in place"):
        for one, other in zip(
            *(torch.autograd.grad(m(x).sum(), [*m.parameters()]) for m in (ours, plain)), strict=True
        ):
            torch.testing.assert_close(one, other)


def test_checkpointed_blocks_leave_nothing(fused):
    plain, ours = pair(Stack(GPT, 3))
    x = inputs(GPT)
    for model in (plain, ours):
        model.blocks = nn.ModuleList(map(Checkpointed, model.blocks))
    fused()
    for one, other in zip(results(ours, x, False), results(plain, x, False), strict=True):
        torch.testing.assert_close(one, other)
    assert fused() == 6  # forward and once more


def test_successors_are_copied_pickled_and_reverted(fused):
    _, ours = pair(Stack(GPT))
    assert set(ours.state_dict()) == set(Stack(GPT).state_dict())
    x = inputs(GPT)[0]
    for model in (
        copy.deepcopy(ours),
        pickle.loads(pickle.dumps(ours)),
        ak.convert(copy.deepcopy(ours), fuse_residuals=True),
    ):
        fused()
        assert torch.equal(model(x), ours(x))
        assert fused() == 10
    ak.revert(ours)
    assert [vars(block).keys() for block in ours.blocks] == [vars(GPT()).keys()] * 3


def test_nothing_waits_after_the_tensor_is_gone(fused):
    _, ours = pair(Stack(GPT, 2))
    y = ours.blocks[0](inputs(GPT)[0])
    assert [name for name in vars(y) if name.startswith("_amp")] == ["_amp_kernels_norm"]
    ours.blocks[1](y)
    assert not vars(y)


def test_blocks_of_other_widths_or_devices_are_not_successors(fused):
    _, ours = pair(Stack(GPT, 2))
    ours.blocks[1].to("meta")
    x = inputs(GPT)[0]
    fused()
    ours.blocks[0](x)
    assert fused() == 1
    ours.blocks[1].ln_1 = ak.nn.LayerNorm(WIDTH // 2)
    residual.set_successor(ours.blocks[0], ours.blocks[1].ln_1)
    ours.blocks[0](x)
    assert fused() == 1
