"""Small blocks of transformers, and what they compute: for the tests of norms that make additions."""

import copy

import torch
from torch.utils.checkpoint import checkpoint

import amp_kernels as ak
from amp_kernels.nn import residual

from ..helpers.generators import normal

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
    leaves = [*xs, *block.parameters()]
    for leaf in leaves:
        leaf.grad = None
    (y.float() * factor).sum().backward()
    return [y.detach(), *(torch.zeros(()) if leaf.grad is None else leaf.grad for leaf in leaves)]


def check_same(got, want, **tolerances):
    """Two of :func:`results`: the bits of the result, gradients within the tolerances."""
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close([*got[1:]], [*want[1:]], **tolerances)


def pair(block):
    """Converted with and without fused residuals."""
    torch.manual_seed(0)
    return ak.convert(copy.deepcopy(block)), ak.convert(copy.deepcopy(block), fuse_residuals=True)


def is_fused(block):
    return type(block).forward is residual.forward


class Checkpointed(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


class Sublayer(nn.Module):
    """T5's."""

    def __init__(self):
        super().__init__()
        self.attention, self.norm, self.dropout = Attention(), Copied(), nn.Dropout(0.1)

    def forward(self, hidden_states, mask=None):
        output = self.attention(self.norm(hidden_states), scale=0.5)
        return (hidden_states + self.dropout(output[0]), *output[1:])


class Stack(nn.Module):
    def __init__(self, kind, count=3, norm=None):
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(count))
        self.order, self.norm = range(count), norm

    def forward(self, x):
        for i in self.order:
            x = first(self.blocks[i](x))
        return x if self.norm is None else self.norm(x)


for kind in (*BLOCKS, Sublayer):
    ak.nn.register_block(kind)
