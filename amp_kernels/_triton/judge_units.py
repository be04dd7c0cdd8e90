"""judge_units_ in Triton, one program a unit; the rule is csrc/gradients/judge.h."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _tables
from ._update_kernels import LEAVE

BLOCK = 64
RULE, STATISTIC = tl.constexpr(7), tl.constexpr(6)  # columns


@triton.jit
def judge_units_kernel(sums, flags, rows, ends, rules, statistics, found_infs, factors, results, BLOCK: tl.constexpr):
    unit, units = tl.program_id(0), tl.num_programs(0)
    begin, end = tl.load(ends + unit - 1, mask=unit > 0, other=0), tl.load(ends + unit)
    total = tl.zeros((BLOCK,), tl.float64)
    there, bad = tl.zeros((BLOCK,), tl.int1), tl.zeros((BLOCK,), tl.int1)
    for first in range(begin, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        entry = tl.load(rows + at, mask=at < end, other=0)
        row = tl.where(entry < 0, ~entry, entry)
        flag = tl.load(flags + row, mask=at < end, other=-1.0)
        there |= flag >= 0.0
        bad |= flag > 0.0
        counts = (entry >= 0) & (flag >= 0.0)
        total += tl.where(counts, tl.load(sums + row, mask=at < end, other=0.0).to(tl.float64), 0.0)
    sum_sq = tl.sum(total, 0).to(tl.float32)
    rule, own = rules + unit * RULE, statistics + unit * STATISTIC
    max_norm, zscore, decay = tl.load(rule), tl.load(rule + 2), tl.load(rule + 3)
    asked = (tl.max(there.to(tl.int32), 0) != 0) & (tl.load(rule + 6) != 0.0)
    nonfinite = tl.max(bad.to(tl.int32), 0) != 0
    found = nonfinite
    if found_infs is not None:
        found |= tl.load(found_infs + unit) > 0.0
    norm = tl.sqrt_rn(sum_sq)
    n = norm.to(tl.float64)

    seen, mean, variance = tl.load(own + 3), tl.load(own + 4), tl.load(own + 5)
    follows = asked & ~found & (zscore > 0.0) & (norm < float("inf"))
    warms = seen + 1.0 <= tl.load(rule + 4)
    d = n - mean
    warm_mean = mean + d / (seen + 1.0)
    warm_variance = variance + (d * (n - warm_mean) - variance) / (seen + 1.0)
    deviation = tl.sqrt(variance)
    z = tl.where(mean > 0.0, d / (deviation + 1e-6 * mean), 0.0)
    spike = follows & ~warms & (z > zscore)
    limit = tl.where(spike, mean + zscore * zscore * deviation / z, float("inf"))
    entered = tl.where(spike, mean + zscore * deviation, n)
    next_mean = decay * mean + (1.0 - decay) * entered
    from_mean = entered - next_mean
    next_variance = decay * variance + (1.0 - decay) * (from_mean * from_mean)

    skipped = asked & ((found & (tl.load(rule + 1) != 0.0)) | (spike & (tl.load(rule + 5) != 0.0)))
    taken = asked & ~skipped
    bound = tl.where((max_norm >= 0.0) & (max_norm < limit), max_norm, limit)
    ratio = tl.div_rn(bound.to(tl.float32), norm + 1e-6)
    clips = (max_norm >= 0.0) | (bound < float("inf"))
    factor = tl.where(clips, tl.where(ratio > 1.0, 1.0, ratio), 1.0)
    factor = tl.where(taken, factor, LEAVE)
    tl.store(own, tl.load(own) + tl.where(taken, 1.0, 0.0))
    tl.store(own + 1, tl.load(own + 1) + tl.where(skipped, 1.0, 0.0))
    in_a_row = tl.load(own + 2)
    tl.store(own + 2, tl.where(skipped, in_a_row + 1.0, tl.where(taken, 0.0, in_a_row)))
    tl.store(own + 3, seen + tl.where(follows, 1.0, 0.0))
    tl.store(own + 4, tl.where(follows, tl.where(warms, warm_mean, next_mean), mean))
    tl.store(own + 5, tl.where(follows, tl.where(warms, warm_variance, next_variance), variance))
    tl.store(results + unit, tl.where(asked, norm, 0.0))
    tl.store(results + units + unit, skipped.to(tl.float32))
    tl.store(results + 2 * units + unit, (asked & nonfinite).to(tl.float32))
    for first in range(begin, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        entry = tl.load(rows + at, mask=at < end, other=0)
        tl.store(factors + tl.where(entry < 0, ~entry, entry), tl.broadcast_to(factor, (BLOCK,)), mask=at < end)


def judge_units_(
    sums: torch.Tensor,
    flags: torch.Tensor,
    rows: torch.Tensor,
    ends: torch.Tensor,
    rules: torch.Tensor,
    statistics: torch.Tensor,
    found_infs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``amp_kernels::judge_units_`` for tensors that Triton can reach; see ``amp_kernels/_raw/judge_units.py``."""
    factors, units = torch.empty_like(sums), ends.numel()
    results = torch.empty(3, units, dtype=torch.float32, device=sums.device)
    if units:
        with _tables.on(sums.device):
            judge_units_kernel[(units,)](
                *(sums, flags, rows, ends, rules, statistics, found_infs, factors, results),
                BLOCK=BLOCK,
                num_warps=1,
                enable_fp_fusion=False,
            )
    return factors, results
