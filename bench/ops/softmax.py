"""softmax: attention scores and a vocabulary's, forward and backward, against torch eager and compiled under autocast, Liger and QuACK."""

from collections.abc import Iterator

import torch

import amp_kernels as ak

from ..harness.case import DTYPES, Case, Scope, Tensors
from . import peers
from .providers import compiled, differentiable

CUDA = [(98304, 1024), (8192, 50257)]  # rows, columns
CPU = [(4096, 1024), (128, 50257)]
QUICK_CPU = [(32, 257)]


def softmax(scope: Scope) -> Iterator[Case]:
    for shape in scope.pick(CUDA, CPU, QUICK_CPU):
        for dtype in ("bf16",) if scope.quick else ("bf16", "fp32"):
            yield _case(*shape, dtype, scope.device)


def _case(rows: int, columns: int, dtype: str, device: torch.device) -> Case:
    def inputs(generator: torch.Generator) -> Tensors:
        x, grad = (torch.randn(rows, columns, generator=generator, device=device) for _ in range(2))
        return [x.to(DTYPES[dtype]), grad.bfloat16()]

    functions = {"torch": lambda x: torch.softmax(x, -1)}
    if device.type == "cuda":
        functions = compiled(
            functions | peers.functions("softmax", device), dtype == "bf16" and (rows, columns) == CUDA[0]
        )
    return differentiable(
        "softmax_rows",
        device,
        lambda x: ak.softmax(x, -1),
        functions,
        bound=2.0**-6,  # of a result in autocast's bf16
        autocast=True,
        op="softmax",
        shape=f"{rows}x{columns} forward + backward",
        dtype=dtype,
        bytes=rows * columns * (2 * DTYPES[dtype].itemsize + 6),
        flops=8 * rows * columns,
        inputs=inputs,
    )


CASES = (softmax,)
