"""Attention as models write it, with a layer whose result is split, and a step of training: for the tests of such layers."""

import copy

import torch
from torch import nn

import amp_kernels as ak
from amp_kernels.testing.generators import normal

bf16 = torch.bfloat16
B, T, D, WIDTH = 2, 5, 16, 64


class Conv1D(nn.Module):
    """Of transformers, with a transposed weight."""

    def __init__(self, rows, columns):
        super().__init__()
        self.nf, self.weight, self.bias = (
            columns,
            nn.Parameter(normal(rows, columns, scale=0.2)),
            nn.Parameter(normal(columns)),
        )

    def forward(self, x):
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(*x.shape[:-1], self.nf)


Conv1D.__module__ = "transformers.pytorch_utils"


class Attention(nn.Module):
    columns = 3 * WIDTH

    def __init__(self, layer=nn.Linear):
        super().__init__()
        self.qkv, self.out = layer(WIDTH, self.columns), layer(WIDTH, WIDTH)

    def heads(self, x):
        return self.qkv(x).split(WIDTH, dim=2)

    def forward(self, x):
        q, k, v = (t if t.ndim == 4 else t.view(B, T, -1, D).transpose(1, 2) for t in self.heads(x))
        repeated = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        y = nn.functional.scaled_dot_product_attention(q, *repeated)
        return self.out(y.transpose(1, 2).reshape(B, T, WIDTH))


class Chunks(Attention):
    def heads(self, x):
        return torch.chunk(self.qkv(x), 3, -1)


class Sizes(Attention):
    def heads(self, x):
        return torch.split(self.qkv(x), [WIDTH] * 3, dim=-1)


class Slices(Attention):
    """Phi-3's: with fewer heads of keys and values in general."""

    def heads(self, x):
        qkv = self.qkv(x)
        assert qkv.shape[:-1] == x.shape[:-1]
        return qkv[..., :WIDTH], qkv[..., WIDTH : 2 * WIDTH], qkv[:, :, -WIDTH:]


class Views(Attention):
    """timm's."""

    def heads(self, x):
        return self.qkv(x).reshape(B, T, 3, -1, D).permute(2, 0, 3, 1, 4).unbind(0)


class Unpacked(Attention):
    def heads(self, x):
        q, k, v = self.qkv(x).view((B, T, 3, WIDTH // D, D)).transpose(1, 3).permute((2, 0, 1, 3, 4))
        return q, k, v


class Numbered(Attention):
    def heads(self, x):
        qkv = self.qkv(x).unflatten(-1, (3, WIDTH // D, D))
        assert len(qkv) == B
        return [qkv[:, :, i].transpose(1, 2) for i in (0, 1, -1)]


class Rows(Attention):
    """Qwen2-VL's: of tokens without a batch."""

    def heads(self, x):
        qkv = self.qkv(x.flatten(0, 1)).reshape(B * T, 3, WIDTH // D, -1).permute(1, 0, 2, 3)
        return [t.view(B, T, -1, D).transpose(1, 2) for t in (qkv[0], qkv[1], qkv[2])]


class Gate(Attention):
    """Phi-3's MLP."""

    columns = 2 * WIDTH

    def forward(self, x):
        gate, up = self.qkv(x).chunk(2, dim=-1)
        return self.out(nn.functional.silu(gate) * up)


KINDS = [Attention, Chunks, Sizes, Slices, Views, Unpacked, Numbered, Rows, Gate, lambda: Attention(Conv1D)]


def pair(block):
    """Converted without and with the option."""
    torch.manual_seed(0)
    return ak.convert(copy.deepcopy(block)), ak.convert(copy.deepcopy(block), fuse_residuals=True)


def trained(block, amp=True, x=None):
    """The result and the gradients of a step."""
    x = normal(B, T, WIDTH, seed=3) if x is None else x
    x = (x if amp else x.bfloat16()).detach().requires_grad_()
    block.zero_grad()
    with torch.autocast("cpu", bf16, enabled=amp):
        y = block(x)
    (y.float() * normal(*y.shape, seed=5)).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in block.parameters() if p.ndim == 2)]


def assert_same(one, other):
    assert all(torch.equal(*each) for each in zip(one, other, strict=True))
