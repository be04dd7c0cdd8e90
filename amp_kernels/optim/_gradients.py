"""The gradients of a step: read, checked, and measured in the first of its two passes over memory."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .._checks import lists
from .._checks.types import type_name
from .._dispatch.devices import at, largest_flag
from .._raw.check_and_norm import of_table as check_and_norm_of_table
from .._raw.check_and_norm import op as check_and_norm
from .._sharding.agreement import Agreement
from .._sharding.local import is_dtensor, local, placed_as
from ._launches import Launch
from ._options import Options

logger = logging.getLogger("amp_kernels")


class GradientReader:
    """Reads the gradients of one optimizer; warns once if it has to copy them."""

    _warned = False

    def __init__(self, name: str, options: Options):
        self._name, self._options = name, options

    def read(self, param: Tensor, grad: Tensor, piece: Tensor) -> Tensor:
        """The gradient of a parameter as the kernels take it. ``piece`` is the parameter as they see it."""
        if piece is not param:
            grad = self._local(param, grad)
        usual = type(grad) is Tensor and grad.dtype in lists.KERNEL_DTYPES and grad.layout is torch.strided
        same = grad.shape == piece.shape and grad.stride() == piece.stride()
        return grad if usual and same else self._checked(piece, grad)

    def _local(self, param: Tensor, grad: Tensor) -> Tensor:
        """This rank's piece of the gradient of a DTensor, summed over ranks if that was left to do."""
        if not is_dtensor(grad):
            raise TypeError(f"{self._name}: the gradient of a DTensor has type {type_name(grad)}; accepted: a DTensor")
        return local(placed_as(grad, param))

    def _checked(self, param: Tensor, grad: Tensor) -> Tensor:
        """Refuse a gradient or copy it into its parameter's memory order."""
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"{self._name} does not support sparse gradients (layout {grad.layout}); "
                "use torch.optim.SparseAdam or torch.optim.SGD for these parameters"
            )
        if grad.dtype not in lists.KERNEL_DTYPES:
            raise TypeError(
                f"{self._name}: the gradient of a {param.dtype} parameter is {grad.dtype}; "
                f"accepted: {lists.names(lists.KERNEL_DTYPES)}"
            )
        if is_traceable_wrapper_subclass(grad):
            raise TypeError(f"{self._name}: a gradient has type {type_name(grad)}; accepted: plain tensors")
        if self._options.zero_grads and torch._debug_has_internal_overlap(grad) == 1:
            raise ValueError(
                f"{self._name}: a gradient is {lists.describe(grad)}, which overlaps itself; zero_grads=True cannot "
                "write it"
            )
        if grad.shape != param.shape:  # torch checks an assignment, but neither resize_() nor .data of a gradient
            raise ValueError(
                f"{self._name}: the gradient of a parameter of shape {list(param.shape)} has shape {list(grad.shape)}; "
                "accepted: the shape of the parameter"
            )
        if lists.same_order(param, grad):
            return grad
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s copies gradients whose strides differ from their parameter's, first %s for %s",
                self._name,
                lists.describe(grad),
                lists.describe(param),
            )
        return torch.empty_strided(param.shape, param.stride(), dtype=grad.dtype, device=grad.device).copy_(grad)


class StepRequest(NamedTuple):
    """A step as a gradient scaler wants it. All tensors stay on their devices."""

    grad_scale: Tensor | None = None  # the gradients are scaled by it
    found_inf: Tensor | None = None  # the flag of an earlier check: skip if above 0
    check: bool = False  # check the gradients and skip if one is not finite
    max_norm: float | None = None  # clip to this norm
    per_tensor: bool = False  # also report which gradients are not finite
    units: frozenset[int] | None = None  # of an optimizer with independent groups: step these alone


@dataclass
class StepAnswer:
    """The findings of a step, on their devices."""

    found_infs: dict[torch.device, Tensor] = field(default_factory=dict)  # by device, if the gradients were checked
    sum_sq: Tensor | None = None  # squared norm of the unscaled gradients, if it was computed
    nonfinite: list[tuple[list[Tensor], Tensor]] = field(
        default_factory=list
    )  # parameters, flag of each one's gradient
    agreement: Agreement | None = None  # the ranks that took the same decision


