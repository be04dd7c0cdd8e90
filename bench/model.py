"""A byte-level GPT in plain PyTorch: what `ak.convert` gets to see in a user's training script.

Pre-norm blocks, learned positions, tanh GELU, causal attention through `scaled_dot_product_attention`, loss in FP32.
Nothing here knows of amp_kernels; the two providers of bench/train.py train this very module.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

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
    growth_interval: (
        int  # steps without overflow until the loss scale doubles; short, so that a short run shows it move
    )
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
    "nano": ModelConfig(
        32, 2, 1, context=32, batch=8, steps=60, lr=5e-3, growth_interval=8, eval_batches=4, dropout=0.1
    ),
    "micro": ModelConfig(64, 4, 2, context=64, batch=16, steps=700, lr=4e-3, growth_interval=80, eval_batches=24),
    "mini": ModelConfig(
        384, 6, 6, context=256, batch=64, steps=300, lr=1e-3, growth_interval=30, eval_batches=8, dropout=0.2
    ),
    "gpt2": ModelConfig(
        768, 12, 12, context=1024, batch=16, steps=300, lr=6e-4, growth_interval=30, eval_batches=4, dropout=0.2
    ),
}


class Block(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads = config.heads
        self.norm_attention = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.attention_out = nn.Linear(config.width, config.width)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * config.width, config.width),
        )
        self.dropout = nn.Dropout(config.dropout)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, context, width = x.shape
        q, k, v = self.qkv(x).view(batch, context, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attention_out(y.transpose(1, 2).reshape(batch, context, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        return x + self.dropout(self.mlp(self.norm_mlp(x)))


class GPT(nn.Module):
    """Byte tokens [batch, context] int64 and their targets -> mean cross-entropy in nats per byte (FP32, 0-dim)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.loss = nn.CrossEntropyLoss()
        self.apply(_initialize)
        # GPT-2: weights that write into the residual stream shrink with depth, so that its variance does not grow.
        for block in self.blocks:
            for linear in (block.attention_out, block.mlp[2]):
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
