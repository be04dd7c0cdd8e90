"""rotary: rotary embedding of queries and keys, also after their norms, forward and backward, against the operations of transformers'
model files, eager and compiled. Shapes of Llama 3 8B and Qwen3 8B."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

import amp_kernels as ak

from ..harness.case import DTYPES, Call, Case, Scope, Tensors
from .providers import compared, compiled

HEADS, EPS = (32, 8), 1e-6


def rotary(scope: Scope) -> Iterator[Case]:
    tokens, width = scope.pick((8192, 128), (512, 128), (16, 64))
    for normed in (False, True):
        for dtype in scope.dtypes("bf16", "fp32"):
            yield _case(tokens, width, normed, dtype, scope.device)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def _by_torch(q, k, cos, sin, *weights) -> tuple[torch.Tensor, torch.Tensor]:
    if weights:
        q, k = (F.rms_norm(x, weight.shape, weight, EPS) for x, weight in zip((q, k), weights, strict=True))
    return _turned(q, cos, sin), _turned(k, cos, sin)


def _by_us(q, k, cos, sin, *weights) -> tuple[torch.Tensor, torch.Tensor]:
    return ak.rotary(q, k, cos, sin, **dict(zip(("q_weight", "k_weight"), weights, strict=False)), eps=EPS)


def _call(function: Callable, tensors: Tensors) -> Call:
    """Results and gradients of queries, keys and weights. The last two tensors are the results' gradients."""
    *given, of_q, of_k = tensors
    leaves = [t.detach().requires_grad_() for t in (*given[:2], *given[4:])]

    def call() -> dict:
        results = function(*leaves[:2], *given[2:4], *leaves[2:])
        grads = torch.autograd.grad(results, leaves, (of_q, of_k))
        found = {"q": results[0].detach(), "k": results[1].detach()}
        return found | {f"grad {i}": grad for i, grad in enumerate(grads)}

    return call


def _case(tokens: int, width: int, normed: bool, dtype: str, device: torch.device) -> Case:
    elements, size = sum(HEADS) * tokens * width, DTYPES[dtype].itemsize

    def inputs(generator: torch.Generator) -> Tensors:
        options = {"generator": generator, "device": generator.device, "dtype": DTYPES[dtype]}

        def heads() -> Tensors:  # as projections leave them
            return [torch.randn(1, tokens, count, width, **options).transpose(1, 2) for count in HEADS]

        angles = torch.rand(1, tokens, width, **options).float() * 6
        weights = [torch.rand(width, **options) + 0.5 for _ in HEADS] if normed else []
        return [*heads(), angles.cos().to(DTYPES[dtype]), angles.sin().to(DTYPES[dtype]), *weights, *heads()]

    def reference(tensors: Tensors) -> dict:
        found = _call(_by_torch, [t.double() for t in tensors])()
        return {name: (value, 3 * 2.0**-8 if size == 2 else 1e-5) for name, value in found.items()}

    functions = compiled({"torch": _by_torch}, device.type == "cuda")
    return compared(
        "rotary_forward",
        device,
        lambda tensors: _call(_by_us, tensors),
        {name: lambda tensors, f=function: _call(f, tensors) for name, function in functions.items()},
        op="rotary",
        shape=f"{tokens}x{HEADS[0]}+{HEADS[1]}x{width}{' with norms' * normed} forward + backward",
        dtype=dtype,
        bytes=size * (elements * (5 if normed else 4) + 4 * tokens * width),
        written=2 * size * elements,
        flops=elements * (30 if normed else 6),
        inputs=inputs,
        reference=reference,
    )


CASES = (rotary,)
