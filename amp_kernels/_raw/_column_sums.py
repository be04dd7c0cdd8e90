"""The gradient of a bias: the sum of the rows of a gradient, in fp32."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from .._dispatch.library import LIBRARY, PLAIN, KernelOp
from .._dispatch.policy import requested_backend

_kernel = KernelOp("_column_sums(Tensor x) -> Tensor")
_TRACED = (FakeTensor, FunctionalTensor)


def _by_torch(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0, dtype=torch.float32)


# Where there is no kernel: what a compiled program is traced with, and a CPU without the library.
LIBRARY.impl("_column_sums", _by_torch, "CompositeExplicitAutograd")


def column_sums(x: torch.Tensor) -> torch.Tensor:
    """``x.sum(0)`` of a matrix, in fp32: by torch, and on a CPU by a kernel, to which ATen's sum of 16 bits, widened to a
    copy first, is no match."""
    if x.device.type != "cpu" or (torch.is_grad_enabled() and x.requires_grad):
        return _by_torch(x)
    if torch.compiler.is_compiling() or isinstance(x, _TRACED):
        return torch.ops.amp_kernels._column_sums(x)
    if type(x) in PLAIN and requested_backend() in (None, "cpu"):
        return _kernel(x)
    return _by_torch(x)
