"""softmax: attention scores and a vocabulary's, forward and backward, against torch eager and compiled under autocast, Liger and QuACK."""

from collections.abc import Iterator

import torch

import amp_kernels as ak

from .. import ours, peers
from ..harness import Case, Scope
from ..roofline import DTYPES

CUDA = [(98304, 1024), (8192, 50257)]  # rows, columns
CPU = [(4096, 1024), (128, 50257)]
QUICK_CPU = [(32, 257)]
ERROR = {"bf16": 2.0**-6, "fp32": 2.0**-6}  # of a result in autocast's bf16


def cases(scope: Scope) -> Iterator[Case]:
    for shape in CUDA if scope.device.type == "cuda" else QUICK_CPU if scope.quick else CPU:
        for dtype in ("bf16",) if scope.quick else ("bf16", "fp32"):
            yield _case(*shape, dtype, scope.device)


def _case(rows: int, columns: int, dtype: str, device: torch.device) -> Case:
    def inputs(generator: torch.Generator) -> list[torch.Tensor]:
        draw = [torch.randn(rows, columns, generator=generator, device=device) for _ in range(2)]
        return [draw[0].to(DTYPES[dtype]), draw[1].bfloat16()]

    def both(function, x, grad):
        x = x.detach().requires_grad_()

        def call():
            with torch.autocast(device.type, dtype=torch.bfloat16):
                y = function(x, -1)
            return {"y": y.detach(), "grad": torch.autograd.grad(y, x, grad.to(y.dtype))[0]}

        return call

    found = {"torch": torch.softmax}
    if device.type == "cuda":
        found |= peers.softmax()
        if dtype == "bf16" and (rows, columns) == CUDA[0]:  # compiling takes seconds
            found["torch.compile"] = torch.compile(torch.softmax)
    return Case(
        op="softmax",
        shape=f"{rows}x{columns} forward + backward",
        dtype=dtype,
        bytes=rows * columns * (2 * DTYPES[dtype].itemsize + 6),
        flops=8 * rows * columns,
        inputs=inputs,
        providers={
            **{name: lambda x, function=function: both(function, *x) for name, function in found.items()},
            **ours.providers("softmax_rows", device, lambda x: both(ak.softmax, *x)),
        },
        reference=lambda x: {
            name: (value, ERROR[dtype]) for name, value in both(torch.softmax, x[0].double(), x[1].double())().items()
        },
        backends=ours.backends("softmax_rows", device),
    )
