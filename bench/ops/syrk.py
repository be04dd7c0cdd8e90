"""syrk: the symmetric products of Newton-Schulz iterations, against torch's full product and the package's own.

A batch is all matrices of one shape in a model. Half of a full product's flops count, and the diagonal; bytes are those of
the operand and of the whole result.
"""

from collections.abc import Iterator

import torch

import amp_kernels as ak

from ..harness.case import DTYPES, Case, Scope, Tensors
from .providers import differentiable

CUDA = [
    *((batch, n, n) for batch in (1, 12) for n in (512, 768, 1024, 2048, 3072, 4096)),
    (48, 768, 768),
    (24, 768, 3072),
    (12, 2048, 8192),
]  # batch, n, k


def syrk(scope: Scope) -> Iterator[Case]:
    for shape in scope.pick(CUDA, [(4, 768, 768), (2, 768, 3072), (1, 2048, 2048)], [(2, 72, 40)]):
        for dtype in scope.dtypes("bf16", "fp16"):
            yield _case(*shape, dtype, scope.device)


def _case(batch: int, n: int, k: int, dtype: str, device: torch.device) -> Case:
    def inputs(generator: torch.Generator) -> Tensors:
        a = torch.randn(batch, n, k, generator=generator, device=device).to(DTYPES[dtype])
        return [a, None]

    return differentiable(
        "syrk",
        device,
        ak.syrk,
        {"torch": lambda a: torch.bmm(a, a.mT), "amp_kernels:full": lambda a: ak.matmul(a, a.mT)},
        leaves=0,
        backward=False,
        bound=1.5 * 2.0 ** {"bf16": -8, "fp16": -11}[dtype] + 2.0**-24 * k,
        op="syrk",
        shape=f"{batch} of {n}x{k}",
        dtype=dtype,
        bytes=2 * batch * n * (k + n),
        flops=batch * n * (n + 1) * k,
        inputs=inputs,
    )


CASES = (syrk,)
