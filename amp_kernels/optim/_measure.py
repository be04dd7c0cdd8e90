"""The first pass of a step: one read of the gradients gives their norm and whether all are finite, over all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .._dispatch.devices import at, largest_flag
from .._raw.check_and_norm import of_table as check_and_norm_of_table
from .._raw.check_and_norm import op as check_and_norm
from .._sharding.agreement import Agreement
from .._sharding.local import local
from ._cached_step import Launch


class StepRequest(NamedTuple):
    """A step as a gradient scaler wants it. All tensors stay on their devices."""

    grad_scale: Tensor | None = None  # the gradients are scaled by it
    found_inf: Tensor | None = None  # the flag of an earlier check: skip if above 0
    check: bool = False  # check the gradients and skip if one is not finite
    max_norm: float | None = None  # clip to this norm; None: the optimizer's max_grad_norm
    per_tensor: bool = False  # also report which gradients are not finite


@dataclass
class StepAnswer:
    """The findings of a step, on their devices."""

    found_infs: dict[torch.device, Tensor] = field(default_factory=dict)  # by device, if the gradients were checked
    sum_sq: Tensor | None = None  # squared norm of the unscaled gradients, if it was computed
    nonfinite: list[tuple[list[Tensor], Tensor]] = field(
        default_factory=list
    )  # parameters, flag of each one's gradient
    agreement: Agreement | None = None  # the ranks that took the same decision


def measure(
    request: StepRequest, launches: list[Launch], agreement: Agreement, params: list[Tensor], norm: bool
) -> StepAnswer:
    """Read the gradients once if a check or the ``norm`` is wanted, and sum once over the ranks that share them.

    Args:
        params: all of the optimizer's.
        norm: whether the step clips.
    """
    answer = StepAnswer(agreement=agreement)
    if not (request.check or norm):
        return answer
    sum_sq, flags = None, {}
    for launch in launches:
        found, flags[launch.batch.device] = _check(request, launch, answer)
        sum_sq = found if sum_sq is None else sum_sq + at(found, sum_sq.device)
    if agreement:  # a rank without gradients takes part
        device = next(iter(flags)) if flags else home_device(agreement, params)
        zero = torch.zeros((), dtype=torch.float32, device=device)
        sum_sq, flag = agreement.reduce(
            zero if sum_sq is None else sum_sq, largest_flag([zero, *flags.values()], device)
        )
        flags = {device: flag}
    answer.sum_sq = sum_sq
    if request.check:
        answer.found_infs = flags
    return answer


def home_device(agreement: Agreement, params: list[Tensor]) -> torch.device:
    """The device for the numbers of a rank that has no gradient."""
    return local(params[0]).device if params else agreement.device


def _check(request: StepRequest, launch: Launch, answer: StepAnswer) -> tuple[Tensor, Tensor]:
    """The sum of squares that counts on this rank, and the flag, of one device's gradients."""
    batch, grads, table = launch
    scale, per_tensor = at(request.grad_scale, batch.device), request.check and request.per_tensor
    sums, flags = [], []
    counted, end = batch.counted, len(batch.params)
    for first, last in ((0, counted), (counted, end)) if 0 < counted < end else ((0, end),):
        if table is not None:
            rows = table.tensor if last - first == end else table.tensor[first:last]
            sum_sq, flag = check_and_norm_of_table(batch.nothing, rows, scale, per_tensor)
        else:
            sum_sq, flag = check_and_norm(grads[first:last], scale, per_tensor=per_tensor)
        if per_tensor:
            answer.nonfinite.append((batch.params[first:last], flag))
            sum_sq, flag = sum_sq.sum(dtype=torch.float64).float(), flag.amax()
        # NaN if a gradient that counts on another rank is not finite here.
        sums.append(sum_sq if first < counted else sum_sq * 0.0)
        flags.append(flag)
    return sums[0] if len(sums) == 1 else sums[0] + sums[1], largest_flag(flags, batch.device)
