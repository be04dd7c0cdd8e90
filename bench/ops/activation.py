"""gelu, silu and swiglu on their own, forward and backward, against torch's operations, eager and compiled, and Liger."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

import amp_kernels as ak

from .. import ours, peers
from ..harness import Case, Scope
from ..roofline import DTYPES


def _torch_swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


#: Ours, torch's, and elements moved for one of the input in forward and backward.
FUNCTIONS = {
    "gelu": (ak.gelu, F.gelu, 2 + 3),
    "silu": (ak.silu, F.silu, 2 + 3),
    "swiglu": (ak.swiglu, _torch_swiglu, 1.5 + 2.5),
}
ERROR = {"bf16": 2.0**-7, "fp32": 2.0**-18}


def cases(scope: Scope) -> Iterator[Case]:
    rows, columns = (32768, 6144) if scope.device.type == "cuda" else (64, 384) if scope.quick else (1024, 6144)
    for name in ("swiglu",) if scope.quick else FUNCTIONS:
        for dtype in ("bf16",) if scope.quick else ("bf16", "fp32"):
            yield _case(name, rows, columns, dtype, scope.device)


def _case(name: str, rows: int, columns: int, dtype: str, device: torch.device) -> Case:
    own, theirs, moved = FUNCTIONS[name]

    def inputs(generator: torch.Generator) -> list[torch.Tensor]:
        options = {"generator": generator, "device": device, "dtype": DTYPES[dtype]}
        width = columns // 2 if name == "swiglu" else columns
        return [torch.randn(rows, columns, **options), torch.randn(rows, width, **options)]

    def both(function, x, grad):
        x = x.detach().requires_grad_()

        def call():
            y = function(x)
            return {"y": y.detach(), "grad": torch.autograd.grad(y, x, grad)[0]}

        return call

    found = {"torch": theirs}
    if device.type == "cuda" and name == "swiglu":
        found |= peers.swiglu()
        if dtype == "bf16":  # compiling takes seconds
            found["torch.compile"] = torch.compile(theirs)
    return Case(
        op="activation",
        shape=f"{rows}x{columns} {name} forward + backward",
        dtype=dtype,
        bytes=int(moved * rows * columns * DTYPES[dtype].itemsize),
        flops=50 * rows * columns,
        inputs=inputs,
        providers={
            **{key: lambda x, function=function: both(function, *x) for key, function in found.items()},
            **ours.providers("activation_forward", device, lambda x: both(own, *x)),
        },
        reference=lambda x: {
            key: (value, ERROR[dtype]) for key, value in both(theirs, x[0].double(), x[1].double())().items()
        },
        backends=ours.backends("activation_forward", device),
    )
