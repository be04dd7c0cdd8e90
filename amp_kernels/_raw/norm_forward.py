"""Layer norm and RMS norm of rows, with an addition in front: 16 bits in and out, fp32 inside.

A row is read once: its mean and the mean square around it are taken in two passes over the row that is then on the
chip (never as ``E[x^2] - E[x]^2``, which at a mean of 1,000 standard deviations has lost the variance), and stay fp32.
The op is raw; ``amp_kernels.layer_norm`` and ``amp_kernels.rms_norm`` are the differentiable ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .._checks.lists import KERNEL_DTYPES
from .._dispatch.library import Sample, define
from .._dispatch.samples import Normal
from ._norm import check_forward, statistics


def _reference(call):
    x, residual = call.x, call.residual
    total = x if residual is None else (x.float() + residual.float()).to(residual.dtype)
    wide = total.float()
    mean, rstd = statistics(wide, call.eps, call.centred)
    y = (wide - mean[:, None]) * rstd[:, None]
    if call.weight is not None:
        y = y * call.weight.float()
    if call.bias is not None:
        y = y + call.bias.float()
    return (
        y.to(call.out_dtype).contiguous(),
        x.new_empty(0) if residual is None else total.contiguous(),
        mean if call.centred else mean[:0].clone(),
        rstd,
    )


def samples(device: str) -> Iterator[Sample]:
    normal = Normal(device)
    for i, dtype in enumerate(KERNEL_DTYPES):
        other, third = KERNEL_DTYPES[i - 1], KERNEL_DTYPES[i - 2]
        x, weight, bias = normal(5, 40, dtype=dtype), normal(40, dtype=other), normal(40, dtype=third)
        yield (x, weight, bias), {"eps": 1e-5, "centred": True, "out_dtype": dtype}
        yield (x, weight, None, normal(5, 40, dtype=third)), {"eps": 1e-6, "centred": False, "out_dtype": other}
        options = {"eps": 1e-5, "centred": True, "out_dtype": dtype}
        yield (x, weight, bias, normal(5, 40, dtype=other)), options
        yield (x[:, :7], None, None, normal(5, 7, dtype=third)), options
        yield (x[:, :7],), {"eps": 0.1, "centred": True, "out_dtype": third}
        yield (x[:0], None, bias), {"eps": 1e-5, "centred": False, "out_dtype": dtype}
        yield (normal(3, 2100, dtype=dtype) + 8,), {"eps": 1e-5, "centred": i != 1, "out_dtype": torch.float32}
    yield (normal(3, 33, dtype=torch.float32) * 1e30,), {"eps": 1e-5, "centred": True, "out_dtype": torch.float16}


op = define(
    "norm_forward(Tensor x, Tensor? weight=None, Tensor? bias=None, Tensor? residual=None, *, "
    "float eps, bool centred, ScalarType out_dtype) -> (Tensor, Tensor, Tensor, Tensor)",
    _reference,
    samples=samples,
    check=check_forward,
    bound=True,
)
