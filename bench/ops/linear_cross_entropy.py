"""linear_cross_entropy: a language model's last layer and its loss, forward and backward under autocast, against torch's two
operations, eager and compiled, torch's fused one, Liger and QuACK."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from amp_kernels.ops.linear_cross_entropy import linear_cross_entropy

from .. import ours, peers
from ..harness import Case, Scope

CUDA = [(16384, 768, 50257), (4096, 4096, 128256), (8192, 4096, 128256)]  # tokens, features, classes
CPU = [(256, 64, 50257)]
QUICK_CPU = [(32, 16, 501)]
ERROR = 2.0**-5  # relative, of rows: logits and their gradient are rounded to bf16


def cases(scope: Scope) -> Iterator[Case]:
    for shape in CUDA if scope.device.type == "cuda" else QUICK_CPU if scope.quick else CPU:
        yield _case(*shape, scope.device)


def _eager(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, weight), target)


def _case(rows: int, features: int, classes: int, device: torch.device) -> Case:
    def inputs(generator: torch.Generator) -> list[torch.Tensor]:
        x = torch.randn(rows, features, generator=generator, device=device, dtype=torch.bfloat16)
        weight = torch.randn(classes, features, generator=generator, device=device).mul_(features**-0.5)
        return [x, weight, torch.randint(classes, (rows,), generator=generator, device=device)]

    def both(function, x, weight, target):
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()

        def call():
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = function(x, weight, target)
            dx, dweight = torch.autograd.grad(loss, (x, weight))
            return {"dx": dx, "dweight": dweight, "loss": loss.detach().view(1)}

        return call

    def reference(tensors):
        x, weight, target = tensors
        want = both(_eager, x.double(), weight.double(), target)()
        return {name: (value, ERROR) for name, value in want.items()}

    found = {"torch": _eager}
    if device.type == "cuda":
        found |= peers.linear_cross_entropy()
        if (rows, features, classes) == CUDA[0]:  # compiling takes seconds
            found["torch.compile"] = torch.compile(_eager)
    return Case(
        op="linear_cross_entropy",
        shape=f"{rows} x {features}-{classes} forward + backward",
        dtype="bf16",
        bytes=2 * 3 * rows * features + 8 * classes * features,
        flops=6 * rows * features * classes,
        inputs=inputs,
        providers={
            **{name: lambda x, function=function: both(function, *x) for name, function in found.items()},
            **ours.providers("gemm", device, lambda tensors: both(linear_cross_entropy, *tensors)),
        },
        reference=reference,
        backends=ours.backends("gemm", device),
        families=("linear cross-entropy, forward + backward",),
    )
