"""The decision about each unit of an optimizer on the device: the clip factor, or that everything stays; and its statistics.

A unit is parameter groups that clip, check and skip by themselves. The rule is csrc/gradients/judge.h.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._dispatch.library import Sample, define

#: The columns of ``rules`` and ``statistics``.
RULES = "max_norm", "check", "zscore", "decay", "warmup", "skips_spikes", "asked"
STATISTICS = "steps", "skips", "in_a_row", "seen", "mean", "variance"
LEAVE = 2.0  # in place of a clip factor


def _reference(
    sums: Tensor,
    flags: Tensor,
    rows: Tensor,
    ends: Tensor,
    rules: Tensor,
    statistics: Tensor,
    found_infs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    sums, flags, rows, ends = (t.view(-1) for t in (sums, flags, rows, ends))
    statistics = statistics.view(-1, len(STATISTICS))
    max_norm, check, zscore, decay, warmup, skips_spikes, asked = rules.view(-1, len(RULES)).unbind(1)
    steps, skips, in_a_row, seen, mean, variance = statistics.clone().unbind(1)
    entries = torch.arange(len(rows), device=rows.device)
    unit = (entries[:, None] >= ends).sum(1)
    row = torch.where(rows < 0, ~rows, rows)
    flag = flags[row]
    counts = (rows >= 0) & (flag >= 0)
    zeros = torch.zeros(len(ends), dtype=torch.float64, device=sums.device)
    sum_sq = zeros.index_add(0, unit, torch.where(counts, sums[row], 0.0).double()).float()
    asked = (asked != 0) & (zeros.index_add(0, unit, (flag >= 0).double()) > 0)
    nonfinite = zeros.index_add(0, unit, (flag > 0).double()) > 0
    found = nonfinite if found_infs is None else nonfinite | (found_infs.reshape(-1) > 0)
    norm = sum_sq.double().sqrt().float()

    follows = asked & ~found & (zscore > 0) & norm.isfinite()
    count, n = seen + 1, norm.double()
    warms = count <= warmup
    d = n - mean
    warm_mean = mean + d / count
    warm_variance = variance + (d * (n - warm_mean) - variance) / count
    deviation = variance.sqrt()
    z = torch.where(mean > 0, d / (deviation + 1e-6 * mean), 0.0)
    spike = follows & ~warms & (z > zscore)
    limit = torch.where(spike, mean + zscore * zscore * deviation / z, torch.inf)
    entered = torch.where(spike, mean + zscore * deviation, n)
    next_mean = decay * mean + (1 - decay) * entered
    next_variance = decay * variance + (1 - decay) * (entered - next_mean).square()

    skipped = asked & ((found & (check != 0)) | (spike & (skips_spikes != 0)))
    taken = asked & ~skipped
    bound = torch.where((max_norm >= 0) & (max_norm < limit), max_norm, limit)
    clips = (max_norm >= 0) | (bound < torch.inf)
    factor = torch.where(clips, (bound.float() / (norm + 1e-6)).clamp(max=1.0), 1.0)
    after = (
        steps + taken,
        skips + skipped,
        torch.where(skipped, in_a_row + 1, torch.where(taken, 0.0, in_a_row)),
        seen + follows,
        torch.where(follows, torch.where(warms, warm_mean, next_mean), mean),
        torch.where(follows, torch.where(warms, warm_variance, next_variance), variance),
    )
    statistics.copy_(torch.stack(after, 1))
    factors = torch.empty_like(sums)
    factors[row] = torch.where(taken, factor, LEAVE)[unit]
    return factors, torch.stack((torch.where(asked, norm, 0.0), skipped.float(), (asked & nonfinite).float()))


def samples(device: str) -> Iterator[Sample]:
    def call(units: list[list[tuple[float, float]]], rules: list[tuple[float, ...]], **more: list[float]) -> Sample:
        """``units``: of each the sums and flags of its tensors."""
        sums, flags = (torch.tensor([pair[i] for unit in units for pair in unit], device=device) for i in (0, 1))
        ends = torch.tensor([len(unit) for unit in units], device=device).cumsum(0)
        rows = torch.arange(len(sums), device=device).flip(0)
        rows[::5] = ~rows[::5]
        limits = torch.tensor([(*rule, 1.0)[: len(RULES)] for rule in rules], dtype=torch.float64, device=device)
        seen = torch.tensor([(7.0, 3.0, 2.0, 2.0 + 20.0 * (i % 3), 1.5, 0.0625) for i in range(len(units))])
        found = {key: torch.tensor(value, device=device) for key, value in more.items()}
        return (sums, flags, rows, ends, limits, seen.double().to(device)), found

    fine = [
        [(1.0, 0.0), (3.0, 0.0)],
        [],
        [(4.0, 0.0)] * 70,
        [(1e-30, 0.0), (25.0, -1.0)],
        [(torch.inf, 0.0), (2.0, 1.0)],
    ]
    clips, checks, ignores = (
        (0.5, 0.0, 0.0, 0.97, 25.0, 0.0),
        (-1.0, 1.0, 0.0, 0.97, 25.0, 0.0),
        (1.0, 0.0, 2.0, 0.5, 9.0, 0.0, 0.0),
    )
    follows, skips = (-1.0, 0.0, 2.5, 0.97, 25.0, 0.0), (3.0, 1.0, 2.5, 0.9, 4.0, 1.0)
    yield call(fine, [clips, checks, follows, skips, checks])
    yield call(fine, [skips, clips, ignores, follows, clips])
    yield call(fine, [follows, follows, skips, skips, follows], found_infs=[1.0, 0.0, 0.0, 0.0, 0.0])
    yield call(fine[:1], [checks])


op = define(
    "judge_units_(Tensor sums, Tensor flags, Tensor rows, Tensor ends, Tensor rules, Tensor(a!) statistics, "
    "Tensor? found_infs=None) -> (Tensor, Tensor)",
    _reference,
    samples=samples,
)


def judge_units_(
    sums: Tensor,
    flags: Tensor,
    rows: Tensor,
    ends: Tensor,
    rules: Tensor,
    statistics: Tensor,
    found_infs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Decide about every unit, without a host sync.

    A unit that was not asked for, or whose tensors have no gradients, keeps its statistics. A spike is a norm above the rule's band; it
    is clipped into the band or skipped, and enters the averages as the band's border.

    Args:
        sums, flags: float32 ``[n]``, by tensor: the sum of squares of its unscaled gradient; above 0 if it is not finite, below 0 if there
            is none.
        rows: int64 ``[n]``, the numbers of all tensors, unit after unit; ``~number`` where the square counts on another rank.
        ends: int64 ``[units]``, the end of each unit in ``rows``.
        rules: float64 ``[units, 7]``, columns :data:`RULES`: a ``max_norm`` below 0 and a ``zscore`` of 0 are none.
        statistics: float64 ``[units, 6]``, columns :data:`STATISTICS`; updated.
        found_infs: float32 ``[units]``, flags of an earlier check.

    Returns:
        ``(factors, results)``: float32 ``[n]``, by tensor the clip factor of its unit, or 2 if it stays as it is; float32
        ``[3, units]``, the norms, and 1 where the unit was skipped and where a gradient was not finite.
    """
    return op(sums, flags, rows, ends, rules, statistics, found_infs)
