"""activation_backward: grad * activation'(preact), elementwise, against torch's own backward kernels."""

from collections.abc import Iterator

import torch

from amp_kernels._raw.activation_backward import activation_backward

from .. import ours
from ..harness import Case, Scope
from ..roofline import DTYPES

aten = torch.ops.aten
TORCH = {
    "gelu": aten.gelu_backward,
    "gelu_tanh": lambda grad, z: aten.gelu_backward(grad, z, approximate="tanh"),
    "silu": aten.silu_backward,
    "relu": lambda grad, z: aten.threshold_backward(grad, z, 0),
}


def cases(scope: Scope) -> Iterator[Case]:
    rows, columns = (32768, 3072) if scope.device.type == "cuda" else (64, 384) if scope.quick else (1024, 3072)
    for activation in ("gelu",) if scope.quick else TORCH:
        for dtype in ("bf16",) if scope.quick else ("bf16", "fp16"):
            yield _case(activation, rows, columns, dtype, scope.device)


def _case(activation: str, rows: int, columns: int, dtype: str, device: torch.device) -> Case:
    def inputs(generator: torch.Generator) -> list[torch.Tensor]:
        shape = {"size": (rows, columns), "generator": generator, "device": device, "dtype": DTYPES[dtype]}
        return [torch.randn(**shape), torch.randn(**shape)]

    return Case(
        op="activation_backward",
        shape=f"{rows}x{columns} {activation}",
        dtype=dtype,
        bytes=6 * rows * columns,
        flops=20 * rows * columns,
        inputs=inputs,
        providers={
            "torch": lambda x: lambda: {"grad": TORCH[activation](*x)},
            **ours.providers(
                "activation_backward",
                device,
                lambda x: lambda: {"grad": activation_backward(*x, activation=activation)},
            ),
        },
        reference=lambda x: {
            "grad": (TORCH[activation](x[0].double(), x[1].double()), {"bf16": 2.0**-8, "fp16": 2.0**-11}[dtype])
        },
        backends=ours.backends("activation_backward", device),
    )
