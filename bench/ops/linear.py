"""linear: bias and activation fused into the product, forward and backward, and what a call costs the host; mlp: two
products with the activation, and in backward its derivative and the bias gradient, in their epilogues.

The GPU rows are the first matrix of GPT-2's MLP (K = 768), its block and, gated, that of Llama-1B, with 16-bit weights,
so that no provider is charged for casts, which autocast and shadow weights decide. The host rows are a layer too small
to hide its launch, under autocast with FP32 weights: nn.Linear and ak.nn.Linear as they stand in a model.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

import amp_kernels as ak

from ..harness.case import DTYPES, Call, Case, Prepare, Scope, Tensors
from . import peers
from .providers import compared, compiled, differentiable, timed_call

ACTIVATIONS = {"gelu": F.gelu, "silu": F.silu}
HOST = (64, 256, 256)
ROUNDING = 2.0**-8  # of bf16

Size = tuple[int, int, int]  # M, N, K


def linear(scope: Scope) -> Iterator[Case]:
    if scope.product:
        for dtype in () if scope.layout else scope.dtypes("bf16", "fp16", "fp32"):
            yield plain(scope.product, dtype, scope.device, families=("linear, forward",))
        return
    size = scope.pick((32768, 3072, 768), (1024, 3072, 768), (64, 96, 64))
    for dtype in scope.dtypes("bf16", "fp16"):
        for backward in (False, True):
            for activation in ACTIVATIONS:
                yield activated(activation, backward, size, scope.device, dtype=dtype)
    for backward in (False, True):
        yield layer(backward, HOST, scope.device)


def plain(size: Size, dtype: str, device: torch.device, **options) -> Case:
    """The product alone, forward."""
    return differentiable(
        "gemm",
        device,
        lambda x, weight, bias: ak.linear(x, weight),
        {"torch": lambda x, weight, bias: F.linear(x, weight)},
        leaves=3,
        bound=3 * ROUNDING,
        backward=False,
        inputs=lambda generator: _draw(size, DTYPES[dtype], generator),
        **_facts("forward", size, dtype, False),
        **options,
    )


def activated(
    activation: str,
    backward: bool,
    size: Size,
    device: torch.device,
    compiles: bool = False,
    dtype: str = "bf16",
    **options,
) -> Case:
    direction = "forward + backward" if backward else "forward"
    return differentiable(
        "gemm",
        device,
        lambda x, weight, bias: ak.linear(x, weight, bias, activation=activation),
        compiled({"torch": lambda x, weight, bias: ACTIVATIONS[activation](F.linear(x, weight, bias))}, compiles),
        leaves=3,
        bound=3 * ROUNDING,  # eager code rounds pre-activation, result and gradients
        backward=backward,
        inputs=lambda generator: _draw(size, DTYPES[dtype], generator),
        families=(f"linear + activation, {direction}",),
        **_facts(f"{activation} {direction}", size, dtype, backward),
        **options,
    )


def layer(backward: bool, size: Size, device: torch.device, **options) -> Case:
    """nn.Linear and ak.nn.Linear under autocast, with FP32 weights."""

    def prepared(module: type[torch.nn.Linear]) -> Prepare:
        def prepare(tensors: Tensors) -> Call:
            x, weight, bias, grad = tensors
            linear = module(size[2], size[1], device="meta")
            linear.weight, linear.bias = (torch.nn.Parameter(tensor) for tensor in (weight, bias))
            x = x.detach().requires_grad_()

            def forward():
                with torch.enable_grad(), torch.autocast(device.type, dtype=torch.bfloat16):  # as a training step's
                    return linear(x)

            def call():
                if not backward:
                    with torch.no_grad():
                        return {"out": forward().detach()}
                out = forward()
                grads = torch.autograd.grad(out, [x, linear.weight, linear.bias], grad.to(out.dtype))
                return {"out": out.detach(), **{f"grad {i}": grad for i, grad in enumerate(grads)}}

            return call

        return prepare

    def reference(tensors: Tensors) -> dict:
        want = timed_call(F.linear, [tensor.double() for tensor in tensors], 3, backward)()
        return {name: (value, 3 * ROUNDING) for name, value in want.items()}

    return compared(
        "gemm",
        device,
        prepared(ak.nn.Linear),
        {"torch": prepared(torch.nn.Linear)},
        reference=reference,
        host_time=True,
        inputs=lambda generator: _draw(size, torch.float32, generator),
        **_facts(f"autocast {'forward + backward' if backward else 'forward'}", size, "bf16", backward),
        **options,
    )


def _facts(kind: str, size: Size, dtype: str, backward: bool) -> dict:
    m, n, k = size
    moved = DTYPES[dtype].itemsize * (m * k + n * k + m * n)
    passes = 3 if backward else 1
    shape = f"{m}x{n}x{k} {kind}"
    return {"op": "linear", "shape": shape, "dtype": dtype, "bytes": passes * moved, "flops": 2 * passes * m * n * k}


def _draw(size: Size, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    """x, weight, bias, gradient of the result; values that are the same number in 16 and 32 bits."""
    m, n, k = size
    drawn = [_normal(generator, *shape) for shape in ((m, k), (n, k), (n,), (m, n))]
    drawn[1].mul_(k**-0.5)
    return [tensor.to(dtype) for tensor in drawn]


def _normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.bfloat16)


def mlp(scope: Scope) -> Iterator[Case]:
    cuda = [("gelu", 32768, 768, 3072), ("swiglu", 16384, 2048, 8192)]  # activation, rows, width, hidden width
    cpu = [("gelu", 512, 256, 1024), ("swiglu", 512, 256, 1024)]
    for dtype in scope.dtypes("bf16", "fp16"):
        for case in scope.pick(cuda, cpu, [("gelu", 64, 48, 96), ("swiglu", 64, 48, 96)]):
            yield mlp_case(*case, scope.device, dtype=dtype)


def mlp_case(
    activation: str,
    rows: int,
    width: int,
    hidden: int,
    device: torch.device,
    compiles: bool = False,
    dtype: str = "bf16",
) -> Case:
    first = 2 * hidden if activation == "swiglu" else hidden

    def eager(x, weight1, bias1, weight2, bias2):
        z = F.linear(x, weight1, bias1)
        if activation == "gelu":
            return F.linear(F.gelu(z), weight2, bias2)
        gate, up = z.chunk(2, -1)
        return F.linear(F.silu(gate) * up, weight2, bias2)

    def inputs(generator: torch.Generator) -> Tensors:
        shapes = ((first, width), (width, hidden), (rows, width), (first,), (width,), (rows, width))
        weight1, weight2, x, bias1, bias2, grad = (_normal(generator, *shape) for shape in shapes)
        tensors = [x, weight1.mul_(width**-0.5), bias1, weight2.mul_(hidden**-0.5), bias2, grad]
        return [tensor.to(DTYPES[dtype]) for tensor in tensors]

    moved = rows * (2 * width + first + hidden) + width * (first + hidden)
    return differentiable(
        "gemm",
        device,
        lambda *tensors: ak.mlp(*tensors, activation=activation),
        compiled({"torch": eager} | peers.functions(f"mlp {activation}", device), compiles),
        leaves=5,
        bound=6 * ROUNDING,
        op="mlp",
        shape=f"{rows} x {width}-{hidden}-{width} {activation} forward + backward",
        dtype=dtype,
        bytes=6 * moved,
        flops=6 * rows * width * (first + hidden),
        inputs=inputs,
        families=("mlp, forward + backward",),
    )


CASES = (linear, mlp)
