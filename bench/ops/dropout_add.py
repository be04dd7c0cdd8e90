"""dropout_add: dropout on a branch and the addition to the residual stream, forward and backward, against torch's
operations, eager and compiled."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

import amp_kernels as ak

from .. import ours
from ..harness import Case, Scope
from ..roofline import DTYPES


def cases(scope: Scope) -> Iterator[Case]:
    rows, columns = (32768, 4096) if scope.device.type == "cuda" else (64, 384) if scope.quick else (1024, 4096)
    for dtype in ("bf16",) if scope.quick else ("bf16", "fp32"):
        yield _case(rows, columns, dtype, scope.device)


def _case(rows: int, columns: int, dtype: str, device: torch.device) -> Case:
    def inputs(generator: torch.Generator) -> list[torch.Tensor]:
        options = {"generator": generator, "device": device, "dtype": DTYPES[dtype]}
        return [torch.ones_like(torch.randn(rows, columns, **options)) for _ in range(3)]

    def both(function, x, residual, grad):
        x = x.detach().requires_grad_()

        def call():
            y = function(x, residual)
            # Each draws its own mask: what is compared is how much of all is kept, and that the gradient has the same mask.
            of_x = torch.autograd.grad(y, x, grad)[0]
            return {"kept": y.detach().float().mean(), "same mask": (of_x + 1 - y.detach()).abs().max().float()}

        return call

    found = {"torch": lambda branch, stream: F.dropout(branch, 0.5) + stream}
    if device.type == "cuda" and dtype == "bf16":  # compiling takes seconds
        found["torch.compile"] = torch.compile(found["torch"])
    return Case(
        op="dropout_add",
        shape=f"{rows}x{columns} forward + backward",
        dtype=dtype,
        bytes=5 * rows * columns * DTYPES[dtype].itemsize,
        flops=60 * rows * columns,
        inputs=inputs,
        providers={
            **{name: lambda x, function=function: both(function, *x) for name, function in found.items()},
            **ours.providers("dropout", device, lambda x: both(lambda b, s: ak.dropout_add(b, s, 0.5), *x)),
        },
        reference=lambda x: {"kept": (torch.tensor(2.0), 0.05), "same mask": (torch.tensor(0.0), 1e-6)},
        backends=ours.backends("dropout", device),
    )
