"""dropout_add: dropout on a branch and the addition to the residual stream, forward and backward, against torch's
operations, eager and compiled."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

import amp_kernels as ak

from ..harness.case import DTYPES, Case, Scope, Tensors
from .providers import compared, compiled


def dropout_add(scope: Scope) -> Iterator[Case]:
    rows, columns = scope.pick((32768, 4096), (1024, 4096), (64, 384))
    for dtype in ("bf16",) if scope.quick else ("bf16", "fp32"):
        yield _case(rows, columns, dtype, scope.device)


def _case(rows: int, columns: int, dtype: str, device: torch.device) -> Case:
    def inputs(generator: torch.Generator) -> Tensors:
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

    def prepared(function):
        return lambda x: both(function, *x)

    functions = {"torch": lambda branch, stream: F.dropout(branch, 0.5) + stream}
    functions = compiled(functions, device.type == "cuda" and dtype == "bf16")
    return compared(
        "dropout",
        device,
        prepared(lambda branch, stream: ak.dropout_add(branch, stream, 0.5)),
        {name: prepared(function) for name, function in functions.items()},
        op="dropout_add",
        shape=f"{rows}x{columns} forward + backward",
        dtype=dtype,
        bytes=5 * rows * columns * DTYPES[dtype].itemsize,
        written=2 * rows * columns * DTYPES[dtype].itemsize,
        flops=60 * rows * columns,
        inputs=inputs,
        reference=lambda x: {"kept": (torch.tensor(2.0), 0.05), "same mask": (torch.tensor(0.0), 1e-6)},
    )


CASES = (dropout_add,)
