"""unscale_'s CUDA kernel (``csrc/kernels/unscale.cu``) on CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import _emulator
from . import DTYPE_CODES, Memory


def launch(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """``amp_kernels::unscale_``; see ``amp_kernels/ops/unscale.py``."""
    memory = Memory()
    refs = [(memory.add(f"grads[{i}]", g), g.numel(), DTYPE_CODES[g.dtype]) for i, g in enumerate(grads)]
    scalars = memory.add("found_inf", found_inf), memory.add("inv_scale", inv_scale)
    _emulator.unscale(memory.pieces, refs, *scalars)