#: Of one gradient: sum of squares and flag, with the scale that it was unscaled by and that scale's version.
Measured = tuple[Tensor, Tensor, Tensor | None, int]


def measure_one(grad: Tensor, scale: Tensor | None) -> Measured:
    """Measure a gradient before it leaves its device."""
    return *check_and_norm([grad], at(scale, grad.device)), scale, 0 if scale is None else scale._version


def measure(
    request: StepRequest,
    launches: list[Launch],
    agreement: Agreement,
    params: list[Tensor],
    norm: bool,
    measured: dict[int, Measured],
) -> StepAnswer:
    """Read the gradients once if a check or the ``norm`` is wanted, and sum once over the ranks that share them. ``params`` are
    all of the optimizer's. ``measured``: what is known of gradients, by the parameter's id; of those with another scale nothing is."""
    answer = StepAnswer(agreement=agreement)
    if not (request.check or norm):
        return answer
    if measured:
        now = request.grad_scale, 0 if request.grad_scale is None else request.grad_scale._version
        measured = {key: found for key, found in measured.items() if found[2] is now[0] and found[3] == now[1]}
    sum_sq, flags = None, {}
    for device, of_device in by_device(launches).items():
        found, flags[device] = _check(request, device, of_device, answer, measured)
        sum_sq = found if sum_sq is None else sum_sq + at(found, sum_sq.device)
    if agreement:  # a rank without gradients takes part
        device = next(iter(flags)) if flags else home_device(agreement, params)
        device = home_device(agreement, params) if device.type == "cpu" else device  # gradients kept in host memory
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


def by_device(launches: list[Launch]) -> dict[torch.device, list[Launch]]:
    """The launches by the device of their gradients."""
    by_device: dict[torch.device, list[Launch]] = {}
    for launch in launches:
        device = launch.grads[0].device if launch.grads else launch.batch.device  # state in host memory: another one
        by_device.setdefault(device, []).append(launch)
    return by_device


def _check(
    request: StepRequest,
    device: torch.device,
    launches: list[Launch],
    answer: StepAnswer,
    measured: dict[int, Measured],
) -> tuple[Tensor, Tensor]:
    """The sum of squares that counts on this rank, and the flag, of one device's gradients."""
    nothing = launches[0].batch.nothing
    scale, per_tensor = at(request.grad_scale, device), request.check and request.per_tensor
    sums, flags = [], []
    for counts in (True, False):
        params, rows, grads = [], [], []
        for batch, found, table in launches:
            part = slice(0, batch.counted) if counts else slice(batch.counted, None)
            params += batch.params[part]
            grads += found[part]
            if table is not None:
                rows.append(table.tensor[part])
        if not params:
            continue
        if measured:
            own = [
                measured.get(id(param)) or check_and_norm([g], scale) for param, g in zip(params, grads, strict=True)
            ]
            sum_sq, flag = (_gathered([found[i] for found in own], device) for i in range(2))
        elif rows:
            rows = rows[0] if len(rows) == 1 else torch.cat(rows)
            sum_sq, flag = check_and_norm_of_table(nothing, rows, scale, per_tensor)
        else:
            sum_sq, flag = check_and_norm(grads, scale, per_tensor=per_tensor)
        if per_tensor:
            answer.nonfinite.append((params, flag))
        if per_tensor or measured:
            sum_sq, flag = sum_sq.sum(dtype=torch.float64).float(), flag.amax()
        # NaN if a gradient that counts on another rank is not finite here.
        sums.append(sum_sq if counts else sum_sq * 0.0)
        flags.append(flag)
    return sums[0] if len(sums) == 1 else sums[0] + sums[1], largest_flag(flags, device)


def _gathered(values: list[Tensor], device: torch.device) -> Tensor:
    """Scalars of several devices in a vector on one, with one copy from each."""
    places: dict[torch.device, list[int]] = {}
    for i, value in enumerate(values):
        places.setdefault(value.device, []).append(i)
    gathered = torch.empty(len(values), device=device)
    for own in places.values():
        gathered[own] = torch.stack([values[i] for i in own]).to(device)
    return gathered
