"""embedding: lookup and gradient of a language model's table, whose indices follow Zipf's law, against torch's own,
eager and compiled, and Liger's."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

import amp_kernels as ak

from .. import ours, peers
from ..harness import Case, Scope
from ..roofline import DTYPES

CUDA = [(16384, 50257, 768), (16384, 128256, 4096)]  # tokens, rows, columns
CPU = [(4096, 50257, 768)]
QUICK_CPU = [(64, 501, 32)]


def cases(scope: Scope) -> Iterator[Case]:
    for shape in CUDA if scope.device.type == "cuda" else QUICK_CPU if scope.quick else CPU:
        for dtype in ("bf16",) if scope.quick else ("bf16", "fp32"):
            yield _case(*shape, dtype, scope.device)


def _case(tokens: int, rows: int, columns: int, dtype: str, device: torch.device) -> Case:
    def inputs(generator: torch.Generator) -> list[torch.Tensor]:
        weight = torch.randn(rows, columns, generator=generator, device=device).to(DTYPES[dtype])
        uniform = torch.rand(tokens, generator=generator, device=device)
        indices = (rows**uniform - 1).long().clamp_max(rows - 1)
        return [weight, indices, torch.randn(tokens, columns, generator=generator, device=device).to(DTYPES[dtype])]

    def both(function, weight, indices, grad):
        table = weight.detach().requires_grad_()

        def call():
            out = function(indices, table)
            return {"grad": torch.autograd.grad(out, table, grad)[0]}

        return call

    size = DTYPES[dtype].itemsize
    found = {"torch": F.embedding}
    if device.type == "cuda":
        found |= peers.embedding()
        if dtype == "bf16" and (tokens, rows, columns) == CUDA[0]:  # compiling takes seconds
            found["torch.compile"] = torch.compile(F.embedding)
    return Case(
        op="embedding",
        shape=f"{tokens} of {rows}x{columns} forward + backward",
        dtype=dtype,
        bytes=size * columns * (3 * tokens + rows),
        flops=tokens * columns,
        inputs=inputs,
        providers={
            **{name: lambda x, function=function: both(function, *x) for name, function in found.items()},
            **ours.providers("embedding_accumulate_", device, lambda x: both(ak.embedding, *x)),
        },
        # torch's sums in bf16 lose what the smallest gradients add.
        reference=lambda x: {
            "grad": (both(F.embedding, x[0].double(), x[1], x[2].double())()["grad"], 0.5 if dtype == "bf16" else 1e-4)
        },
        backends=ours.backends("embedding_accumulate_", device),
    )
