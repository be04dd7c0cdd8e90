"""What the fused optimizers have in common: state in blocks, the step protocol with a gradient scaler, checkpoints.

An optimizer of this package is ``class X(FusedOptimizer, torch.optim.X)``, or ``class X(FusedOptimizer)`` where torch
has none. Deriving from torch's class of the same name makes ``isinstance`` checks of training frameworks hold, and its
constructor supplies the validation, the group keys and the defaults; :class:`FusedOptimizer` comes first and replaces
everything that touches state.
"""

from __future__ import annotations

import logging
import numbers
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..ops import _lists
from ..ops._blocks import GRADS, MAXIMIZE, PARAMS
from ..ops.check_and_norm import op as check_and_norm
from ._checkpoint import BlockedState
from ._state import Block, Place, register_shadow, renew_shadow, signature

logger = logging.getLogger("amp_kernels")


@dataclass
class StepRequest:
    """How a gradient scaler wants the next step taken, and what the step found. All tensors stay on their devices."""

    grad_scale: Tensor | None = None  # scale the gradients still carry
    found_inf: Tensor | None = None  # a check already made: skip if above 0
    check: bool = False  # check the gradients and skip if one is not finite
    max_norm: float | None = None  # clip to this norm; None: the optimizer's max_grad_norm
    found_infs: dict[torch.device, Tensor] = field(default_factory=dict)  # answer: per device, if `check`
    sum_sq: Tensor | None = None  # answer: squared norm of the unscaled gradients, if it was computed


@dataclass
class _Batch:
    """The parameters of one device that take part in a step, as the update op wants them."""

    device: torch.device
    params: list[Tensor]
    blocks: list[Block]
    groups: list[int]  # of each block
    layout: Tensor
    shadows: list[tuple[Tensor, Tensor]]  # those params that have one, with it


