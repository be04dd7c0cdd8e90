"""The first pass of a step: one read of the gradients tells their norm and whether all are finite, on all ranks together."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .._dispatch.devices import at, largest_flag
from .._dispatch.walks import identical
from .._raw.check_and_norm import of_table as check_and_norm_of_table
from .._raw.check_and_norm import op as check_and_norm
from .._sharding.agreement import Agreement
from .._sharding.local import local
from ._cached_step import Launch
from ._checkpoint import BlockedState


@dataclass
class StepRequest:
    """How a gradient scaler wants the next step taken, and what the step found. All tensors stay on their devices."""

    grad_scale: Tensor | None = None  # scale the gradients still carry
    found_inf: Tensor | None = None  # a check already made: skip if above 0
    check: bool = False  # check the gradients and skip if one is not finite
    max_norm: float | None = None  # clip to this norm; None: the optimizer's max_grad_norm
    found_infs: dict[torch.device, Tensor] = field(default_factory=dict)  # answer: per device, if `check`
    sum_sq: Tensor | None = None  # answer: squared norm of the unscaled gradients, if it was computed
    nonfinite: list[tuple[list[Tensor], Tensor]] | None = (
        None  # if a list, answer: parameters, flag of each one's gradient
    )


class MeasuredStep(BlockedState):
    """The part of :class:`~amp_kernels.optim._base.FusedOptimizer` that knows what is found before an update."""

    _ranks: Agreement | None = None  # with whom to agree on norms and skips,
    _shared: list[Tensor] | None = None  # over these parameters

    def _agreement(self) -> Agreement:
        """With whom to agree on norms and skips; made anew when parameters were added."""
        params = self._params()
        if self._shared is None or not identical(params, self._shared):
            self._shared, self._ranks = params, Agreement(params, self.shard_group)
        return self._ranks

    def _measure(self, request: StepRequest, launches: list[Launch], max_norm: float | None) -> None:
        """One read of the gradients, if anything asks for what it finds, and one sum over the ranks that share them."""
        if not request.check and max_norm is None:
            return
        agreement = self._ranks
        agreement.check(self._name)
        sum_sq, flags = None, {}
        for launch in launches:
            found, flags[launch.batch.device] = self._check(request, launch)
            sum_sq = found if sum_sq is None else sum_sq + at(found, sum_sq.device)
        if agreement:  # a rank without gradients takes part
            device = next(iter(flags)) if flags else self._device(agreement)
            zero = torch.zeros((), dtype=torch.float32, device=device)
            sum_sq, flag = agreement.reduce(
                zero if sum_sq is None else sum_sq, largest_flag([zero, *flags.values()], device)
            )
            flags = {device: flag}
        request.sum_sq = sum_sq
        if request.check:
            request.found_infs.update(flags)

    def _check(self, request: StepRequest, launch: Launch) -> tuple[Tensor, Tensor]:
        """The sum of squares that counts on this rank, and the flag, of one device's gradients."""
        batch, grads, table = launch
        scale, per_tensor = at(request.grad_scale, batch.device), request.check and request.nonfinite is not None
        sums, flags = [], []
        counted, end = batch.counted, len(batch.params)
        for first, last in ((0, counted), (counted, end)) if 0 < counted < end else ((0, end),):
            if table is not None:
                rows = table.tensor if last - first == end else table.tensor[first:last]
                sum_sq, flag = check_and_norm_of_table(batch.nothing, rows, scale, per_tensor)
            else:
                sum_sq, flag = check_and_norm(grads[first:last], scale, per_tensor=per_tensor)
            if per_tensor:
                request.nonfinite.append((batch.params[first:last], flag))
                sum_sq, flag = sum_sq.sum(dtype=torch.float64).float(), flag.amax()
            sums.append(sum_sq if first < counted else sum_sq * 0.0)  # NaN if what counts elsewhere is not finite here
            flags.append(flag)
        return sums[0] if len(sums) == 1 else sums[0] + sums[1], largest_flag(flags, batch.device)

    def _device(self, agreement: Agreement) -> torch.device:
        """Where this rank's numbers are if it has no gradient."""
        params = self._params()
        return local(params[0]).device if params else agreement.device
