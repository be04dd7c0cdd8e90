"""embedding: lookup and gradient of a language model's table, whose indices follow Zipf's law, against torch's own,
eager and compiled, and Liger's."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

import amp_kernels as ak

from ..harness.case import DTYPES, Case, Scope, Tensors
from . import peers
from .providers import compiled, differentiable

CUDA = [(16384, 50257, 768), (16384, 128256, 4096)]  # tokens, rows, columns


def embedding(scope: Scope) -> Iterator[Case]:
    for shape in scope.pick(CUDA, [(4096, 50257, 768)], [(64, 501, 32)]):
        for dtype in scope.dtypes("bf16", "fp32"):
            yield _case(*shape, dtype, scope.device)


def _case(tokens: int, rows: int, columns: int, dtype: str, device: torch.device) -> Case:
    def inputs(generator: torch.Generator) -> Tensors:
        weight = torch.randn(rows, columns, generator=generator, device=device).to(DTYPES[dtype])
        uniform = torch.rand(tokens, generator=generator, device=device)
        indices = (rows**uniform - 1).long().clamp_max(rows - 1)
        grad = torch.randn(tokens, columns, generator=generator, device=device).to(DTYPES[dtype])
        return [weight, indices, grad]

    functions = {"torch": lambda table, indices: F.embedding(indices, table)}
    if device.type == "cuda":
        functions = compiled(
            functions | peers.functions("embedding", device), dtype == "bf16" and (tokens, rows, columns) == CUDA[0]
        )
    size = DTYPES[dtype].itemsize
    return differentiable(
        "embedding_accumulate_",
        device,
        lambda table, indices: ak.embedding(indices, table),
        functions,
        bound=0.5 if dtype == "bf16" else 1e-4,  # torch's sums in bf16 lose what the smallest gradients add
        op="embedding",
        shape=f"{tokens} of {rows}x{columns} forward + backward",
        dtype=dtype,
        bytes=size * columns * (3 * tokens + rows),
        flops=tokens * columns,
        inputs=inputs,
    )


CASES = (embedding,)
