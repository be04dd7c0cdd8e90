"""cross_entropy: loss and gradient of a language model's logits; linear_cross_entropy: with the last layer, whose logits are
never held. Under autocast, against torch eager, compiled and fused, Liger and QuACK."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

import amp_kernels as ak

from ..harness.case import DTYPES, Case, Scope, Tensors
from . import peers
from .providers import compiled, differentiable

ERROR = {"bf16": 2.0**-7, "fp32": 2.0**-16}
LINEAR_CUDA = [(16384, 768, 50257), (4096, 4096, 128256), (8192, 4096, 128256)]  # tokens, features, classes


def cross_entropy(scope: Scope) -> Iterator[Case]:
    shapes = scope.pick([(8192, 50257), (8192, 50304), (8192, 128256)], [(256, 50257)], [(16, 1001)])  # tokens, classes
    for shape in shapes:
        for dtype in ("bf16",) if scope.quick else ("bf16", "fp32"):
            on_gpu = scope.device.type == "cuda"
            compiles = on_gpu and dtype == "bf16" and shape == shapes[0]
            yield rows_case(*shape, dtype, scope.device, compiles)


def rows_case(rows: int, classes: int, dtype: str, device: torch.device, compiles: bool) -> Case:
    def inputs(generator: torch.Generator) -> Tensors:
        logits = torch.randn(rows, classes, generator=generator, device=device, dtype=DTYPES[dtype])
        return [logits, torch.randint(classes, (rows,), generator=generator, device=device), None]

    functions = compiled({"torch": F.cross_entropy} | peers.functions("cross_entropy", device), compiles)
    return differentiable(
        "cross_entropy_rows_",
        device,
        ak.cross_entropy,
        functions,
        bound=ERROR[dtype],
        autocast=True,
        op="cross_entropy",
        shape=f"{rows}x{classes} forward + backward",
        dtype=dtype,
        bytes=2 * DTYPES[dtype].itemsize * rows * classes,
        flops=20 * rows * classes,
        inputs=inputs,
        families=("cross-entropy, forward + backward",),
    )


def linear_cross_entropy(scope: Scope) -> Iterator[Case]:
    for shape in scope.pick(LINEAR_CUDA, [(256, 64, 50257)], [(32, 16, 501)]):
        yield head_case(*shape, scope.device, compiles=shape == LINEAR_CUDA[0])


def _eager(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, weight), target)


def head_case(rows: int, features: int, classes: int, device: torch.device, compiles: bool) -> Case:
    def inputs(generator: torch.Generator) -> Tensors:
        x = torch.randn(rows, features, generator=generator, device=device, dtype=torch.bfloat16)
        weight = torch.randn(classes, features, generator=generator, device=device).mul_(features**-0.5)
        return [x, weight, torch.randint(classes, (rows,), generator=generator, device=device), None]

    functions = {"torch": _eager} | peers.functions("linear_cross_entropy", device)
    functions |= peers.torch_linear_cross_entropy() if device.type == "cuda" else {}
    functions = compiled(functions, compiles)
    return differentiable(
        "gemm",
        device,
        ak.linear_cross_entropy,
        functions,
        leaves=2,
        bound=2.0**-5,  # logits and their gradient are rounded to bf16
        autocast=True,
        op="linear_cross_entropy",
        shape=f"{rows} x {features}-{classes} forward + backward",
        dtype="bf16",
        bytes=2 * 3 * rows * features + 8 * classes * features,
        flops=6 * rows * features * classes,
        inputs=inputs,
        families=("linear cross-entropy, forward + backward",),
    )


CASES = (cross_entropy, linear_cross_entropy)
