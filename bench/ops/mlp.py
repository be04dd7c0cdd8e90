"""mlp: two products with the activation, and in backward its derivative and the bias gradient, in their epilogues.

GPT-2's block (K = 768) and, gated, that of Llama-1B, forward and backward with 16-bit weights.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from amp_kernels.ops.mlp import mlp

from .. import ours
from ..harness import Case, Scope
from .linear import Tensors, in_double, timed_call

CUDA = [("gelu", 32768, 768, 3072), ("swiglu", 16384, 2048, 8192)]  # activation, rows, width, hidden width
CPU = [("gelu", 512, 256, 1024), ("swiglu", 512, 256, 1024)]
QUICK_CPU = [("gelu", 64, 48, 96), ("swiglu", 64, 48, 96)]


def cases(scope: Scope) -> Iterator[Case]:
    for case in CUDA if scope.device.type == "cuda" else QUICK_CPU if scope.quick else CPU:
        yield _case(*case, scope.device)


def _case(activation: str, rows: int, width: int, hidden: int, device: torch.device) -> Case:
    first = 2 * hidden if activation == "swiglu" else hidden

    def eager(x, weight1, bias1, weight2, bias2):
        z = F.linear(x, weight1, bias1)
        if activation == "gelu":
            return F.linear(F.gelu(z), weight2, bias2)
        gate, up = z.chunk(2, -1)
        return F.linear(F.silu(gate) * up, weight2, bias2)

    def prepare_torch(tensors: Tensors):
        return timed_call(lambda: eager(*tensors[:-1]), tensors, backward=True)

    def prepare_ours(tensors: Tensors):
        return timed_call(lambda: mlp(*tensors[:-1], activation=activation), tensors, backward=True)

    def inputs(generator: torch.Generator) -> Tensors:
        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16).mul_(scale)

        weights = [normal(first, width, scale=width**-0.5), normal(width, hidden, scale=hidden**-0.5)]
        tensors = [normal(rows, width), weights[0], normal(first), weights[1], normal(width), normal(rows, width)]
        for tensor in tensors[:-1]:
            tensor.requires_grad_()
        return tensors

    moved = rows * (2 * width + first + hidden) + width * (first + hidden)
    return Case(
        op="mlp",
        shape=f"{rows} x {width}-{hidden}-{width} {activation} forward + backward",
        dtype="bf16",
        bytes=6 * moved,
        flops=6 * rows * width * (first + hidden),
        inputs=inputs,
        providers={"torch": prepare_torch, **ours.providers("gemm", device, prepare_ours)},
        reference=lambda tensors: in_double(lambda double: prepare_torch(double)(), tensors, roundings=6),
        backends=ours.backends("gemm", device),
        families=("mlp, forward + backward",),
    )
