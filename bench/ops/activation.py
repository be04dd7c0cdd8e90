"""gelu, silu and swiglu, forward and backward, against torch's operations, eager and compiled, and Liger; and the raw
activation_backward, grad * activation'(preact), against torch's own backward kernels."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

import amp_kernels as ak
from amp_kernels._raw.activation_backward import op as backward_op

from ..harness.case import DTYPES, Case, Scope, Tensors
from . import peers
from .providers import compared, compiled, differentiable


def torch_swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


#: Ours, torch's, and elements moved for one of the input in forward and backward, and of them those written.
FUNCTIONS = {
    "gelu": (ak.gelu, F.gelu, 2 + 3, 1 + 1),
    "silu": (ak.silu, F.silu, 2 + 3, 1 + 1),
    "swiglu": (ak.swiglu, torch_swiglu, 1.5 + 2.5, 0.5 + 1),
}
ERROR = {"bf16": 2.0**-7, "fp32": 2.0**-18}

aten = torch.ops.aten
BACKWARD = {
    "gelu": aten.gelu_backward,
    "gelu_tanh": lambda grad, z: aten.gelu_backward(grad, z, approximate="tanh"),
    "silu": aten.silu_backward,
    "relu": lambda grad, z: aten.threshold_backward(grad, z, 0),
}


def activation(scope: Scope) -> Iterator[Case]:
    rows, columns = scope.pick((32768, 6144), (1024, 6144), (64, 384))
    for name in ("swiglu",) if scope.quick else FUNCTIONS:
        for dtype in scope.dtypes("bf16", "fp32"):
            yield _activation(name, rows, columns, dtype, scope.device)


def _activation(name: str, rows: int, columns: int, dtype: str, device: torch.device) -> Case:
    own, theirs, moved, written = FUNCTIONS[name]
    functions = {"torch": theirs}
    if device.type == "cuda" and name == "swiglu":
        functions = compiled(functions | peers.functions("swiglu", device), dtype == "bf16")

    def inputs(generator: torch.Generator) -> Tensors:
        options = {"generator": generator, "device": device, "dtype": DTYPES[dtype]}
        width = columns // 2 if name == "swiglu" else columns
        return [torch.randn(rows, columns, **options), torch.randn(rows, width, **options)]

    return differentiable(
        "activation_forward",
        device,
        own,
        functions,
        bound=ERROR[dtype],
        op="activation",
        shape=f"{rows}x{columns} {name} forward + backward",
        dtype=dtype,
        bytes=int(moved * rows * columns * DTYPES[dtype].itemsize),
        written=int(written * rows * columns * DTYPES[dtype].itemsize),
        flops=50 * rows * columns,
        inputs=inputs,
    )


def activation_backward(scope: Scope) -> Iterator[Case]:
    rows, columns = scope.pick((32768, 3072), (1024, 3072), (64, 384))
    for name in ("gelu",) if scope.quick else BACKWARD:
        for dtype in scope.dtypes("bf16", "fp16"):
            yield _backward(name, rows, columns, dtype, scope.device)
    for name in ("gelu", "silu"):
        yield _backward(name, rows, columns, "bf16", scope.device, sums=True)


def _backward(name: str, rows: int, columns: int, dtype: str, device: torch.device, sums: bool = False) -> Case:
    """``sums``: with the gradient of a bias."""

    def results(dz: torch.Tensor, summed: torch.Tensor | None) -> dict:
        return {"grad": dz} | ({"sums": summed} if sums else {})

    def torchs(x: Tensors) -> dict:
        dz = BACKWARD[name](*x)
        return results(dz, dz.sum(0, dtype=torch.float32) if sums else None)

    def inputs(generator: torch.Generator) -> Tensors:
        shape = {"size": (rows, columns), "generator": generator, "device": device, "dtype": DTYPES[dtype]}
        return [torch.randn(**shape), torch.randn(**shape)]

    def reference(x: Tensors) -> dict:
        dz = BACKWARD[name](x[0].double(), x[1].double())
        error = {"bf16": 2.0**-8, "fp16": 2.0**-11}[dtype]
        return results((dz, error), (dz.sum(0), error))

    return compared(
        "activation_backward",
        device,
        lambda x: lambda: results(*backward_op(*x, activation=name, bias_grad=sums)),
        {"torch": lambda x: lambda: torchs(x)},
        shape=f"{rows}x{columns} {name}{' with sums' if sums else ''}",
        dtype=dtype,
        bytes=6 * rows * columns,
        written=2 * rows * columns,
        flops=20 * rows * columns,
        inputs=inputs,
        reference=reference,
    )


CASES = (activation, activation_backward)
