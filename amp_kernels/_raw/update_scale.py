"""The next loss scale, decided on the device from what the optimizers' checks found: one iteration, in place, without a host sync.

An overflow (any of ``found_infs`` positive; flags are never added up) resets ``growth_tracker``, int32, and takes one from
``hysteresis_tracker``, int32; once that is at or below zero, ``scale = max(scale * backoff_factor, min_scale)``. Otherwise the growth
tracker counts up, and when it reaches ``growth_interval`` it restarts (0: never); unless ``scale * growth_factor`` overflows, the scale
becomes ``min(scale * growth_factor, max_scale)`` and the hysteresis tracker is refilled with ``hysteresis``. Without bounds and with a
hysteresis of 1 that is exactly :class:`torch.amp.GradScaler`'s rule; the floor and the hysteresis are Megatron-LM's, ``consecutive``,
with which every iteration without overflow refills, is DeepSpeed's ``consecutive_hysteresis``. ``skipped_steps`` and
``consecutive_skips``, int64, count the iterations with an overflow, in all and the last ones in a row.

The numbers are those of :class:`amp_kernels.GradScaler`, which checks them where they are set.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .._checks import lists
from .._dispatch.library import Sample, define

#: The least and the most; the tracker is int32.
HYSTERESIS = 1, 2**31 - 1


def _reference(
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
    consecutive: bool = False,
    skipped_steps: Tensor | None = None,
    consecutive_skips: Tensor | None = None,
) -> None:
    lists.check_number("update_scale_", "hysteresis", hysteresis, *HYSTERESIS)
    scalars = (scale, growth_tracker, hysteresis_tracker, skipped_steps, consecutive_skips)
    scale, growth_tracker, hysteresis_tracker, skipped_steps, consecutive_skips = (
        t if t is None else t.reshape(()) for t in scalars
    )
    found = torch.stack([scale.new_zeros((), dtype=torch.bool), *(f.reshape(()) > 0 for f in found_infs)]).any()
    tolerated = hysteresis_tracker - 1  # overflows left before the scale yields, once this one is counted
    backed_off = (scale.double() * backoff_factor).float()
    low, high = map(lists.within_float32, (min_scale, max_scale))
    backed_off = torch.where(backed_off > low, backed_off, low)
    after_overflow = torch.where(tolerated <= 0, backed_off, scale)

    streak = growth_tracker + 1
    due = streak.long() == growth_interval
    grown = (scale.double() * growth_factor).float()
    after_success = torch.where(due & grown.isfinite(), torch.where(grown < high, grown, high), scale)

    scale.copy_(torch.where(found, after_overflow, after_success))
    growth_tracker.copy_(torch.where(found | due, torch.zeros_like(streak), streak))
    refills = torch.full_like(due, True) if consecutive else due & grown.isfinite()
    refilled = torch.where(refills, torch.full_like(tolerated, hysteresis), hysteresis_tracker)
    hysteresis_tracker.copy_(torch.where(found, tolerated, refilled))
    if skipped_steps is not None:
        skipped_steps.add_(found)
    if consecutive_skips is not None:
        consecutive_skips.add_(1).mul_(found)


def samples(device: str) -> Iterator[Sample]:
    def call(scale, tracker, left, found, interval=2, low=0.0, high=math.inf, hysteresis=1, **options) -> Sample:
        scalars = (
            torch.tensor(scale, device=device),
            torch.tensor(tracker, dtype=torch.int32, device=device),
            torch.tensor(left, dtype=torch.int32, device=device),
        )
        return (
            *scalars,
            [torch.tensor(f, device=device) for f in found],
            2.0,
            0.5,
            interval,
            low,
            high,
            hysteresis,
        ), options

    yield call(1024.0, 0, 1, [0.0])
    yield call(1024.0, 1, 1, [0.0, 0.0])  # grows
    yield call(1024.0, 1, 1, [0.0, 1.0])  # backs off
    yield call(1024.0, 1, 1, [2.0])  # flags of two devices, summed
    yield call(3e38, 1, 1, [0.0])  # growth would overflow
    yield call(1024.0, 5, 1, [0.0], interval=0)  # interval 0 never grows
    yield call(1.0, 0, 1, [1.0], low=1.0)  # at the floor
    yield call(1024.0, 1, 0, [0.0], high=1500.0, hysteresis=3)  # at the ceiling, hysteresis refilled
    yield call(1024.0, 1, 3, [1.0], hysteresis=3)  # tolerated
    yield call(1024.0, 1, 1, [1.0], hysteresis=3)  # the last straw
    yield call(1024.0, 0, 1, [0.0], hysteresis=3)  # not refilled
    yield call(1024.0, 0, 1, [0.0], hysteresis=3, consecutive=True)  # refilled without growth
    yield call(1024.0, 1, 1, [0.0] * 256 + [1.0])  # more flags than a launch takes
    for found in (0.0, 1.0):
        counters = (torch.tensor(n, device=device) for n in (7, 2))
        yield call(1024.0, 0, 1, [found], **dict(zip(("skipped_steps", "consecutive_skips"), counters, strict=True)))


op = define(
    "update_scale_(Tensor(a!) scale, Tensor(b!) growth_tracker, Tensor(c!) hysteresis_tracker, Tensor[] found_infs, "
    "float growth_factor, float backoff_factor, int growth_interval, float min_scale, float max_scale, "
    "int hysteresis, bool consecutive=False, Tensor(d!)? skipped_steps=None, Tensor(e!)? consecutive_skips=None) -> ()",
    _reference,
    samples=samples,
)
