"""Bytes that blocks of GPT-2 and Llama save for backward under autocast, in 16-bit values of the stream's width a token: converted and
torch's own."""

import pytest
import torch
import torch.nn.functional as F

import amp_kernels as ak

from ..helpers.generators import normal

nn = torch.nn
WIDTH, HEADS, TOKENS = 32, 2, 35


class SelfAttention(nn.Module):
    def __init__(self, bias: bool):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=bias), nn.Linear(WIDTH, WIDTH, bias=bias)

    def forward(self, x):
        q, k, v = (t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in self.c_attn(x).chunk(3, dim=2))
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.act, self.dropout = nn.GELU(approximate="tanh"), nn.Dropout(0.0)

    def forward(self, x):
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class GatedFeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(3 * WIDTH, WIDTH, bias=False), nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, norm, feed_forward, bias):
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = norm(WIDTH), SelfAttention(bias), norm(WIDTH), feed_forward()

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


BLOCKS = {
    "gpt2": lambda: Block(nn.LayerNorm, FeedForward, True),
    "llama": lambda: Block(nn.RMSNorm, GatedFeedForward, False),
}


def saved(block) -> float:
    """Storages that backward keeps, without parameters and their 16-bit copies."""
    found, weights = {}, {p.numel() for p in block.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if tensor.numel() not in weights:
            found[storage.data_ptr()] = storage.nbytes(), tensor  # alive, so that no other takes its place
        return tensor

    x = normal(1, TOKENS, WIDTH).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = block(x)
    y.sum().backward()
    return sum(nbytes for nbytes, _ in found.values()) / (2 * TOKENS * WIDTH)


# Values of torch, of the converted block, and of one that makes its activations again. An FP32 stream counts twice; statistics of rows
# are the fractions.
SAVED = {"gpt2": (18.375, 18.375, 14.375), "llama": (27.25, 22.25, 22.25)}


@pytest.mark.parametrize("kind", BLOCKS)
def test_saved_for_backward(kind):
    blocks = BLOCKS[kind](), ak.convert(BLOCKS[kind]()), ak.convert(BLOCKS[kind](), recompute_mlp=True)
    assert tuple(map(saved, blocks)) == SAVED[kind]