class FusedOptimizer(BlockedState):
    """Base of the optimizers here; see the module's docstring. Subclasses name their moments and call their op."""

    # torch.amp.GradScaler then hands over grad_scale and found_inf without a sync. On the class, to survive pickling.
    _step_supports_amp_scaling = True
    _request: StepRequest | None = None

    def _update(self, batch: _Batch, grads: list[Tensor], tensors: tuple, max_norm: float) -> None:
        """Call the optimizer's op; ``tensors`` are its arguments ``(lrs, grad_scale, found_inf, sum_sq)``."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, and refuses what the kernels cannot update.

        Raises:
            TypeError: a parameter is not float16, bfloat16 or float32, or is a tensor subclass such as DTensor.
            ValueError: a hyper-parameter is out of range, NaN or unsupported, or torch's own reasons (a non-leaf
                tensor, ...).
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            if len(set(map(id, group["params"]))) != len(group["params"]):
                raise ValueError(f"{self._name}: a parameter appears twice in a group; one pass cannot update it twice")
            for i, param in enumerate(group["params"]):
                if param.dtype not in PARAMS:
                    raise TypeError(f"{self._name}: params[{i}] is {param.dtype}; accepted: {_lists.names(PARAMS)}")
                if param.layout is not torch.strided:
                    raise TypeError(
                        f"{self._name}: params[{i}] has layout {param.layout}; accepted: torch.strided (dense)"
                    )
                if is_traceable_wrapper_subclass(param):
                    raise TypeError(
                        f"{self._name}: params[{i}] is a {type(param).__name__}; accepted: plain tensors "
                        f"(torch.optim.{self._name}(fused=True) takes it, also under this package's GradScaler)"
                    )
            self._check_group(group)
        except Exception:
            self.param_groups.pop()
            raise
        group["fused"] = True

    # ---- state ----

    def _collect(self) -> list[tuple[_Batch, list[Tensor]]]:
        """Check every gradient, then make sure every parameter that has one also has state.

        The loop is the host time of a step: with nothing new it only compares.
        """
        active: list[tuple[int, Tensor, Place | None]] = []
        grads: list[Tensor] = []
        missing: list[tuple[dict, Tensor, dict]] = []
        places, state = self._places, self.state
        for index, group in enumerate(self.param_groups):
            for param in group["params"]:
                grad = param.grad
                if grad is None:
                    continue
                place, shown = places.get(id(param)), state.get(param)
                if place is None or place.state is not shown or place.signature != signature(param):
                    # New, or its state was replaced, or it was moved or converted: what is shown is taken over.
                    if place is not None and place.signature[0] != param.dtype and shown:
                        shown = {key: value for key, value in shown.items() if key != "remainder"}
                    missing.append((group, param, self._exported(param, shown) if shown else {}))
                usual = type(grad) is Tensor and grad.dtype in GRADS and grad.layout is torch.strided
                if not usual or grad.stride() != param.stride():
                    grad = self._checked_grad(param, grad)
                grads.append(grad)
                active.append((index, param, place))
        if missing:
            if any(param.is_cuda for _, param, _ in missing) and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"{self._name}: state would be created during CUDA graph capture, and each replay would reset it; "
                    "take one step with all gradients present before the capture"
                )
            self._commit(*self._pack(missing), self.state)
        key = [(index, place) for index, _, place in active]
        if missing or key != self._batches[0]:
            key = [(index, places[id(param)]) for index, param, _ in active]
            self._batches = (key, self._make_batches(key))
        batches = self._batches[1]
        if len(batches) == 1:
            return [(batches[0], grads)]
        by_device: dict[torch.device, list[Tensor]] = {batch.device: [] for batch in batches}
        for grad in grads:
            by_device[grad.device].append(grad)
        return [(batch, by_device[batch.device]) for batch in batches]

    def _checked_grad(self, param: Tensor, grad: Tensor) -> Tensor:
        """A gradient that is not plainly usable: refuse it, or bring it into its parameter's memory order."""
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"{self._name} does not support sparse gradients (layout {grad.layout}); "
                "use torch.optim.SparseAdam or torch.optim.SGD for these parameters"
            )
        if grad.dtype not in GRADS:
            raise TypeError(
                f"{self._name}: the gradient of a {param.dtype} parameter is {grad.dtype}; "
                f"accepted: {_lists.names(GRADS)}"
            )
        if is_traceable_wrapper_subclass(grad):
            raise TypeError(f"{self._name}: a gradient is a {type(grad).__name__}; accepted: plain tensors")
        if _lists.same_order(param, grad):
            return grad
        if not getattr(self, "_warned_strides", False):
            self._warned_strides = True
            logger.warning(
                "%s copies gradients whose strides differ from their parameter's, first %s for %s",
                self._name,
                _lists.describe(grad),
                _lists.describe(param),
            )
        return torch.empty_strided(param.shape, param.stride(), dtype=grad.dtype, device=grad.device).copy_(grad)

    def _make_batches(self, active: list[tuple[int, Place]]) -> list[_Batch]:
        batches: dict[torch.device, _Batch] = {}
        rows: dict[torch.device, list[tuple[int, int, int, int]]] = defaultdict(list)
        for index, place in active:
            param, block = place.param, place.block
            batch = batches.setdefault(param.device, _Batch(param.device, [], [], [], torch.empty(0), []))
            position = next((i for i, other in enumerate(batch.blocks) if other is block), len(batch.blocks))
            if position == len(batch.blocks):
                batch.blocks.append(block)
                batch.groups.append(index)
            batch.params.append(param)
            if block.shadow_views:
                batch.shadows.append((param, block.shadow_views[place.slot]))
            rows[param.device].append((position, place.offset, place.slot, index))
        for device, batch in batches.items():
            # On the CPU whatever torch.set_default_device says: the host reads it at each launch.
            batch.layout = torch.tensor(rows[device], dtype=torch.int64, device="cpu")
        return list(batches.values())

    # ---- the step ----

    @torch._disable_dynamo  # one op over all parameters: nothing for a compiler to fuse
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient, in one pass per device and without a host sync.

        Gradients are read, never written: after a step under a :class:`amp_kernels.GradScaler` they still carry the
        loss scale. With ``max_grad_norm`` they count as clipped. A step alone is never skipped, unless
        ``skip_nonfinite=True``.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            The closure's result, or ``None``.

        Raises:
            RuntimeError: a gradient is sparse.
            TypeError: a gradient is complex or an integer.
            ValueError: a hyper-parameter is NaN. Nothing has been changed when any of these is raised.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        request = self._request or self.default_request()
        self._check_numbers()
        work = self._collect()
        max_norm = self.max_grad_norm if request.max_norm is None else request.max_norm
        self._measure(request, work, max_norm)
        for batch, grads in work:
            tensors = (
                self._tensor_lrs(batch.device),
                _at(request.grad_scale, batch.device),
                largest_flag([request.found_inf, *request.found_infs.values()], batch.device),
                None if max_norm is None else _at(request.sum_sq, batch.device),
            )
            for param, view in batch.shadows:
                renew_shadow(param, view)
            self._update(batch, grads, tensors, 0.0 if max_norm is None else float(max_norm))
            for param, view in batch.shadows:
                register_shadow(param, view)
        return loss

    def default_request(self) -> StepRequest:
        """Without a scaler of this package: what torch's scaler left in attributes, and the optimizer's own options."""
        found_inf = getattr(self, "found_inf", None)
        if not isinstance(found_inf, Tensor):
            found_inf = None  # torch's scaler leaves the int 0 if there are no gradients
        return StepRequest(getattr(self, "grad_scale", None), found_inf, self.skip_nonfinite)

    def _measure(self, request: StepRequest, work: list[tuple[_Batch, list[Tensor]]], max_norm: float | None) -> None:
        """One read of the gradients, if anything asks for what it finds."""
        if not request.check and max_norm is None:
            return
        for batch, grads in work:
            sum_sq, found_inf = check_and_norm(grads, _at(request.grad_scale, batch.device))
            if request.check:
                request.found_infs[batch.device] = found_inf
            request.sum_sq = sum_sq if request.sum_sq is None else request.sum_sq + _at(sum_sq, request.sum_sq.device)

    def _check_numbers(self) -> None:
        """Schedulers write into groups; a NaN that got in there must not reach the weights."""
        for group in self.param_groups:
            for key, value in group.items():
                for number in value if isinstance(value, tuple) else (value,):
                    if isinstance(number, numbers.Real) and number != number:  # NumPy's floats are Real too
                        raise ValueError(f"{self._name}: {key} is {value}")

    def _tensor_lrs(self, device: torch.device) -> list[Tensor]:
        """One device scalar per group if any group's learning rate is a tensor, else nothing."""
        rates = [group["lr"] for group in self.param_groups]
        if not any(isinstance(rate, Tensor) for rate in rates):
            return []
        return [
            rate.to(device, torch.float32, non_blocking=True).reshape(())
            if isinstance(rate, Tensor)
            else torch.full((), rate, dtype=torch.float32, device=device)
            for rate in rates
        ]

    def _host_lrs(self) -> list[float]:
        return [0.0 if isinstance(group["lr"], Tensor) else float(group["lr"]) for group in self.param_groups]

    def _numbers(self, key: str) -> list[float]:
        return [float(group[key]) for group in self.param_groups]

    def _betas(self) -> tuple[list[float], list[float]]:
        """The first and the second decay rate of each group."""
        return tuple([float(group["betas"][k]) for group in self.param_groups] for k in range(2))

    def _flags(self) -> list[int]:
        return [MAXIMIZE if group["maximize"] else 0 for group in self.param_groups]


def _at(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device, non_blocking=True)


def largest_flag(flags: Iterable[Tensor | None], device: torch.device) -> Tensor | None:
    """One flag out of several, on ``device``. Their maximum and not their sum, so that it stays 0 or 1."""
    moved = [flag.to(device, non_blocking=True).reshape(()) for flag in flags if flag is not None]
    return None if not moved else moved[0] if len(moved) == 1 else torch.stack(moved).amax()
