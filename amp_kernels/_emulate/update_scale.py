"""update_scale_'s CUDA kernels (``csrc/kernels/update_scale.cu``) on CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import _emulator
from . import Memory


def launch(
    scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_infs: Sequence[Tensor],
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float,
    max_scale: float,
    hysteresis: int,
) -> None:
    """``amp_kernels::update_scale_``; see ``amp_kernels/ops/update_scale.py``."""
    memory = Memory()
    state = (
        memory.add("scale", scale),
        memory.add("growth_tracker", growth_tracker),
        memory.add("hysteresis_tracker", hysteresis_tracker),
    )
    found = [memory.add(f"found_infs[{i}]", f) for i, f in enumerate(found_infs)]
    limits = (growth_factor, backoff_factor, growth_interval, min_scale, max_scale, hysteresis)
    _emulator.update_scale(memory.pieces, *state, found, *limits)
