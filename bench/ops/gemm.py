"""gemm and gemm_accumulate_: products of 16-bit matrices with FP32 accumulation, against torch (cuBLAS, or oneDNN on
the CPU).

Shapes are those of training: forward (NT: x @ w.T), input gradient (NN), weight gradient (TN) into FP32 `main_grad`.
What torch has to do for the same result is its baseline: an epilogue is separate kernels, an accumulation a product
and an add.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from amp_kernels.ops.gemm import gemm, gemm_accumulate_

from .. import ours
from ..harness import Call, Case
from ..roofline import DTYPES

# M, N, K, layout of a and b (N as stored, T transposed), result: "16" as the operands, "fp32", "fp32+" accumulated,
# or a 16-bit result of an activation after a bias.
CUDA = [
    (8192, 6144, 4096, "NT", "16"),  # Llama-8B: qkv, gate + up, down, their gradients
    (8192, 28672, 4096, "NT", "16"),
    (8192, 4096, 14336, "NT", "16"),
    (8192, 14336, 4096, "NN", "16"),
    (8192, 4096, 28672, "NN", "16"),
    (28672, 4096, 8192, "TN", "fp32+"),
    (4096, 14336, 8192, "TN", "fp32+"),
    (4096, 128256, 4096, "NT", "16"),
    (4096, 4096, 128256, "NN", "16"),
    (128256, 4096, 4096, "TN", "fp32+"),
    (128256, 4096, 512, "TN", "fp32+"),
    (16384, 16384, 2048, "NT", "16"),  # Llama-1B
    (2048, 8192, 16384, "TN", "fp32+"),
    (8192, 8192, 28672, "NT", "16"),  # Llama-70B
    (8192, 7168, 8192, "NT", "16"),
    (7168, 8192, 8192, "TN", "fp32+"),
    (8192, 4864, 896, "NT", "16"),  # Qwen-0.5B
    (16384, 50257, 768, "NT", "16"),  # GPT-2: its unpadded head, its MLP
    (65536, 3072, 768, "NT", "gelu"),
    (3072, 768, 65536, "TN", "fp32+"),
    (4096, 2112, 7168, "NT", "16"),  # DeepSeek-V3
    (4096, 576, 7168, "NT", "16"),
    (4096, 24576, 1536, "NT", "16"),
    (32768, 4096, 512, "TN", "fp32+"),
    (7168, 4096, 16384, "TN", "fp32+"),
    (128, 7168, 16384, "NT", "16"),
    (8192, 256, 7168, "NT", "fp32"),
    (16448, 4096, 1024, "NT", "gelu"),  # vision: ViT-L, SigLIP, ViT-B, ResNet-50 as implicit products
    (23328, 1152, 4304, "NT", "16"),
    (3072, 768, 50432, "TN", "fp32+"),
    (200704, 64, 576, "NT", "16"),
    (12544, 256, 2304, "NT", "16"),
    (64, 147, 802816, "TN", "fp32+"),
    (262144, 64, 64, "NT", "relu"),  # narrow: tiny MLP, DLRM, LoRA
    (65536, 512, 13, "NT", "relu"),
    (8192, 16, 4096, "NT", "16"),
    (8192, 4096, 16, "NT", "16"),
    (4096, 4096, 4096, "NT", "16"),  # controls
    (1024, 1024, 1024, "NT", "16"),
    (512, 512, 512, "NT", "16"),
    (4097, 4097, 4097, "NT", "16"),
]
QUICK = [(8192, 6144, 4096, "NT", "16"), (4096, 14336, 8192, "TN", "fp32+"), (16448, 4096, 1024, "NT", "gelu")]
CPU = [
    (1024, 768, 768, "NT", "16"),
    (1024, 768, 3072, "NN", "16"),
    (768, 3072, 1024, "TN", "fp32+"),
    (1024, 3072, 768, "NT", "gelu"),
    (512, 512, 512, "NT", "fp32"),
    (257, 129, 515, "NT", "16"),
]
ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu}


@dataclass
class Operands:
    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None
    c: torch.Tensor | None  # what is accumulated into


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    shapes = (QUICK if quick else CUDA) if device.type == "cuda" else (CPU[:4:3] if quick else CPU)
    for dtype in ("bf16",) if quick else ("bf16", "fp16"):
        for m, n, k, layout, result in shapes:
            yield _case(m, n, k, layout, result, dtype, device)


def _case(m: int, n: int, k: int, layout: str, result: str, dtype: str, device: torch.device) -> Case:
    op = "gemm_accumulate_" if result == "fp32+" else "gemm"
    activation = result if result in ACTIVATIONS else None
    wide = result.startswith("fp32")
    size = 2 * (m * k + k * n) + (8 if result == "fp32+" else 4 if wide else 2) * m * n

    def inputs(generator: torch.Generator) -> Operands:
        def normal(rows: int, columns: int, transposed: bool, scale: float = 1.0) -> torch.Tensor:
            shape = (columns, rows) if transposed else (rows, columns)
            drawn = torch.randn(shape, generator=generator, device=device, dtype=DTYPES[dtype]) * scale
            return drawn.t() if transposed else drawn

        bias = torch.randn(n, generator=generator, device=device).to(DTYPES[dtype]) if activation else None
        c = torch.randn(m, n, generator=generator, device=device) if result == "fp32+" else None
        return Operands(normal(m, k, layout[0] == "T"), normal(k, n, layout[1] == "T", k**-0.5), bias, c)

    def prepare_ours(x: Operands) -> Call:
        if x.c is not None:
            return lambda: {"out": gemm_accumulate_(x.c, x.a, x.b)}
        out_dtype = torch.float32 if wide else None
        return lambda: {"out": gemm(x.a, x.b, x.bias, activation=activation, out_dtype=out_dtype)}

    def prepare_torch(x: Operands) -> Call:
        if x.c is not None:
            return lambda: {"out": x.c.add_(_wide_product(x.a, x.b))}
        if wide:
            return lambda: {"out": _wide_product(x.a, x.b)}
        if activation:
            return lambda: {"out": ACTIVATIONS[activation](torch.addmm(x.bias, x.a, x.b))}
        return lambda: {"out": x.a @ x.b}

    def reference(x: Operands) -> dict:
        out = x.a.double() @ x.b.double()
        if x.c is not None:
            out += x.c
        if activation:
            out = ACTIVATIONS[activation](out + x.bias.double())
        # One rounding to 16 bits, and for torch's epilogue one more before the activation; FP32 sums of k products.
        rounding = 0.0 if wide else 2.0 ** {"bf16": -8, "fp16": -11}[dtype]
        return {"out": (out, 1.5 * rounding + 1e-5 + 2.0**-24 * k)}

    return Case(
        op=op,
        shape=f"{m}x{n}x{k} {layout}" + (f" bias+{activation}" if activation else ""),
        dtype=dtype + {"fp32": " -> fp32", "fp32+": " -> fp32 accumulated"}.get(result, ""),
        bytes=size,
        flops=2 * m * n * k,
        inputs=inputs,
        providers={"torch": prepare_torch, **ours.providers(op, device, prepare_ours)},
        reference=reference,
        backends=ours.backends(op, device),
    )


def _wide_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b in FP32; torch's CPU kernels have no FP32 result for 16-bit operands."""
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
