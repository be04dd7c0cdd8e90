"""layer_norm and rms_norm, forward and forward + backward, against torch, torch.compile, Liger and QuACK.

Rows in the working dtype, fp32 parameters, as autocast leaves them; torch gets parameters in the dtype of the rows,
which is the faster of its ways. The last row of each is the one that a residual stream in fp32 meets under autocast:
torch reads it, writes fp32 and casts.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

import amp_kernels as ak

from ..harness.case import DTYPES, Case, Scope, Tensors
from . import peers
from .providers import compiled, differentiable

EPS = peers.NORM_EPS
STOCK = {
    "layer_norm": lambda x, weight: F.layer_norm(x, weight.shape, weight, None, EPS),
    "rms_norm": lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS),
}
OURS = {
    "layer_norm": lambda x, weight: ak.layer_norm(x, weight.shape, weight, None, EPS),
    "rms_norm": lambda x, weight: ak.rms_norm(x, weight.shape, weight, EPS),
}


def layer_norm(scope: Scope) -> Iterator[Case]:
    yield from _cases("layer_norm", scope)


def rms_norm(scope: Scope) -> Iterator[Case]:
    yield from _cases("rms_norm", scope)


def _cases(kind: str, scope: Scope) -> Iterator[Case]:
    for size in scope.pick([(32768, 768), (16384, 4096), (2048, 32768)], [(2048, 768)], [(64, 96)]):
        for backward in (False, True):
            for dtype in scope.dtypes("bf16", "fp16", "fp32"):
                yield case(kind, *size, dtype, backward, scope.device)
            yield case(kind, *size, "fp32", backward, scope.device, autocast=True)


def case(
    kind,
    rows,
    columns,
    dtype: str,
    backward: bool,
    device: torch.device,
    autocast: bool = False,
    compiles: bool | None = None,
) -> Case:
    """`compiles`: also torch's function compiled, by default on a GPU."""
    result = torch.bfloat16 if autocast else DTYPES[dtype]

    def inputs(generator: torch.Generator) -> Tensors:
        options = {"generator": generator, "device": generator.device, "dtype": DTYPES[dtype]}
        x, grad = torch.randn(rows, columns, **options), torch.randn(rows, columns, **options)
        return [x, torch.rand(columns, **options) + 0.5, grad]

    def rounded(norm):
        return lambda x, weight: norm(x, weight).to(result)

    functions = compiled({"torch": STOCK[kind]}, device.type == "cuda" if compiles is None else compiles)
    functions |= peers.functions(kind, device)
    size, out = DTYPES[dtype].itemsize, result.itemsize
    return differentiable(
        "norm_forward",
        device,
        rounded(OURS[kind]),
        {name: rounded(norm) for name, norm in functions.items()},
        leaves=2,
        bound=3 * 2.0**-8 if out == 2 else 1e-4,
        backward=backward,
        autocast=autocast,
        reference=STOCK[kind],
        op=kind,
        shape=f"{rows}x{columns} {'forward + backward' if backward else 'forward'}{' under autocast' * autocast}",
        dtype=dtype,
        bytes=rows * columns * (size + out + (2 * size + out if backward else 0)),
        written=rows * columns * (out + size * backward),
        flops=rows * columns * (30 if backward else 8),
        inputs=inputs,
    )


CASES = (layer_norm, rms_norm)
