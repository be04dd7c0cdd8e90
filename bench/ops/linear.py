"""linear: bias and activation fused into the product, forward and backward, and what a call costs the host.

The GPU rows are the first matrix of GPT-2's MLP (K = 768) with 16-bit weights, so that casts, which autocast and shadow
weights decide, are on nobody's account. The host rows are a layer too small to hide its launch, under autocast with
FP32 weights: nn.Linear and ak.nn.Linear as they stand in a model.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

import amp_kernels as ak

from .. import ours
from ..harness import Call, Case, Scope
from ..roofline import DTYPES

ACTIVATIONS = {"gelu": F.gelu, "silu": F.silu}
HOST = (64, 256, 256)

Size = tuple[int, int, int]  # M, N, K
Tensors = list[torch.Tensor]


def cases(scope: Scope) -> Iterator[Case]:
    size = (32768, 3072, 768) if scope.device.type == "cuda" else (64, 96, 64) if scope.quick else (1024, 3072, 768)
    for backward in (False, True):
        for activation in ACTIVATIONS:
            yield activated(activation, backward, size, scope.device)
    for backward in (False, True):
        yield layer(backward, HOST, scope.device)


def plain(size: Size, dtype: str, device: torch.device, **options) -> Case:
    """The product alone, forward."""
    return _case(
        "forward",
        size,
        device,
        dtype=dtype,
        inputs=lambda generator: _draw(size, DTYPES[dtype], generator),
        eager=lambda tensors: timed_call(lambda: F.linear(*tensors[:2]), tensors, False),
        fused=lambda tensors: timed_call(lambda: ak.linear(*tensors[:2]), tensors, False),
        reference=lambda tensors: timed_call(lambda: F.linear(*tensors[:2]), tensors, False)(),
        backward=False,
        **options,
    )


def activated(activation: str, backward: bool, size: Size, device: torch.device, **options) -> Case:
    def eager(x, weight, bias):
        return ACTIVATIONS[activation](F.linear(x, weight, bias))

    def fused(x, weight, bias):
        return ak.linear(x, weight, bias, activation=activation)

    direction = "forward + backward" if backward else "forward"
    return _case(
        f"{activation} {direction}",
        size,
        device,
        inputs=lambda generator: _draw(size, torch.bfloat16, generator),
        eager=lambda tensors: timed_call(lambda: eager(*tensors[:3]), tensors, backward),
        fused=lambda tensors: timed_call(lambda: fused(*tensors[:3]), tensors, backward),
        reference=lambda tensors: timed_call(lambda: eager(*tensors[:3]), tensors, backward)(),
        backward=backward,
        families=(f"linear + activation, {direction}",),
        **options,
    )


def layer(backward: bool, size: Size, device: torch.device, **options) -> Case:
    """nn.Linear and ak.nn.Linear under autocast, with FP32 weights."""

    def prepared(module: type[torch.nn.Linear]) -> Callable[[Tensors], Call]:
        def prepare(tensors: Tensors) -> Call:
            x, weight, bias, _ = tensors
            linear = module(size[2], size[1], device="meta")
            linear.weight, linear.bias = (torch.nn.Parameter(tensor) for tensor in (weight, bias))

            def forward():
                with (
                    torch.enable_grad(),
                    torch.autocast(device.type, dtype=torch.bfloat16),
                ):  # a training step's forward
                    return linear(x)

            return timed_call(forward, [x, linear.weight, linear.bias, tensors[3]], backward)

        return prepare

    return _case(
        f"autocast {'forward + backward' if backward else 'forward'}",
        size,
        device,
        inputs=lambda generator: _draw(size, torch.float32, generator),
        eager=prepared(torch.nn.Linear),
        fused=prepared(ak.nn.Linear),
        reference=lambda tensors: timed_call(lambda: F.linear(*tensors[:3]), tensors, backward)(),
        backward=backward,
        host_time=True,
        **options,
    )


def _case(kind, size, device, *, inputs, eager, fused, reference, backward, dtype="bf16", **options) -> Case:
    m, n, k = size
    moved = DTYPES[dtype].itemsize * (m * k + n * k + m * n)

    return Case(
        op="linear",
        shape=f"{m}x{n}x{k} {kind}",
        dtype=dtype,
        bytes=(3 if backward else 1) * moved,
        flops=(6 if backward else 2) * m * n * k,
        inputs=inputs,
        providers={"torch": eager, **ours.providers("gemm", device, fused)},
        reference=lambda tensors: in_double(reference, tensors),
        backends=ours.backends("gemm", device),
        **options,
    )


def in_double(reference: Callable[[Tensors], dict], tensors: Tensors, roundings: int = 3) -> dict:
    """What `reference` makes of the tensors in float64. The bound covers what eager code rounds to 16 bits on the way:
    pre-activation, result, gradients."""
    double = [tensor.detach().double() for tensor in tensors]
    for tensor in double[:-1]:
        tensor.requires_grad_()
    return {name: (value, roundings * 2.0**-8) for name, value in reference(double).items()}


def _draw(size: Size, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    """x, weight, bias, gradient of the result; values that are the same number in 16 and 32 bits."""
    m, n, k = size

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        drawn = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.bfloat16)
        return drawn.mul_(scale).to(dtype)

    tensors = [normal(m, k), normal(n, k, scale=k**-0.5), normal(n), normal(m, n).bfloat16()]
    for tensor in tensors[:3]:
        tensor.requires_grad_()
    return tensors


def timed_call(forward: Callable[[], torch.Tensor], tensors: Tensors, backward: bool) -> Call:
    """The result, and with `backward` the gradients of all `tensors` but the last, which is the result's."""

    def without() -> dict:
        with torch.no_grad():
            return {"out": forward().detach()}

    def both() -> dict:
        out = forward()
        grads = torch.autograd.grad(out, tensors[:-1], tensors[-1].to(out.dtype))
        return {"out": out.detach(), **{f"grad {i}": grad for i, grad in enumerate(grads)}}

    return both if backward else without
