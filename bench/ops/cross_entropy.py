"""cross_entropy: loss and gradient of a language model's logits, against torch eager and compiled under autocast, and QuACK."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from amp_kernels.ops.cross_entropy import cross_entropy

from .. import ours, peers
from ..harness import Case, Scope
from ..roofline import DTYPES

CUDA = [(8192, 50257), (8192, 50304), (8192, 128256)]  # tokens, classes
CPU = [(256, 50257)]
QUICK_CPU = [(16, 1001)]
ERROR = {"bf16": 2.0**-7, "fp16": 2.0**-10, "fp32": 2.0**-16}


def cases(scope: Scope) -> Iterator[Case]:
    for shape in CUDA if scope.device.type == "cuda" else QUICK_CPU if scope.quick else CPU:
        for dtype in ("bf16",) if scope.quick else ("bf16", "fp32"):
            yield _case(*shape, dtype, scope.device)


def _case(rows: int, classes: int, dtype: str, device: torch.device) -> Case:
    def inputs(generator: torch.Generator) -> list[torch.Tensor]:
        logits = torch.randn(rows, classes, generator=generator, device=device, dtype=DTYPES[dtype])
        return [logits, torch.randint(classes, (rows,), generator=generator, device=device)]

    def both(function, logits, target):
        x = logits.detach().requires_grad_()

        def call():
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = function(x, target)
            return {"grad": torch.autograd.grad(loss, x)[0], "loss": loss.detach().view(1)}

        return call

    size = {"bf16": 2, "fp16": 2, "fp32": 4}[dtype]
    found = {"torch": F.cross_entropy}
    if device.type == "cuda":
        found |= peers.cross_entropy()
        if dtype == "bf16" and (rows, classes) == CUDA[0]:  # compiling takes seconds
            found["torch.compile"] = torch.compile(F.cross_entropy)
    return Case(
        op="cross_entropy",
        shape=f"{rows}x{classes} forward + backward",
        dtype=dtype,
        bytes=2 * size * rows * classes,
        flops=20 * rows * classes,
        inputs=inputs,
        providers={
            **{name: lambda x, function=function: both(function, *x) for name, function in found.items()},
            **ours.providers("cross_entropy_rows_", device, lambda x: both(cross_entropy, *x)),
        },
        reference=lambda x: {
            name: (value, ERROR[dtype]) for name, value in both(F.cross_entropy, x[0].double(), x[1])().items()
        },
        backends=ours.backends("cross_entropy_rows_", device),
        families=("cross-entropy, forward + backward",),
    )
