"""The ops of a training step beside its products, as calls of the public functions."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

import amp_kernels as ak

from ..helpers import generators

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ROWS, COLUMNS, CLASSES = 6, 40, 23
normal = functools.partial(generators.normal, device="cuda")
leaf = functools.partial(normal, grad=True)


def with_gradients(function: Callable[..., Tensor | tuple[Tensor, ...]], *inputs: Tensor) -> Callable[[], list[Tensor]]:
    """A call that returns the results and the gradients of the inputs, of a gradient of ones."""

    def call() -> list[Tensor]:
        out = function(*inputs)
        out = [out] if isinstance(out, Tensor) else [t for t in out if t is not None]
        wanted = [t for t in inputs if t.requires_grad]
        return [*(t.detach() for t in out), *torch.autograd.grad([t.sum() for t in out], wanted)]

    return call


def loss(**options):
    def make() -> Callable[[], list[Tensor]]:
        target = (torch.arange(ROWS) % CLASSES).cuda()
        weight = normal(CLASSES, seed=1).abs() if options.get("weighted") else None
        given = {k: v for k, v in options.items() if k != "weighted"}
        logits = leaf(ROWS, CLASSES, dtype=BF16)
        return with_gradients(lambda x: ak.cross_entropy(x, target, weight, **given), logits)

    return make


def head(op=ak.linear_cross_entropy, **options):
    def make() -> Callable[[], list[Tensor]]:
        target = (torch.arange(ROWS) % CLASSES).cuda()
        target[2] = -100
        dtype = options.get("dtype", BF16)
        given = {k: v for k, v in options.items() if k != "dtype"}
        x, weight, bias = leaf(ROWS, COLUMNS, dtype=dtype), leaf(CLASSES, COLUMNS, dtype=dtype), leaf(CLASSES)

        def function(x, weight, bias):
            with torch.autocast("cuda", BF16):
                return op(x, weight, target, linear_bias=bias, **given)

        return with_gradients(function, x, weight, bias)

    return make


def cast() -> Callable[[], list[Tensor]]:
    sources = [normal(1000), normal(37, dtype=F16)]
    destinations = [torch.empty_like(t, dtype=BF16) for t in sources]
    step = torch.ones((), device="cuda")

    def call() -> list[Tensor]:
        ak.cast_(destinations, sources)
        ak.cast_(destinations, sources, seed=3, step=step)
        return destinations

    return call


def embedding(**options):
    def make() -> Callable[[], list[Tensor]]:
        indices = (torch.arange(2 * ROWS) % CLASSES).view(2, ROWS).cuda()
        return with_gradients(lambda w: ak.embedding(indices, w, **options), leaf(CLASSES, COLUMNS, dtype=BF16))

    return make


def add_and_norm() -> Callable[[], list[Tensor]]:
    """A branch in 16 bits and a stream in fp32."""
    x, stream = leaf(ROWS, COLUMNS, dtype=BF16), leaf(ROWS, COLUMNS, seed=1)
    weight, bias = leaf(COLUMNS, seed=2), leaf(COLUMNS, seed=3)
    return with_gradients(
        lambda x, w, b, stream: ak.layer_norm(x, (COLUMNS,), w, b, residual=stream), x, weight, bias, stream
    )


def rotary(normed: bool):
    def make() -> Callable[[], list[Tensor]]:
        q, k = (leaf(2, ROWS, heads, COLUMNS, dtype=BF16, seed=heads) for heads in (4, 2))
        cos, sin = normal(ROWS, COLUMNS, seed=1), normal(ROWS, COLUMNS, seed=2)
        weights = [leaf(COLUMNS, seed=3), leaf(COLUMNS, seed=4)] if normed else []

        def function(q, k, q_weight=None, k_weight=None):
            q, k = q.transpose(1, 2), k.transpose(1, 2)
            return ak.rotary(q, k, cos, sin, q_weight=q_weight, k_weight=k_weight)

        return with_gradients(function, q, k, *weights)

    return make


#: Each makes a call without arguments, on the GPU, that returns tensors.
CALLS: dict[str, Callable[[], Callable[[], list[Tensor]]]] = {
    "layer_norm": add_and_norm,
    "rms_norm": lambda: with_gradients(
        lambda x, w: ak.rms_norm(x, (COLUMNS,), w), leaf(ROWS, COLUMNS, dtype=F16), leaf(COLUMNS)
    ),
    "rotary": rotary(False),
    "rotary with norms": rotary(True),
    "cross_entropy": loss(),
    "cross_entropy, sum, weights": loss(reduction="sum", weighted=True),
    "cross_entropy, none, smoothing, z-loss": loss(reduction="none", label_smoothing=0.1, z_loss=1e-3),
    "linear_cross_entropy": head(chunk_size=4),
    "linear_log_probs": head(ak.linear_log_probs, chunk_size=4, temperature=0.7),
    "linear_cross_entropy, fp32 logits": head(chunk_size=4, logits_dtype=F32),
    "linear_cross_entropy, none, fp32": head(dtype=F32, reduction="none", chunk_size=4),
    "gelu": lambda: with_gradients(ak.gelu, leaf(ROWS, COLUMNS, dtype=BF16)),
    "silu": lambda: with_gradients(ak.silu, leaf(ROWS, COLUMNS, dtype=F16)),
    "swiglu": lambda: with_gradients(ak.swiglu, leaf(ROWS, COLUMNS)),
    "embedding": embedding(),
    "embedding, padding, by frequency": embedding(padding_idx=2, scale_grad_by_freq=True),
    "cast_": cast,
}
