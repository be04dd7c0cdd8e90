"""layer_norm and rms_norm, forward and forward + backward, against torch, torch.compile, Liger and QuACK.

Rows in the working dtype, fp32 parameters, as autocast leaves them; torch gets parameters in the dtype of the rows,
which is the faster of its ways. The last row of each is the one that a residual stream in fp32 meets under autocast:
torch reads it, writes fp32 and casts.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

import amp_kernels as ak

from . import ours, peers
from .harness import Call, Case, Scope
from .ops.linear import timed_call
from .roofline import DTYPES

EPS = 1e-5
Tensors = list[torch.Tensor]
STOCK = {
    "layer_norm": lambda x, weight: F.layer_norm(x, weight.shape, weight, None, EPS),
    "rms_norm": lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS),
}
OURS = {
    "layer_norm": lambda x, weight: ak.layer_norm(x, weight.shape, weight, None, EPS),
    "rms_norm": lambda x, weight: ak.rms_norm(x, weight.shape, weight, EPS),
}


def cases(kind: str, scope: Scope) -> Iterator[Case]:
    gpu = scope.device.type == "cuda"
    sizes = [(32768, 768), (16384, 4096), (2048, 32768)] if gpu else [(64, 96)] if scope.quick else [(2048, 768)]
    for rows, columns in sizes:
        for backward in (False, True):
            for dtype in ("bf16",) if scope.quick else ("bf16", "fp16", "fp32"):
                yield _case(kind, rows, columns, dtype, backward, scope.device)
            yield _case(kind, rows, columns, "fp32", backward, scope.device, autocast=True)


def _case(kind, rows, columns, dtype: str, backward: bool, device: torch.device, autocast: bool = False) -> Case:
    def inputs(generator: torch.Generator) -> Tensors:
        options = {"generator": generator, "device": generator.device, "dtype": DTYPES[dtype]}
        x, grad = torch.randn(rows, columns, **options), torch.randn(rows, columns, **options)
        weight = torch.rand(columns, **options) + 0.5
        return [x.requires_grad_(), weight.requires_grad_(), grad]

    def timed(norm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], tensors: Tensors) -> Call:
        def forward():
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                return norm(*tensors[:2]).to(result)

        return timed_call(forward, tensors, backward)

    result = torch.bfloat16 if autocast else DTYPES[dtype]
    found = {"torch": STOCK[kind]}
    if device.type == "cuda":
        found |= {"torch.compile": torch.compile(STOCK[kind])} | peers.norms(kind, EPS)
    size, out = DTYPES[dtype].itemsize, result.itemsize
    return Case(
        op=kind,
        shape=f"{rows}x{columns} {'forward + backward' if backward else 'forward'}{' under autocast' * autocast}",
        dtype=dtype,
        bytes=rows * columns * (size + out + (2 * size + out if backward else 0)),
        flops=rows * columns * (30 if backward else 8),
        inputs=inputs,
        providers={
            **{name: lambda tensors, norm=norm: timed(norm, tensors) for name, norm in found.items()},
            **ours.providers("norm_forward", device, lambda tensors: timed(OURS[kind], tensors)),
        },
        reference=lambda tensors: _reference(kind, tensors, backward, 3 * 2.0**-8 if result.itemsize == 2 else 1e-4),
        backends=ours.backends("norm_forward", device),
    )


def _reference(kind: str, tensors: Tensors, backward: bool, bound: float) -> dict:
    double = [tensor.detach().double() for tensor in tensors]
    for tensor in double[:2]:
        tensor.requires_grad_()
    call = timed_call(lambda: STOCK[kind](*double[:2]), double, backward)
    return {name: (value, bound) for name, value in call().items()}
