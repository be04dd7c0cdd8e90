"""The training steps that `predict.py --model` prices: GPT-2 as in the measured runs, the same after a conversion, and with
its residual stream written for this package's norms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

import amp_kernels as ak
from amp_kernels.ops._shadows import refresh_shadow
from amp_kernels.ops.linear_cross_entropy import default_chunk

WORDS, CONTEXT = 50304, 1024


@dataclass(frozen=True)
class Config:
    width: int
    heads: int
    layers: int
    batch: int


MODELS = {"gpt2-124m": Config(768, 12, 12, 32), "gpt2-1.5b": Config(1600, 25, 48, 8)}


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def attention(self, x: torch.Tensor, split: bool = False) -> torch.Tensor:
        """With ``split`` autograd copies the gradients of q, k and v into one tensor once; of the view it makes a stack, and
        copies that."""
        batch, context, width = x.shape
        size = width // self.heads
        if split:
            q, k, v = (t.view(batch, context, self.heads, size).transpose(1, 2) for t in self.qkv(x).split(width, -1))
        else:
            q, k, v = self.qkv(x).view(batch, context, 3, self.heads, size).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, context, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.norm_mlp(x))

    def forward_fused(self, branch: torch.Tensor | None, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same where each norm adds what came before it: the last branch, and the stream that it is still to be added
        to."""
        y, stream = self.norm(branch, residual=stream) if branch is not None else (self.norm(stream), stream)
        y, stream = self.norm_mlp(self.attention(y, split=True), residual=stream)
        return self.mlp(y), stream


class GPT2(nn.Module):
    def __init__(self, config: Config, layers: int):
        super().__init__()
        self.token, self.position = nn.Embedding(WORDS, config.width), nn.Embedding(CONTEXT, config.width)
        self.blocks = nn.Sequential(*(Block(config.width, config.heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(config.width), nn.Linear(config.width, WORDS, bias=False)
        self.fused_loss = self.fused_norms = False  # which take this package's head with loss, and its norms

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        x = (self.stream_fused(x) if self.fused_norms else self.norm(self.blocks(x))).flatten(0, 1)
        if self.fused_loss:
            chunk = default_chunk(x.shape[0], torch.bfloat16, "cuda")  # the trace is of CPU tensors
            return ak.linear_cross_entropy(x, self.head.weight, targets.flatten(), chunk_size=chunk)
        return F.cross_entropy(self.head(x).float(), targets.flatten())

    def stream_fused(self, stream: torch.Tensor) -> torch.Tensor:
        """The blocks and the last norm, where the norms make the additions."""
        branch = None
        for block in self.blocks:
            branch, stream = block.forward_fused(branch, stream)
        return self.norm(branch, residual=stream)[0]


def step(
    config: Config, layers: int, converted: bool, shadowed: bool = True, fused: bool = False
) -> Callable[[], Callable]:
    """What `step_trace.trace` builds: a step of the model with so many layers. The converted one has its loss from
    ``ak.linear_cross_entropy``, if ``shadowed`` its weights in 16 bits from the optimizer's shadows, and if ``fused`` the
    additions to the residual stream within the norms behind them. Its update is not in the trace: two passes over flat lists,
    priced by their bytes."""

    def build():
        with _disable_current_modes(), torch.device("meta"):
            model = GPT2(config, layers)
            if converted:
                model = ak.convert(model)
                model.fused_loss, model.fused_norms = True, fused
        for module in model.modules():  # now with values that nobody holds
            for name, p in module._parameters.items():
                if p is not None:
                    module._parameters[name] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype))
        tokens, targets = (torch.empty(config.batch, CONTEXT, dtype=torch.int64) for _ in range(2))
        params = list(model.parameters())
        optimizer = None if converted else torch.optim.AdamW(params, fused=True)
        if converted and shadowed:
            model.shadows = shadows(params)  # which die with whom holds them: in training, the optimizer

        def run(under_autocast: Callable) -> None:
            for p in params:
                p.grad = None
            under_autocast(lambda: model(tokens, targets)).backward()
            if optimizer is not None:
                torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
                optimizer.step()

        return run

    return build


def shadows(params: list[nn.Parameter]) -> list[torch.Tensor]:
    """The bf16 copies that products read in place of casting, pieces of one buffer, as the optimizer's step leaves them."""
    sizes = [p.numel() for p in params]
    pieces = torch.empty(sum(sizes), dtype=torch.bfloat16).split(sizes)
    views = [piece.view(p.shape) for piece, p in zip(pieces, params, strict=True)]
    for p, view in zip(params, views, strict=True):
        refresh_shadow(p, view)
    return views


def parameters(config: Config) -> int:
    with torch.device("meta"):
        one, two = (sum(p.numel() for p in GPT2(config, n).parameters()) for n in (1, 2))
    return one + (config.layers - 1) * (two - one)
