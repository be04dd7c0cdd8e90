"""update_scale_ in Triton: one program looks at every check's found_inf, moves the loss scale and counts skips.

The rule is csrc/gradients/loss_scale.h, its products formed in fp64 as there. Kernel arguments are fp32 in Triton, so the
factors and bounds travel as the bits of fp64 numbers in front of the flags' addresses. Flags are tested one by one and
never added up, where a -1 or a NaN could hide an overflow.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _tables

# Growth and backoff factor, growth interval, lowest and highest scale, hysteresis, consecutive.
OPTIONS = tl.constexpr(7)
BLOCK = 64


@triton.jit
def update_scale_kernel(
    table, flags, scale, growth_tracker, hysteresis_tracker, skipped_steps, consecutive_skips, BLOCK: tl.constexpr
):
    places = tl.arange(0, BLOCK)
    overflows = tl.zeros((BLOCK,), tl.int1)
    for first in range(0, flags, BLOCK):
        mask = first + places < flags
        addresses = tl.load(table + OPTIONS + first + places, mask=mask, other=0).to(tl.pointer_type(tl.float32))
        overflows |= tl.load(addresses, mask=mask, other=0.0) > 0.0
    overflow = tl.max(overflows.to(tl.int32), 0) != 0

    before = tl.load(scale)
    streak = tl.load(growth_tracker) + 1
    tolerated = tl.load(hysteresis_tracker)
    due = ~overflow & (streak == tl.load(table + 2))
    grown = (before.to(tl.float64) * tl.load(table).to(tl.float64, bitcast=True)).to(tl.float32)
    grows = due & ~_tables.not_finite(grown)
    ceiling = tl.load(table + 4).to(tl.float64, bitcast=True).to(tl.float32)
    reduced = (before.to(tl.float64) * tl.load(table + 1).to(tl.float64, bitcast=True)).to(tl.float32)
    floor = tl.load(table + 3).to(tl.float64, bitcast=True).to(tl.float32)
    yields = overflow & (tolerated - 1 <= 0)

    after = tl.where(grows, tl.where(grown < ceiling, grown, ceiling), before)
    tl.store(scale, tl.where(yields, tl.where(reduced > floor, reduced, floor), after))
    tl.store(growth_tracker, tl.where(overflow | due, 0, streak))
    refilled = tl.where(grows | (tl.load(table + 6) != 0), tl.load(table + 5).to(tl.int32), tolerated)
    tl.store(hysteresis_tracker, tl.where(overflow, tolerated - 1, refilled))
    if skipped_steps is not None:
        tl.store(skipped_steps, tl.load(skipped_steps) + overflow.to(tl.int64))
    if consecutive_skips is not None:
        tl.store(consecutive_skips, tl.where(overflow, tl.load(consecutive_skips) + 1, 0))


def update_scale_(
    scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    hysteresis_tracker: torch.Tensor,
    found_infs: list[torch.Tensor],
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float,
    max_scale: float,
    hysteresis: int,
    consecutive: bool = False,
    skipped_steps: torch.Tensor | None = None,
    consecutive_skips: torch.Tensor | None = None,
) -> None:
    """``amp_kernels::update_scale_`` for tensors that Triton can reach; see ``amp_kernels/_raw/update_scale.py``."""
    bits = _tables.bits
    factors, bounds = (bits(growth_factor), bits(backoff_factor)), (bits(min_scale), bits(max_scale))
    row = (*factors, growth_interval, *bounds, hysteresis, int(consecutive), *(f.data_ptr() for f in found_infs))
    with _tables.on(scale.device):
        update_scale_kernel[(1,)](
            _tables.upload((row,), scale.device),
            len(found_infs),
            scale,
            growth_tracker,
            hysteresis_tracker,
            skipped_steps,
            consecutive_skips,
            BLOCK=BLOCK,
            num_warps=1,
        )
