"""check_and_norm's CUDA kernel (``csrc/kernels/check_and_norm.cu``) on CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _emulator
from . import DTYPE_CODES, Memory


def launch(grads: Sequence[Tensor], grad_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``amp_kernels::check_and_norm``; see ``amp_kernels/ops/check_and_norm.py``."""
    memory = Memory()
    refs = [(memory.add(f"grads[{i}]", g), g.numel(), DTYPE_CODES[g.dtype]) for i, g in enumerate(grads)]
    sum_sq, found_inf = (torch.empty((), dtype=torch.float32, device="cpu") for _ in range(2))
    scalars = (
        memory.add("grad_scale", grad_scale),
        memory.add("sum_sq", sum_sq, initialised=False),
        memory.add("found_inf", found_inf, initialised=False),
    )
    _emulator.check_and_norm(memory.pieces, refs, *scalars)
    return sum_sq, found_inf
