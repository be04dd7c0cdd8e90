"""grouped_mm: the experts' products of a mixture, forward and backward, against torch's grouped product and a loop that knows the sizes.

Shapes are a layer's first product in Mixtral, OLMoE and Qwen3, for the tokens of one GPU times the experts of each. Groups are either
multiples of 128 rows, equal, or of random size. Bytes are those of the operands and results of the three products.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

import amp_kernels as ak

from ..harness.case import DTYPES, Case, Scope, Tensors
from .providers import differentiable

CUDA = [
    (16384, 4096, 28672, 8),
    (32768, 2048, 2048, 64),
    (65536, 2048, 1536, 128),
    (8192, 2048, 1536, 128),
]  # rows, k, n, groups


def grouped_mm(scope: Scope) -> Iterator[Case]:
    for shape in scope.pick(CUDA, [(2048, 512, 1024, 8), (1024, 256, 512, 64)], [(96, 32, 48, 4)]):
        for sizes in ("equal", "random"):
            yield _case(*shape, sizes, "bf16", scope.device)


def ends(rows: int, groups: int, sizes: str, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    if sizes == "equal":
        return torch.arange(1, groups + 1, dtype=torch.int32, device=device) * (rows // groups)
    cuts = torch.randint(rows + 1, (groups,), generator=generator, device=device).sort().values
    cuts[-1] = rows
    return cuts.int()


def _loop(x: torch.Tensor, weight: torch.Tensor, ends: list[int]) -> torch.Tensor:
    return torch.cat([x[begin:end] @ w.t() for w, begin, end in zip(weight, [0, *ends], ends, strict=False)])


def _case(rows: int, k: int, n: int, groups: int, sizes: str, dtype: str, device: torch.device) -> Case:
    def inputs(generator: torch.Generator) -> Tensors:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device).to(DTYPES[dtype])

        offs = ends(rows, groups, sizes, generator, device)
        return [normal(rows, k), normal(groups, n, k), offs, normal(rows, n)]

    return differentiable(
        "grouped_gemm",
        device,
        lambda x, weight, offs: ak.grouped_mm(x, weight.mT, offs=offs),
        {
            "torch": lambda x, weight, offs: F.grouped_mm(x, weight.mT, offs=offs),
            "torch:loop": lambda x, weight, offs: _loop(x, weight, offs.tolist()),
        },
        leaves=2,
        reference=lambda x, weight, offs: _loop(x, weight, offs.tolist()),
        bound=1.5 * 2.0 ** {"bf16": -8, "fp16": -11}[dtype] + 2.0**-24 * max(k, n, rows),
        op="grouped_mm",
        shape=f"{groups} groups, {sizes}, {rows}x{n}x{k}",
        dtype=dtype,
        bytes=2 * 3 * (rows * (k + n) + groups * n * k),
        flops=3 * 2 * rows * n * k,
        inputs=inputs,
        families=(f"{sizes} groups",),
    )


CASES = (grouped_mm,)
