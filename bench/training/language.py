"""The scaled-down tasks of the paper's table, continued: language models and translation."""

from __future__ import annotations

import hashlib
import re
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import data
from .tasks import Task, held_out_draw, like, mean_loss

# ---- language models over the words of Python's manual, hashed into many buckets

BUCKETS, CONTEXT = 4096, 32


@cache
def words() -> tuple[Tensor, Tensor]:
    """The manual's words as buckets, int64: to train on, and held out."""
    text = data.load_text()

    def buckets(raw: Tensor) -> Tensor:
        found = re.findall(r"\w+|[^\w\s]", bytes(raw.tolist()).decode(errors="replace"))
        digests = (hashlib.blake2b(word.encode(), digest_size=4).digest() for word in found)
        return torch.tensor([int.from_bytes(digest, "big") % BUCKETS for digest in digests])

    return buckets(text.train), buckets(text.validation)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``[n, t, w]``, in four heads."""
    q, k, v = (x.unflatten(2, (4, -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(wide) for _ in range(2))
        self.qkv, self.out = nn.Linear(wide, 3 * wide), nn.Linear(wide, wide)
        self.feed_forward = nn.Sequential(nn.Linear(wide, 4 * wide), nn.GELU("tanh"), nn.Linear(4 * wide, wide))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(_causal(*self.qkv(self.norms[0](x)).chunk(3, -1)))
        return x + self.feed_forward(self.norms[1](x))


class Transformer(nn.Module):
    def __init__(self, wide: int, layers: int, symbols: int, places: int, targets: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(symbols, wide), nn.Embedding(places, wide)
        self.layers = nn.Sequential(*(Block(wide) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(wide), nn.Linear(wide, targets)
        nn.init.normal_(self.tokens.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.tokens(tokens) + self.places.weight[: tokens.shape[1]])))


class Lstm(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BUCKETS, wide)
        self.gates, self.head = nn.Linear(2 * wide, 4 * wide), nn.Linear(wide, BUCKETS)
        nn.init.normal_(self.tokens.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        h = c = torch.zeros_like(x[:, 0])
        states = []
        for t in range(x.shape[1]):
            i, f, g, o = self.gates(torch.cat([x[:, t], h], -1)).chunk(4, -1)
            c = torch.sigmoid(f + 1.0) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            states.append(h)
        return self.head(torch.stack(states, 1))


class Language(Task):
    """A mean over 16,384 words of 4,096: the gradient of a logit is its probability / 16,384, which FP16 keeps only for words that are
    expected at least once in 2,000."""

    small_steps, batch, accumulate = 14, 64, 8
    lr = 1e-2

    def loss(self, model: nn.Module, draw: torch.Generator) -> Tensor:
        train, _ = words()
        starts = torch.randint(len(train) - CONTEXT, (self.count,), generator=draw)
        return self._loss(model, train, starts)

    @torch.no_grad()
    def metric(self, model: nn.Module) -> float:
        _, held_out = words()
        return self._loss(model, held_out, torch.arange(0, len(held_out) - CONTEXT, CONTEXT)[:128]).item()

    def _loss(self, model: nn.Module, stream: Tensor, starts: Tensor) -> Tensor:
        window = like(model, stream[starts[:, None] + torch.arange(CONTEXT + 1)])
        return mean_loss(model(window[:, :-1]), window[:, 1:])


class TransformerLanguage(Language):
    name = "transformer"

    def model(self) -> nn.Module:
        return Transformer(24 * self.size.width, 1, BUCKETS, CONTEXT, BUCKETS)


class LstmLanguage(Language):
    name = "lstm"

    def model(self) -> nn.Module:
        return Lstm(24 * self.size.width)


# ---- translation: from one formal language into another

SYMBOLS, LENGTH = 16, 10


class Translation(Task):
    """A sentence of a formal language, a separator, and its translation: backwards, in other symbols.
    One decoder reads both."""

    name = "translation"
    small_steps, batch, lr = 150, 64, 3e-3

    def model(self) -> nn.Module:
        return Transformer(48 * self.size.width, 2, SYMBOLS + 1, 2 * LENGTH, SYMBOLS)

    def _loss(self, model: nn.Module, count: int, draw: torch.Generator) -> Tensor:
        source = torch.randint(SYMBOLS, (count, LENGTH), generator=draw)
        target = (source * 3 + 5).remainder(SYMBOLS).flip(1)
        separator = torch.full((count, 1), SYMBOLS)
        tokens = like(model, torch.cat([source, separator, target[:, :-1]], 1))
        return mean_loss(model(tokens)[:, LENGTH:], like(model, target))

    def loss(self, model: nn.Module, draw: torch.Generator) -> Tensor:
        return self._loss(model, self.count, draw)

    @torch.no_grad()
    def metric(self, model: nn.Module) -> float:
        return self._loss(model, 512, held_out_draw()).item()
