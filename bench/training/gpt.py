"""GPTs in plain PyTorch: what `ak.convert` gets to see in a user's training script.

Pre-norm blocks, learned positions, tanh GELU, causal attention through `scaled_dot_product_attention`. Nothing here knows
of amp_kernels but the two options of `GPT2`. The providers of bench/train.py train the byte-level `GPT`; bench/gpt2.py
times a step of `GPT2`.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import amp_kernels as ak
from amp_kernels.ops._head import default_chunk

VOCABULARY = 256


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the model and the training recipe that suits it."""

    width: int
    heads: int
    layers: int
    context: int
    batch: int
    steps: int
    lr: float
    growth_interval: int  # steps without overflow until the loss scale doubles: few, so that a short run shows it move
    eval_batches: int
    dropout: float = 0.0

    def lr_at(self, step: int, steps: int) -> float:
        """A cosine from `lr` to a fiftieth of it over the run, times a linear warm-up over the first fifth.

        The long warm-up and the low end keep the comparison sharp: with a twentieth and a tenth, runs that differ in
        rounding alone ended 0.7 % apart.
        """
        warmup = max(1, steps // 5)
        cosine = 0.51 + 0.49 * math.cos(math.pi * step / steps)
        return self.lr * min(1.0, (step + 1) / warmup) * cosine


# The text holds 0.42 M training bytes. "micro" is the CPU default: stock FP16 matmul runs at 5 to 20 GFLOP/s there, and
# that run sets the size. "gpt2" is GPT-2 124M without its 38 M vocabulary weights; it reads the text a dozen times,
# hence the dropout.
MODELS = {
    "nano": ModelConfig(32, 2, 1, context=32, batch=8, steps=60, lr=5e-3, growth_interval=8, eval_batches=4, dropout=0.1),
    "micro": ModelConfig(64, 4, 2, context=64, batch=16, steps=700, lr=4e-3, growth_interval=80, eval_batches=24),
    "mini": ModelConfig(384, 6, 6, context=256, batch=64, steps=300, lr=1e-3, growth_interval=30, eval_batches=8, dropout=0.2),
    "gpt2": ModelConfig(768, 12, 12, context=1024, batch=16, steps=300, lr=6e-4, growth_interval=30, eval_batches=4, dropout=0.2),
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float = 0.0):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout) if dropout else None

    def attention(self, x: torch.Tensor, split: bool = False) -> torch.Tensor:
        """With ``split`` this package's linear reads the gradients of q, k and v where attention left them; of the view autograd
        makes a stack, and copies that."""
        batch, context, width = x.shape
        size = width // self.heads
        if split:
            pieces = ak.linear(x, self.qkv.weight, self.qkv.bias, split=3 * [width])
            q, k, v = (t.view(batch, context, self.heads, size).transpose(1, 2) for t in pieces)
        else:
            q, k, v = self.qkv(x).view(batch, context, 3, self.heads, size).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, context, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._dropped(self.attention(self.attention_norm(x)))
        return x + self._dropped(self.mlp(self.mlp_norm(x)))

    def _dropped(self, branch: torch.Tensor) -> torch.Tensor:
        return branch if self.dropout is None else self.dropout(branch)

    def forward_fused(self, branch: torch.Tensor | None, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same without dropout, where each norm makes the addition in front of it: the last branch, and the stream that it is
        still to be added to."""
        if branch is None:
            y = self.attention_norm(stream)
        else:
            y, stream = self.attention_norm(branch, residual=stream)
        y, stream = self.mlp_norm(self.attention(y, split=True), residual=stream)
        return self.mlp(y), stream


ak.nn.register_block(Block)  # for `fuse_residuals`


class GPT(nn.Module):
    """Byte tokens [batch, context] int64 and their targets -> mean cross-entropy in nats per byte (FP32, 0-dim)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config.width, config.heads, config.dropout) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.loss = nn.CrossEntropyLoss()
        self.apply(_initialize)
        # GPT-2: weights that write into the residual stream shrink with depth, so that its variance does not grow.
        for block in self.blocks:
            for linear in (block.out, block.mlp[2]):
                nn.init.normal_(linear.weight, std=0.02 / (2 * config.layers) ** 0.5)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token(tokens) + self.position(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return self.loss(logits.float().flatten(0, 1), targets.flatten())


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


WORDS, CONTEXT = 50304, 1024


@dataclass(frozen=True)
class GPT2Config:
    width: int
    heads: int
    layers: int
    batch: int


GPT2_MODELS = {"gpt2-124m": GPT2Config(768, 12, 12, 32), "gpt2-1.5b": GPT2Config(1600, 25, 48, 8)}


class GPT2(nn.Module):
    def __init__(self, config: GPT2Config, layers: int):
        super().__init__()
        self.token, self.position = nn.Embedding(WORDS, config.width), nn.Embedding(CONTEXT, config.width)
        self.blocks = nn.Sequential(*(Block(config.width, config.heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(config.width), nn.Linear(config.width, WORDS, bias=False)
        self.fused_loss = self.fused_norms = False  # which take this package's head with loss, and its norms
        self.head_loss = None  # another library's function of rows, weight and targets

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        x = (self.stream_fused(x) if self.fused_norms else self.norm(self.blocks(x))).flatten(0, 1)
        if self.fused_loss:
            chunk = default_chunk(x.shape[0], torch.bfloat16, "cuda")  # the trace is of CPU tensors
            return ak.linear_cross_entropy(x, self.head.weight, targets.flatten(), chunk_size=chunk)
        if self.head_loss is not None:
            return self.head_loss(x, self.head.weight, targets.flatten())
        return F.cross_entropy(self.head(x).float(), targets.flatten())

    def stream_fused(self, stream: torch.Tensor) -> torch.Tensor:
        """The blocks and the last norm, where the norms make the additions."""
        branch = None
        for block in self.blocks:
            branch, stream = block.forward_fused(branch, stream)
        return self.norm(branch, residual=stream)[0]
