"""gemm and gemm_accumulate_: products of 16-bit matrices with FP32 accumulation, against torch (cuBLAS, or oneDNN on
the CPU).

The shapes are those of training and of kernel libraries' own benchmarks (`gemm_shapes.py`): forward (NT: x @ w.T),
input gradient (NN), weight gradient (TN) into FP32 `main_grad`. torch's baseline is what gives
the same result: an epilogue is separate kernels, an accumulation a product and an add. Shapes are reported by family, since
ratios of unlike things have no common mean:

- aligned: a plain product that TMA and cuBLAS's best kernels can read. The headline. `skinny` is a part of it, shown
  once more: one side at most 128, where latency and bandwidth decide.
- FP32 accumulated: the same, into an FP32 matrix.
- unaligned: a leading dimension or a pointer that is not a multiple of 16 bytes. `unaligned controls` is the part of it
  that no model asked for.
- epilogue: bias and activation in the same kernel, against torch's product and activation.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from amp_kernels._raw.gemm import gemm_accumulate_op, gemm_op

from ..harness.case import DTYPES, Call, Case, Scope, WithFacts
from ..harness.timer import rotation
from . import providers
from .gemm_shapes import CPU, CUDA, QUICK, Shape, planned

ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu}


@dataclass
class Operands:
    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None
    c: torch.Tensor | None  # what is accumulated into


def gemm(scope: Scope) -> Iterator[Case]:
    for dtype in scope.dtypes("bf16", "fp16"):
        listed = scope.pick(QUICK if scope.quick else CUDA, CPU, CPU[:6])
        for shape in [Shape(*scope.product, scope.layout or "NT")] if scope.product else listed:
            yield _case(shape, dtype, scope.device)


def _case(shape: Shape, dtype: str, device: torch.device) -> Case:
    op = "gemm_accumulate_" if shape.result == "fp32+" else "gemm"
    activation = shape.result if shape.result in ACTIVATIONS else None
    wide = shape.result.startswith("fp32")
    m, n, k, batch = shape.m, shape.n, shape.k, shape.batch
    size = batch * (2 * (m * k + k * n) + (8 if shape.result == "fp32+" else 4 if wide else 2) * m * n)

    def prepare_ours(x: Operands) -> Call:
        out_dtype = torch.float32 if wide else None

        def call():
            if x.c is not None:
                gemm_accumulate_op(x.c, x.a, x.b)
                return {"out": x.c}
            return {"out": gemm_op(x.a, x.b, x.bias, activation=activation or "none", out_dtype=out_dtype)[0]}

        compiled = providers.backends(op, device)["amp_kernels"] == "cuda"
        return WithFacts(call, plan) if compiled else call

    def plan() -> dict:
        gpu = torch.cuda.get_device_properties(device)
        return {"plan": planned(shape, gpu.multi_processor_count, 10 * gpu.major + gpu.minor)}

    def reference(x: Operands) -> dict:
        out = x.a.double() @ x.b.double()
        if x.c is not None:
            out += x.c
        if activation:
            out = ACTIVATIONS[activation](out + x.bias.double())
        # One rounding to 16 bits, and for torch's epilogue one more before the activation; FP32 sums of k products.
        rounding = 0.0 if wide else 2.0 ** {"bf16": -8, "fp16": -11}[dtype]
        return {"out": (out, 1.5 * rounding + 1e-5 + 2.0**-24 * k)}

    return providers.compared(
        op,
        device,
        prepare_ours,
        {"torch": lambda x: _torch(shape, x)},
        op=op,
        shape=shape.name,
        dtype=dtype + {"fp32": " -> fp32", "fp32+": " -> fp32 accumulated"}.get(shape.result, ""),
        bytes=size,
        flops=2 * batch * m * n * k,
        inputs=lambda generator: operands(shape, DTYPES[dtype], generator, device),
        reference=reference,
        families=shape.families,
        # The check's float64 copies of operands and result; then three providers' rotating inputs and results.
        memory=batch * (8 * (m * k + k * n) + 24 * m * n) + 4 * size * rotation(size, device),
        kernels=True,
    )


def operands(shape: Shape, dtype: torch.dtype, generator: torch.Generator, device: torch.device) -> Operands:
    """Operands in the layout of the shape, and what its result needs."""
    m, n, k, pitch = shape.m, shape.n, shape.k, shape.pitch

    def normal(rows: int, columns: int, transposed: bool, scale: float = 1.0) -> torch.Tensor:
        if transposed:
            rows, columns = columns, rows
        drawn = torch.empty(shape.batch * rows * (columns + pitch) + shape.offset, device=device, dtype=dtype)
        drawn.normal_(0, scale, generator=generator)
        drawn = drawn[shape.offset :].view(shape.batch, rows, columns + pitch)[..., :columns]
        drawn = drawn.mT if transposed else drawn
        return drawn if shape.batch > 1 else drawn[0]

    bias = torch.randn(n, generator=generator, device=device).to(dtype) if shape.result in ACTIVATIONS else None
    c = torch.randn(m, n, generator=generator, device=device) if shape.result == "fp32+" else None
    a, b = normal(m, k, shape.layout[0] == "T"), normal(k, n, shape.layout[1] == "T", k**-0.5)
    return Operands(a, b, bias, c)


def _torch(shape: Shape, x: Operands) -> Call:
    if x.c is not None:
        return lambda: {"out": x.c.add_(_wide_product(x.a, x.b))}
    if shape.result == "fp32":
        return lambda: {"out": _wide_product(x.a, x.b)}
    if x.bias is not None:
        return lambda: {"out": ACTIVATIONS[shape.result](torch.addmm(x.bias, x.a, x.b))}
    return lambda: {"out": x.a @ x.b}


def _wide_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b in FP32; torch's CPU kernels have no FP32 result for 16-bit operands."""
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


CASES = (gemm,)
