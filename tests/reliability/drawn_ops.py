"""Public ops, torch's forms of them, and what fuzz_ops.py draws for them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import amp_kernels as ak
from amp_kernels._checks import activations
from amp_kernels._checks.activations import GATED, halves
from amp_kernels._checks.operands import readable_bias

from ..helpers.bounds import norm_forward_bound, reference_and_bound
from .fuzz import Draw

SIZES = [0, 1, 1, 2, 3, 5, 7, 8, 9, 16, 17, 31, 33, 64, 65]
LONG = [127, 255, 1031, 4100, 20_001]


class Inputs(Draw):
    """Draws of one case, whose tensors have the dtype :attr:`dtype` as a rule."""

    dtype: torch.dtype

    def size(self, long: bool = False) -> int:
        return self.choice(LONG) if long and self.flag(0.2) else self.choice(SIZES)

    def some(self, sizes: int, most: int = 3) -> list[int]:
        return [
            self.choice([0, 1, 2, 3, 5]) if self.flag(0.2) else self.randrange(1, 6)
            for _ in range(self.randrange(sizes, most + 1))
        ]

    def t(self, *shape: int) -> torch.Tensor:
        return self.placed(self.normal(*shape, dtype=self.dtype, scale=self.choice([0.25, 1, 1, 4])))

    def maybe(self, *shape: int) -> torch.Tensor | None:
        return self.t(*shape) if self.flag() else None

    def classes(self, count: int, *shape: int) -> torch.Tensor:
        return torch.randint(max(1, count), shape, generator=self.generator)


@dataclass(frozen=True)
class Op:
    """``ours`` and torch's form of it, of tensors by name and options; ``draw`` makes both. ``bound``, if there is one: the result in
    float64 and its bound, of the tensors as a kernel reads them."""

    ours: Callable
    theirs: Callable
    draw: Callable[[Inputs], tuple[dict, dict]]
    bound: Callable | None = None


def limited(activation: Callable) -> Callable:
    """In float64 with the limits at infinity, where torch has NaN: 0 with the gradient 0, infinity with the gradient 1."""

    def call(input: torch.Tensor) -> torch.Tensor:
        if input.dtype != torch.float64:
            return activation(input)
        return torch.where(input == math.inf, input, activation(torch.where(input.isinf(), 0.0, input)))

    return call


def limited_swiglu(input: torch.Tensor) -> torch.Tensor:
    gate, up = halves(input)
    return limited(F.silu)(gate) * up


ACTIVATIONS = {
    n: limited_swiglu if n in GATED else limited(f) if n.startswith(("gelu", "silu")) else f
    for n, f in activations.ACTIVATIONS.items()
}


def linear(d: Inputs) -> tuple[dict, dict]:
    k, n = d.size(long=True), 2 * d.size()
    return {"x": d.t(*d.some(0), k), "weight": d.t(n, k), "bias": d.maybe(n)}, {"activation": d.choice([*ACTIVATIONS])}


def mlp(d: Inputs) -> tuple[dict, dict]:
    k, h, n, activation = d.size(), 2 * d.size(), d.size(), d.choice([*ACTIVATIONS])
    inner = h // 2 if activation == "swiglu" else h
    tensors = {"x": d.t(*d.some(1), k), "weight1": d.t(h, k), "bias1": d.maybe(h), "weight2": d.t(n, inner)}
    return {**tensors, "bias2": d.maybe(n)}, {"activation": activation}


def matmul(d: Inputs) -> tuple[dict, dict]:
    m, k, n, batch = d.size(), d.size(long=True), d.size(), d.some(0, 2)
    a = d.choice([[k], [m, k], [*batch, m, k], [*[1] * len(batch), m, k]])
    return {"a": d.t(*a), "b": d.t(*d.choice([[k], [k, n], [*batch, k, n]]))}, {}


def factors(d: Inputs) -> dict:
    return {"beta": d.choice([1.0, 0.0, -0.5]), "alpha": d.choice([1.0, 0.0, 2.0])}


def addmm(d: Inputs) -> tuple[dict, dict]:
    m, k, n = d.size(), d.size(), d.size()
    c = d.choice([[m, n], [n], [1, n], [m, 1], []])
    return {"input": d.t(*c), "mat1": d.t(m, k), "mat2": d.t(k, n)}, factors(d)


def baddbmm(d: Inputs) -> tuple[dict, dict]:
    g, m, k, n = d.randrange(4), d.size(), d.size(), d.size()
    c = d.choice([[g, m, n], [m, n], [n], [1, m, 1], []])
    return {"input": d.t(*c), "batch1": d.t(g, m, k), "batch2": d.t(g, k, n)}, factors(d)


def grouped_mm(d: Inputs) -> tuple[dict, dict]:
    g, m, k, n = d.randrange(1, 5), d.size(), d.size(), d.size()
    ends = sorted(d.choices(range(m + 1), k=g))
    a, b = d.choice([([m, k], [g, k, n]), ([k, m], [m, n]), ([g, k, n], [n, m]), ([g, m, k], [g, k, n])])
    offs = None if len(a) == len(b) == 3 else torch.tensor(ends, dtype=torch.int32)
    return {"a": d.t(*a), "b": d.t(*b)}, {"offs": offs}


def torch_grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None) -> torch.Tensor:
    if offs is None:
        return a @ b
    begins = [0, *offs.tolist()]
    spans = [slice(*span) for span in itertools.pairwise(begins)]
    if a.ndim == b.ndim == 2:
        return torch.stack([a[:, s] @ b[s] for s in spans])
    if a.ndim == 2:
        pieces = [a[s] @ b[i] for i, s in enumerate(spans)]
        return torch.cat([*pieces, pieces[0].new_zeros(len(a) - begins[-1], b.shape[-1])])
    pieces = [a[i] @ b[:, s] for i, s in enumerate(spans)]
    return torch.cat([*pieces, pieces[0].new_zeros(a.shape[1], b.shape[1] - begins[-1])], dim=1)


def norm(centred: bool) -> Callable:
    def draw(d: Inputs) -> tuple[dict, dict]:
        inner = [max(1, d.size(long=True))] if d.flag(0.7) else [d.randrange(1, 6), d.randrange(1, 6)]
        x = d.some(0) + inner
        tensors = {"x": d.t(*x), "weight": d.maybe(*inner), **({"bias": d.maybe(*inner)} if centred else {})}
        return {**tensors, "residual": d.maybe(*x)}, {"normalized_shape": inner, "eps": d.choice([1e-5, 0.1])}

    return draw


def torch_norm(stock: Callable) -> Callable:
    def call(x, normalized_shape, weight=None, bias=None, residual=None, eps=1e-5):
        total = x if residual is None else x + residual
        y = stock(total, normalized_shape, weight, *([bias] if stock is F.layer_norm else []), eps=eps)
        return y if residual is None else (y, total)

    return call


def norm_bound(out_dtype, x, normalized_shape, weight=None, bias=None, residual=None, eps=1e-5, *, centred):
    if residual is not None or not x.numel():
        return None
    parameters = [t if t is None else t.flatten() for t in (weight, bias)]
    rows = x.reshape(-1, math.prod(normalized_shape))
    y, bound = norm_forward_bound(rows, *parameters, eps=eps, centred=centred, out_dtype=out_dtype)
    return y.view(x.shape), bound.view(x.shape)


def loss_options(d: Inputs) -> dict:
    return {"reduction": d.choice(["mean", "sum", "none"]), "label_smoothing": d.choice([0.0, 0.0, 0.1])}


def cross_entropy(d: Inputs) -> tuple[dict, dict]:
    c, shape = max(1, d.size(long=True)), d.some(0, 3)
    target = d.classes(c, *shape)
    target[target == 0] = d.choice([0, -100])
    weight = d.normal(c).abs() if d.flag(0.3) else None
    logits = d.t(*shape[:1], c, *shape[1:])
    return {"logits": logits}, {"target": target, "weight": weight, **loss_options(d)}


def torch_cross_entropy(logits, target, weight=None, **options):
    if logits.dtype == torch.float64:  # rows that are ignored have the gradient 0, whatever is in them
        logits = torch.where((target == -100).unsqueeze(min(1, logits.ndim - 1)), 0.0, logits)
    return F.cross_entropy(logits, target, weight if weight is None else weight.to(logits.dtype), **options)


def linear_cross_entropy(d: Inputs) -> tuple[dict, dict]:
    c, k, rows = max(1, d.size()), d.size(), d.some(1, 2)
    tensors = {"input": d.t(*rows, k), "linear_weight": d.t(c, k), "linear_bias": d.maybe(c)}
    return tensors, {"target": d.classes(c, *rows), **loss_options(d)}


def torch_linear_cross_entropy(input, linear_weight, target, linear_bias=None, **options):
    z = F.linear(input, linear_weight, linear_bias).flatten(0, -2)
    z = z if z.dtype == torch.float64 else z.float()
    loss = F.cross_entropy(z, target.flatten(), **options)
    return loss.view(target.shape) if options["reduction"] == "none" else loss


def embedding(d: Inputs) -> tuple[dict, dict]:
    rows = d.randrange(1, 9)
    options = {"padding_idx": d.choice([None, 0, rows - 1, -1]), "scale_grad_by_freq": d.flag()}
    return {"weight": d.t(rows, d.size(long=True))}, {"input": d.classes(rows, *d.some(0)), **options}


def rotary(d: Inputs) -> tuple[dict, dict]:
    batch, tokens, width = d.randrange(1, 3), d.size(), 2 * max(1, d.size())
    q, k = (d.t(batch, d.randrange(1, 4), tokens, width) for _ in range(2))
    turning = width if d.flag() else 2 * d.randrange(1, width // 2 + 1)
    return {"q": q, "k": k, "cos": d.t(tokens, turning), "sin": d.t(tokens, turning)}, {}


def torch_rotary(q, k, cos, sin):
    def turned(x):
        turning, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        first, second = turning.chunk(2, -1)
        return torch.cat([turning * cos + torch.cat([-second, first], -1) * sin, rest], -1)

    return turned(q), turned(k)


def elementwise(d: Inputs) -> tuple[dict, dict]:
    return {"input": d.t(*d.some(0), 2 * d.size(long=True))}, {}


def product_bound(out_dtype, a, b, bias=None, **options):
    if a.ndim < 2 or b.ndim < 2 or (options.get("activation") == "swiglu" and b.shape[-1] % 2):
        return None
    bias = readable_bias(bias, out_dtype)
    return reference_and_bound(a.to(out_dtype), b.to(out_dtype), bias, out_dtype=out_dtype, **options)


def layer_bound(out_dtype, x, weight, bias=None, activation=None):
    return product_bound(out_dtype, x, weight.mT, bias, activation=activation)


def added_bound(out_dtype, input, one, other, beta, alpha):
    return product_bound(out_dtype, one, other, alpha=alpha, beta=beta, c=input)


def torch_linear(x, weight, activation, bias=None):
    return ACTIVATIONS[activation](F.linear(x, weight, bias))


def torch_mlp(x, weight1, weight2, activation, bias1=None, bias2=None):
    return F.linear(torch_linear(x, weight1, activation, bias1), weight2, bias2)


OPS = {
    "linear": Op(ak.linear, torch_linear, linear, layer_bound),
    "mlp": Op(lambda bias1=None, **given: ak.mlp(bias1=bias1, **given), torch_mlp, mlp),
    "matmul": Op(ak.matmul, lambda a, b: torch.matmul(a, b), matmul, product_bound),
    "addmm": Op(ak.addmm, torch.addmm, addmm, lambda out, input, mat1, mat2, **o: added_bound(out, input, mat1, mat2, **o)),
    "baddbmm": Op(ak.baddbmm, torch.baddbmm, baddbmm, lambda out, input, batch1, batch2, **o: added_bound(out, input, batch1, batch2, **o)),
    "grouped_mm": Op(ak.grouped_mm, torch_grouped_mm, grouped_mm),
    "layer_norm": Op(ak.layer_norm, torch_norm(F.layer_norm), norm(True), functools.partial(norm_bound, centred=True)),
    "rms_norm": Op(ak.rms_norm, torch_norm(F.rms_norm), norm(False), functools.partial(norm_bound, centred=False)),
    "cross_entropy": Op(ak.cross_entropy, torch_cross_entropy, cross_entropy),
    "linear_cross_entropy": Op(ak.linear_cross_entropy, torch_linear_cross_entropy, linear_cross_entropy),
    "embedding": Op(ak.embedding, F.embedding, embedding),
    "rotary": Op(ak.rotary, torch_rotary, rotary),
    "gelu": Op(ak.gelu, ACTIVATIONS["gelu"], elementwise),
    "silu": Op(ak.silu, ACTIVATIONS["silu"], elementwise),
    "swiglu": Op(ak.swiglu, ACTIVATIONS["swiglu"], elementwise),
}  # fmt: skip
