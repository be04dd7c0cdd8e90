"""``amp_kernels::activation_backward`` by its CUDA kernel, on CPU tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _emulator
from . import DTYPE_CODES, Memory


def launch(grad: Tensor, preact: Tensor, *, activation: str) -> Tensor:
    """See ``amp_kernels/ops/activation_backward.py``."""
    grad, preact = grad.contiguous(), preact.contiguous()
    out = torch.empty_like(preact)
    if out.numel() == 0:
        return out
    memory = Memory()
    columns = preact.shape[-1] if preact.ndim else 1
    _emulator.activation_backward(
        memory.pieces,
        memory.add("grad", grad),
        DTYPE_CODES[grad.dtype],
        memory.add("preact", preact),
        memory.add("out", out, initialised=False),
        DTYPE_CODES[preact.dtype],
        preact.numel() // columns,
        columns,
        activation,
    )
    return out
