"""check_and_norm's CUDA kernel (``csrc/kernels/check_and_norm.cu``) on CPU tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _emulator
from . import DTYPE_CODES, Memory


def launch(
    grads: Sequence[Tensor], grad_scale: Tensor | None = None, *, norm_type: float = 2.0, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """``amp_kernels::check_and_norm``; see ``amp_kernels/ops/check_and_norm.py``."""
    memory = Memory()
    refs = [(memory.add(f"grads[{i}]", g), g.numel(), DTYPE_CODES[g.dtype]) for i, g in enumerate(grads)]
    shape = (len(grads),) if per_tensor else ()
    # Zeros for empty tensors, which the kernels leave out; the others are written before anybody reads them.
    norms, found_infs = (torch.zeros(shape, dtype=torch.float32, device="cpu") for _ in range(2))
    scalars = (
        memory.add("grad_scale", grad_scale),
        memory.add("norms", norms, initialised=False),
        memory.add("found_infs", found_infs, initialised=False),
    )
    _emulator.check_and_norm(memory.pieces, refs, *scalars, norm_type == math.inf, per_tensor)
    return norms, found_infs
