"""column_sums, the gradient of a bias, against torch's sum over rows: the gradients of GPT-2's layers, and one with odd rows."""

from collections.abc import Iterator

import torch

from amp_kernels._raw.column_sums import column_sums as raw_sums

from ..harness.case import DTYPES, Case, Scope, Tensors
from .providers import compared

CUDA = [(32768, 768), (32768, 2304), (32768, 3072), (8192, 4096), (32768, 1001)]  # rows, columns
CPU = [(4096, 768), (4096, 3072)]
QUICK_CPU = [(64, 96)]


def column_sums(scope: Scope) -> Iterator[Case]:
    for shape in scope.pick(CUDA, CPU, QUICK_CPU):
        for dtype in scope.dtypes("bf16", "fp32"):
            yield _case(*shape, dtype, scope.device)


def _case(rows: int, columns: int, dtype: str, device: torch.device) -> Case:
    def inputs(generator: torch.Generator) -> Tensors:
        return [torch.randn(rows, columns, generator=generator, device=device).to(DTYPES[dtype])]

    def torch_sums(x: Tensors):
        return lambda: {"sums": x[0].sum(0, dtype=torch.float32)}

    return compared(
        "column_sums",
        device,
        lambda x: lambda: {"sums": raw_sums(*x)},
        {"torch": torch_sums},
        shape=f"{rows}x{columns}",
        dtype=dtype,
        bytes=rows * columns * DTYPES[dtype].itemsize,
        flops=rows * columns,
        inputs=inputs,
        # Sums of numbers of size one, of any sign: an error of any order of additions, over the root of the rows.
        reference=lambda x: {"sums": (x[0].double().sum(0), 2.0**-16)},
    )


CASES = (column_sums,)
