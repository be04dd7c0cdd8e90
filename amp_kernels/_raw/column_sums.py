"""The gradient of a bias: the sums of the columns of a gradient, in fp32. Raw."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from .._checks.lists import KERNEL_DTYPES
from .._checks.operands import check_tensor
from .._dispatch.library import PLAIN, Sample, define
from .._dispatch.samples import Normal

_TRACED = (FakeTensor, FunctionalTensor)


def check(x: Tensor) -> None:
    check_tensor("column_sums", "x", x, KERNEL_DTYPES)
    if x.ndim != 2:
        raise ValueError(f"column_sums: x has shape {list(x.shape)}; accepted: [rows, columns]")


def _by_torch(x: Tensor) -> Tensor:
    return x.sum(0, dtype=torch.float32)


def column_sums(x: Tensor) -> Tensor:
    """``x.sum(0)`` of a matrix, in fp32: the op below autograd, torch's sum where a gradient passes through it.

    A program that is compiled for a GPU has torch's sum, which the compiler fuses with the kernel that makes ``x``. For a CPU it
    has the op: ATen widens 16 bits to a copy first.
    """
    traced = torch.compiler.is_compiling() or isinstance(x, _TRACED)
    if (torch.is_grad_enabled() and x.requires_grad) or (traced and x.device.type != "cpu"):
        return _by_torch(x)
    return op(x) if traced or type(x) in PLAIN else _by_torch(x)


def samples(device: str) -> Iterator[Sample]:
    normal = Normal(device)
    for dtype in KERNEL_DTYPES:
        for rows, columns in ((450, 40), (64, 7), (3, 300), (0, 4), (5, 0)):
            yield (normal(rows, columns, dtype=dtype),), {}
        yield (normal(70, 24, dtype=dtype)[:, 8:],), {}
        yield (normal(24, 70, dtype=dtype).t(),), {}
        yield (normal(1, 24, dtype=dtype).expand(70, 24),), {}


op = define("column_sums(Tensor x) -> Tensor", _by_torch, samples=samples, check=lambda call: check(call.x))
#: The op's argument: ``x`` [rows, columns], fp16, bf16 or fp32, any strides.
