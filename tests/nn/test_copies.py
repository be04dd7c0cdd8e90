"""No FP32 copies: the casts and copies of one training step of GPT-2, counted below autograd, and the memory
that its last layer and loss take at most."""

import copy
import weakref
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import amp_kernels as ak
from amp_kernels._dispatch import autocast

BATCH, CONTEXT, WIDTH, HEADS, WORDS = 4, 32, 64, 4, 512


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(BATCH, CONTEXT, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm_mlp(x))


class GPT2(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.token.weight
        self.loss = nn.CrossEntropyLoss()

    def forward(self, tokens):
        x = self.blocks(self.token(tokens) + self.position(torch.arange(CONTEXT)))
        return self.loss(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


class Copies(TorchDispatchMode):
    """Bytes read and written by casts and copies of floats, by (from, to, shape)."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_, torch.ops.aten.clone):
            source = args[1] if func.overloadpacket is torch.ops.aten.copy_ else args[0]
            if source.is_floating_point():
                self.bytes[source.dtype, result.dtype, tuple(source.shape)] += source.nbytes + result.nbytes
        return result


def counted(model, optimizer, scaler, dtype):
    """The bytes of the second step: the first makes what lasts."""
    tokens = torch.randint(WORDS, (BATCH, CONTEXT), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        optimizer.zero_grad()
        with Copies() as copies:
            with torch.autocast("cpu", dtype):
                loss = model(tokens)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return copies.bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_and_copies_of_gpt2(dtype, monkeypatch):
    torch.manual_seed(0)
    model = GPT2()
    ours = ak.convert(copy.deepcopy(model))
    scaled = {"enabled": dtype == torch.float16}
    before = counted(model, torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu", **scaled), dtype)
    monkeypatch.setattr(autocast, "eager", lambda *tensors: True)  # the mode only watches
    optimizer = ak.optim.AdamW(ours.parameters(), shadow_dtype=dtype)
    after = counted(ours, optimizer, ak.GradScaler("cpu", **scaled), dtype)
    assert after.total() <= 0.2 * before.total()
    stream, heads = (BATCH, CONTEXT, WIDTH), (BATCH, CONTEXT, 3, HEADS, WIDTH // HEADS)
    # The gradient of the fp32 stream enters each branch in 16 bits; attention's gradients are put side by side.
    assert set(after) == {(torch.float32, dtype, stream), (dtype, dtype, heads)}


class Peak(TorchDispatchMode):
    """The most bytes that results made under it held at a time."""

    def __init__(self):
        super().__init__()
        self.live, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            return 2.0  # of a gradient of the loss that is not 1
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):  # of views none is new
            if isinstance(tensor, torch.Tensor) and (key := tensor.untyped_storage()._cdata) not in {
                *self.live,
                *given,
            }:
                storage = tensor.untyped_storage()
                forget = weakref.ref(storage, lambda _, key=key: self.live.pop(key))
                self.live[key] = storage.nbytes(), forget
        self.most = max(self.most, sum(size for size, _ in self.live.values()))
        return result


def peak_of_head_and_loss(loss, rows, dtype=torch.bfloat16, features=768, classes=50257):
    """GPT-2's sizes, on tensors without memory."""
    with FakeTensorMode():
        x, head = (torch.empty(n, features, requires_grad=True) for n in (rows, classes))
        target = torch.empty(rows, dtype=torch.int64)
        with Peak() as memory:
            with torch.autocast("cpu", dtype):
                result = loss(x, head, target)
            result.backward()
    return memory.most


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [4096, 16384])
def test_head_and_loss_hold_one_chunk_of_logits(rows, dtype, monkeypatch):
    monkeypatch.setattr(autocast, "eager", lambda *tensors: True)  # the mode only watches
    features, classes, chunk = 768, 50257, max(1024, rows // 8)
    kept = 2 * features * (rows + classes)  # x and the weight in 16 bits
    made = 4 * features * (rows + classes)  # their gradients
    of_a_chunk = 2 * chunk * classes
    few = 4 * features * chunk + 64 * rows  # a chunk's gradient of x, before it is copied; numbers of each row
    assert 0 <= peak_of_head_and_loss(ak.linear_cross_entropy, rows, dtype) - kept - made - of_a_chunk <= few
