"""The addition at the end of a block is made by the first norm of the next one, or by the last norm of the model."""

import copy
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import amp_kernels as ak

from .blocks import (
    GPT,
    WIDTH,
    Checkpointed,
    Copied,
    Copies,
    Stack,
    Sublayer,
    Vit,
    check_same,
    first,
    inputs,
    pair,
    results,
)

nn = torch.nn


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
    check_same(got, want, rtol=1e-5, atol=0.05 * amp + 1e-5)
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
    "change", ["in place", "hook on the block", "hook on the norm", "autocast", "no grad", "checkpoint", "parameters"]
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
        if change == "parameters":
            doubled = {name: 2 * parameter for name, parameter in self.blocks[1].named_parameters()}
            return torch.func.functional_call(self.blocks[1], doubled, (y,))
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
    plain, ours = pair(Stack(GPT, 3, nn.LayerNorm(WIDTH)))
    x = inputs(GPT)
    for model in (plain, ours):
        model.blocks = nn.ModuleList(map(Checkpointed, model.blocks))
    fused()
    torch.testing.assert_close([*results(ours, x, False)], [*results(plain, x, False)])
    assert fused() == 6  # forward and once more


class Outer(nn.Module):
    """Adds for the first norm of a block inside."""

    def __init__(self):
        super().__init__()
        self.proj, self.inner = nn.Linear(WIDTH, WIDTH), Sublayer()

    def forward(self, x):
        return first(self.inner(x + self.proj(x)))


ak.nn.register_block(Outer)


def test_a_block_that_is_checkpointed_inside_gets_no_norm_early(fused):
    plain, ours = pair(Outer())
    x = inputs(Outer)
    assert torch.equal(results(ours, x)[0], results(plain, x)[0])
    assert fused() == 1
    for model in (plain, ours):
        model.inner = Checkpointed(model.inner)
    torch.testing.assert_close([*results(Checkpointed(ours), x)], [*results(Checkpointed(plain), x)])
    assert fused() == 0


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
    assert [vars(block.ln_1).keys() for block in ours.blocks] == [vars(GPT().ln_1).keys()] * 3


def test_nothing_waits_after_the_tensor_is_gone(fused):
    _, ours = pair(Stack(GPT, 2))
    y = ours.blocks[0](inputs(GPT)[0])
    assert [name for name in vars(y) if name.startswith("_amp")] == ["_amp_kernels_norm"]
    ours.blocks[1](y)
    assert not vars(y)


def to_meta(norm):
    norm.to("meta")


def to_half_the_width(norm):
    norm.weight.data = torch.ones(WIDTH // 2)


@pytest.mark.parametrize("change", [to_meta, to_half_the_width])
def test_blocks_of_other_widths_or_devices_are_not_successors(change, fused):
    _, ours = pair(Stack(GPT, 2))
    change(ours.blocks[1].ln_1)
    fused()
    ours.blocks[0](inputs(GPT)[0])
    assert fused() == 1


@pytest.mark.parametrize("norm", [lambda: nn.LayerNorm(WIDTH), lambda: nn.RMSNorm(WIDTH, eps=1e-5), Copied])
def test_the_last_norm_of_a_model_makes_the_last_addition(norm, fused):
    plain, ours = pair(Stack(GPT, 2, norm()))
    x = inputs(GPT)
    for _ in range(2):
        fused()
        got = results(ours, x)
        assert fused() == 4
    want = results(plain, x)
    check_same(got, want, rtol=1e-5, atol=0.05)


class EncoderDecoder(nn.Module):
    """The decoder's first norm is not the one after the encoder."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = (Stack(Sublayer, 2, Copied()) for _ in range(2))

    def forward(self, x):
        return self.decoder(x + self.encoder(x))


def test_every_stack_has_its_last_norm(fused):
    plain, ours = pair(EncoderDecoder())
    x = inputs(GPT)
    for _ in range(2):
        fused()
        assert torch.equal(results(ours, x)[0], results(plain, x)[0])
        assert fused() == 4


def test_hooks_on_the_last_norm_see_what_they_would(fused):
    plain, ours = pair(Stack(GPT, 2, nn.LayerNorm(WIDTH)))
    x = inputs(GPT)[0]
    for model in (plain, ours):
        model.norm.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        model.norm.register_forward_hook(lambda _, args, output: output + args[0])
    assert torch.equal(ours(x), plain(x))


def test_another_last_norm_makes_no_addition(fused):
    plain, ours = pair(Stack(GPT, 2, nn.LayerNorm(WIDTH)))
    x = inputs(GPT)[0]
    for model in (plain, ours):
        norm = ak.nn.LayerNorm(WIDTH, eps=0.5)
        norm.weight, norm.bias = model.norm.weight, model.norm.bias
        model.norm = norm
    for expected in (4, 3):  # the first time the former norm is computed, and nobody fetches it
        fused()
        assert torch.equal(ours(x), plain(x))
        assert fused() == expected


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_writes_in_place_between_blocks_are_seen(context, monkeypatch):
    plain, ours = pair(Stack(GPT, 2, nn.LayerNorm(WIDTH)))
    monkeypatch.setattr(Stack, "forward", lambda self, x: self.norm(self.blocks[1](self.blocks[0](x).mul_(2)).add_(1)))
    with context():
        x = torch.randn(2, 3, WIDTH)
        assert torch.equal(ours(x), plain(x))
