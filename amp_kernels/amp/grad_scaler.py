"""torch's gradient scaler without its host sync, with clipping in the same read, and with bounds on the scale.

With an optimizer of this package, one read of the gradients gives the non-finite flag and the norm, and one pass updates; both
decisions stay on the device, and gradients are not written. torch's fused optimizers get the same check and torch's protocol
(attributes ``grad_scale`` and ``found_inf``). For other optimizers, gradients are unscaled in place, with one ``.item()``.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from .._checks import lists
from .._dispatch.compiled import one_op
from .._dispatch.devices import Copies, at, by_device, largest_flag
from .._dispatch.switch import is_enabled
from .._raw.check_and_norm import check_and_norm
from .._raw.unscale import unscale_
from .._raw.update_scale import update_scale_
from .._sharding.zero import inner_optimizer
from ..optim._base import FusedOptimizer
from ._abandoned import AbandonedIterations
from ._ranks import TogetherWithRanks, has_foreign, local_grads
from ._skips import SkipTracking, stepped_flags
from .clip import clip

_CLOSURE = "Closure use is not currently supported if GradScaler is enabled."


class GradScaler(TogetherWithRanks, SkipTracking, AbandonedIterations):
    """A :class:`torch.amp.GradScaler` that never waits for the device, and clips without another pass.

    It has torch's documented behaviour, including checkpoints, with these intended differences:

    - Optimizers of this package and fused ones of torch step without a host sync and without a separate unscaling pass. This
      package's leave ``.grad`` scaled (see their ``unscale_grads``). torch's unscale it in a step that they take, and leave it
      scaled in a skipped one.
    - The *unscaled* value is tested for finiteness. (torch tests the scaled one and accepts ``1e30 / 2**-30``.)
    - Flags of devices and optimizers are combined by their maximum. (torch adds them, and its fused optimizers treat 2.0 as "no
      overflow".)
    - A fused optimizer without gradients counts as checked and finite. A closure is an error in any position. :meth:`update` also
      accepts an integer scale.

    Args:
        device: device type, as in torch.
        init_scale: initial scale, above 0 and not below ``min_scale``.
        growth_factor: above 1; multiplies the scale after ``growth_interval`` iterations without overflow.
        backoff_factor: below 1; multiplies the scale after an overflow.
        growth_interval: number of iterations.
        enabled: ``False`` makes every method a no-op, except that :meth:`step` steps (and clips with ``max_norm``). It is also
            disabled while the package is switched off (:func:`amp_kernels.set_enabled`).
        min_scale: lower limit of the scale.
        max_scale: upper limit of the scale.
        hysteresis: back off only after this many overflows since the scale last grew; 1 is torch's rule. Megatron-LM uses 2.
        consecutive_hysteresis: count only consecutive overflows, as DeepSpeed's option of this name.
        dynamic: ``False`` keeps the scale fixed; an overflow still skips the step.
        max_consecutive_skips: stop training after this many consecutive skipped steps: :meth:`update` raises a ``RuntimeError``
            that names the tensors with non-finite gradients in the last of them. On the CPU the ``update`` of the last skipped
            step raises; on a GPU a later one, usually the next, because the flag is read back asynchronously. Until a step is
            taken, every further skip raises again. Not part of the checkpoint. It costs a flag per tensor and, with optimizers
            of other packages, one more read of the gradients.
        shard_group: for optimizers of other packages: the ranks that hold different parameters of one model without DTensors,
            such as the process group of FSDP1. This package's optimizers have their own option ``shard_group``.

    Raises:
        AssertionError: a factor is out of range, as in torch.
        ValueError: another number is out of range or NaN.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer, scaler = ak.optim.SGD([weight], lr=0.5), ak.GradScaler("cpu")
        >>> for slope in (4.0, torch.inf):  # the second one overflows
        ...     optimizer.zero_grad()
        ...     scaler.scale(weight * slope).backward()
        ...     scaler.step(optimizer, max_norm=1.0)
        ...     scaler.update()
        ...     print(f"{weight.item():.2f}", scaler.last_grad_norm, scaler.last_step_skipped)
        0.50 tensor(4.) False
        0.50 tensor(inf) True
        >>> scaler.get_scale()  # it was 65536
        32768.0
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = 0.0,
        max_scale: float = math.inf,
        hysteresis: int = 1,
        consecutive_hysteresis: bool = False,
        dynamic: bool = True,
        max_consecutive_skips: int | None = None,
        shard_group: ProcessGroup | None = None,
    ) -> None:
        enabled = enabled and is_enabled()
        # Set these even when disabled, so that torch's getters work.
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        self._growth_interval = growth_interval
        check = lists.check_number
        if enabled:  # torch's own checks accept NaN in some versions and fail without a message in others
            check("GradScaler", "growth_factor", growth_factor)
            check("GradScaler", "backoff_factor", backoff_factor)
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        check("GradScaler", "min_scale", min_scale, 0.0)
        if self._enabled:  # a scale below min_scale would rise with the first overflow
            check("GradScaler", "init_scale", init_scale, max(min_scale, math.ulp(0.0)))
            check("GradScaler", "backoff_factor", backoff_factor, math.ulp(0.0))
            check("GradScaler", "growth_interval", growth_interval, 0)
        check("GradScaler", "max_scale", max_scale, min_scale)
        check("GradScaler", "hysteresis", hysteresis, 1)
        self._min_scale, self._max_scale, self._hysteresis, self._dynamic = min_scale, max_scale, hysteresis, dynamic
        self._init_hysteresis_tracker, self._consecutive_hysteresis = hysteresis, bool(consecutive_hysteresis)
        self._hysteresis_tracker: Tensor | None = None
        self._init_skips(max_consecutive_skips)
        self._shard_group = shard_group
        self._last_sum_sq: Tensor | None = None
        self._last_norm: Tensor | None = None

    # ---- what happened, without a sync ----

    @property
    @torch._disable_dynamo  # a compiled graph would read it before it ran the step
    def last_grad_norm(self) -> Tensor | None:
        """L2 norm of the unscaled gradients before clipping in the last :meth:`step`: float32, 0-dim, on the device.

        ``None`` if that step computed no norm: without ``max_norm``, only optimizers of this package compute it, and only if the
        gradients were not unscaled before. Infinite or NaN after an overflow.
        """
        return self._last_norm if self._last_sum_sq is None else self._last_sum_sq.sqrt()

    # ---- the iteration ----

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._hysteresis_tracker = torch.full((), self._init_hysteresis_tracker, dtype=torch.int32, device=dev)
        self._create_skip_counters(dev)

    @one_op()
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale in place and check them: one launch per device, no host sync.

        Raises:
            RuntimeError: called twice since :meth:`update`, or after :meth:`step`.
            ValueError: a gradient is float16; dividing it in place could underflow. With an optimizer of this package,
                ``step(optimizer, max_norm=...)`` clips such gradients without unscaling them in place.
            AssertionError: ``scale`` was not called before.
        """
        if self._enabled:
            self._record(optimizer)
        super().unscale_(optimizer)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not allow_fp16 and any(grad.dtype == torch.float16 for grad in grads):
            raise ValueError(
                "Attempting to unscale FP16 gradients. With an optimizer of amp_kernels call step(optimizer, "
                "max_norm=...) instead of unscale_ and clipping; with another one keep its parameters in float32."
            )
        if has_foreign(grads):
            flags = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
            self._note_nonfinite(optimizer, None)
            return flags
        agreement = self._agreement(optimizer)
        inverse, flags = Copies(inv_scale), Copies(found_inf)
        with torch.no_grad():
            for device, tensors in by_device(local_grads(optimizer)).items():
                dense = [tensor if lists.is_dense(tensor) else tensor.contiguous() for tensor in tensors]
                unscale_(dense, flags.get(device), inverse.get(device))
                for tensor, copy in zip(tensors, dense, strict=True):
                    if copy is not tensor:
                        tensor.copy_(copy)
        self._note_nonfinite(optimizer, None)
        return self._agreed(agreement, flags._per_device_tensors)

    @one_op("max_norm")
    def step(self, optimizer: Optimizer, *args: Any, max_norm: float | None = None, **kwargs: Any) -> Any:
        """Step the optimizer if its gradients are finite, clipping them first with ``max_norm``.

        Args:
            optimizer: any optimizer whose gradients have this scaler's scale.
            args, kwargs: arguments of ``optimizer.step``.
            max_norm: clip the total L2 norm of the unscaled gradients to this value, like
                :func:`torch.nn.utils.clip_grad_norm_`. An optimizer of this package clips inside its update and does not write
                ``.grad``; others unscale, clip, and step. Also applies when the scaler is disabled and when the gradients are
                already unscaled.

        Returns:
            The result of ``optimizer.step``; ``None`` if the host skipped it.

        Raises:
            RuntimeError: called twice since :meth:`update`, or with a closure.
            AssertionError: ``scale`` was not called before, or (optimizers that are not fused) no parameter has a
                gradient.
            ValueError: ``max_norm`` is negative or NaN, or gradients of an optimizer that is not fused are float16.
        """
        if max_norm is not None:
            lists.check_number("GradScaler.step", "max_norm", max_norm, 0.0)
        if self._enabled:
            if "closure" in kwargs or any(callable(arg) for arg in args):
                raise RuntimeError(_CLOSURE)
            self._check_scale_growth_tracker("step")
            if self._record(optimizer)["stage"] is OptState.STEPPED:
                raise RuntimeError("step() has already been called since the last update().")
        self._last_sum_sq = self._last_norm = None
        inner = inner_optimizer(optimizer)
        if isinstance(inner, FusedOptimizer):
            return self._step_ours(optimizer, inner, max_norm, args, kwargs)
        if max_norm is not None:
            if self._enabled and self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
                self.unscale_(optimizer)
            params = [p for group in optimizer.param_groups for p in group["params"]]
            agreement = self._agreement(optimizer)
            self._last_norm = (
                clip(params, agreement, max_norm) if agreement else torch.nn.utils.clip_grad_norm_(params, max_norm)
            )
        takes_scale = self._enabled and getattr(optimizer, "_step_supports_amp_scaling", False)
        if takes_scale and "grad_scaler" not in inspect.signature(optimizer.step).parameters:
            return self._step_fused(optimizer, args, kwargs)
        return super().step(optimizer, *args, **kwargs)  # the old protocol, or none

    def _step_ours(
        self, optimizer: Optimizer, inner: FusedOptimizer, max_norm: float | None, args: tuple, kwargs: dict
    ) -> Any:
        """Step ``inner``, which is ``optimizer`` or wrapped by it. It writes its findings into the request."""
        if inner.shard_group is None and (inner is not optimizer or self._shard_group is not None):
            raise ValueError(
                f"GradScaler.step: {type(inner).__name__} has no shard_group, so that each rank would clip and skip by its "
                "own parameters; accepted: the option shard_group=... of the optimizer"
            )
        request = inner.default_request()
        request.max_norm = max_norm
        state = self._per_optimizer_states[id(optimizer)] if self._enabled else None
        if state is not None and inner.unscale_grads and state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        ready = state is not None and state["stage"] is OptState.READY
        if ready:
            request.grad_scale = self._scale if request.grad_scale is None else self._scale * request.grad_scale
            request.check = True
            request.nonfinite = None if self._max_consecutive_skips is None else []
        elif state is not None:  # already unscaled and checked; the user may have changed gradients since
            request.found_inf = self._combined(state)
        inner._request = request
        try:
            result = optimizer.step(*args, **kwargs)
        finally:
            inner._request = None
            if self._enabled and "grad_scale" in inner.__dict__:
                del inner.grad_scale
        if state is not None:
            if ready:
                state["found_inf_per_device"] = request.found_infs or self._clean()
                self._nonfinite += [(inner, *flags) for flags in request.nonfinite or ()]
            self._together = inner._ranks or self._together
            state["stage"] = OptState.STEPPED
        self._last_sum_sq = request.sum_sq
        return result

    def _step_fused(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> Any:
        """torch's protocol for fused optimizers: scale and flag are attributes, and the device skips the step."""
        state = self._per_optimizer_states[id(optimizer)]
        preset = getattr(optimizer, "grad_scale", None)
        if state["stage"] is OptState.READY:
            preset = self._scale if preset is None else self._scale * preset
            self._check_inf_per_device(optimizer, preset)
        optimizer.grad_scale, optimizer.found_inf = preset, self._combined(state)
        try:
            result = optimizer.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf
        state["stage"] = OptState.STEPPED
        return result

    def _check_inf_per_device(
        self, optimizer: Optimizer, grad_scale: Tensor | None = None
    ) -> dict[torch.device, Tensor]:
        """Check the gradients divided by ``grad_scale``, without writing them as torch's method does."""
        self._check_scale_growth_tracker("_check_inf_per_device")
        grads = local_grads(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        self._note_nonfinite(optimizer, self._scale if grad_scale is None else grad_scale)
        if has_foreign(grads):
            return super()._check_inf_per_device(optimizer)
        agreement = self._agreement(optimizer)
        scales = Copies(self._scale if grad_scale is None else grad_scale)
        dense = [grad if lists.is_dense(grad) else grad.contiguous() for grad in grads]
        found = {device: check_and_norm(list_, scales.get(device))[1] for device, list_ in by_device(dense).items()}
        state["found_inf_per_device"] = self._agreed(agreement, found) or self._clean()
        return state["found_inf_per_device"]

    def _clean(self) -> dict[torch.device, Tensor]:
        """The flag of a check without gradients."""
        return {self._scale.device: torch.zeros((), dtype=torch.float32, device=self._scale.device)}

    def _combined(self, state: dict[str, Any]) -> Tensor:
        """The maximum (so 0 or 1) of the flags of all devices, on the scale's device."""
        return largest_flag((state["found_inf_per_device"] or self._clean()).values(), self._scale.device)

    @one_op("new_scale")
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """End the iteration: update the scale on the device from all checks, or set it to ``new_scale``.

        Args:
            new_scale: a number, or a tensor of one element without gradient on this scaler's device type, as in torch.

        Raises:
            AssertionError: nothing was checked since the last update, or ``new_scale`` is not accepted.
            ValueError: ``new_scale`` is not a positive number.
            RuntimeError: ``max_consecutive_skips`` consecutive steps were skipped. The scale was updated.
        """
        if not self._enabled:
            return
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        found_infs = [
            at(flag, scale.device)
            for state in self._per_optimizer_states.values()
            for flag in state["found_inf_per_device"].values()
        ]
        stepped = stepped_flags(self._per_optimizer_states, scale.device, OptState.STEPPED) if self._taken else {}
        if new_scale is not None:
            if not isinstance(new_scale, Tensor):
                lists.check_number("GradScaler.update", "new_scale", new_scale, math.ulp(0.0))
                new_scale = float(new_scale)
            elif new_scale.numel() == 1:
                new_scale = new_scale.reshape(())  # torch accepts shape [1] but fails to copy it
            super().update(new_scale)
        else:
            if not found_infs:
                raise AssertionError("No inf checks were recorded prior to update.")
            self._per_optimizer_states.clear()  # first, so that an interrupt does not leave half an iteration
            if self._dynamic:
                factors = self._growth_factor, self._backoff_factor, self._growth_interval
                rule = *factors, self._min_scale, self._max_scale, self._hysteresis, self._consecutive_hysteresis
                update_scale_(scale, growth_tracker, self._hysteresis_tracker, found_infs, *rule, *self._skip_counters)
        if found_infs:
            self._end_iteration(found_infs, stepped, counted=new_scale is None and self._dynamic)

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """torch's entries and those of this class, as numbers (host sync); torch's scaler loads it. Empty if disabled."""
        state = super().state_dict()
        if state:
            skipped, consecutive = self._skip_counts()
            state.update(
                min_scale=self._min_scale,
                max_scale=self._max_scale,
                hysteresis=self._hysteresis,
                consecutive_hysteresis=self._consecutive_hysteresis,
                _hysteresis_tracker=self._get_hysteresis_tracker(),
                _skipped_steps=skipped,
                _consecutive_skips=consecutive,
            )
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`, or torch's, which leaves the entries of this class unchanged.

        Raises:
            RuntimeError: the dict is empty, that is, from a disabled scaler.
        """
        super().load_state_dict(state_dict)
        if not self._enabled:
            return
        self._min_scale = state_dict.get("min_scale", self._min_scale)
        self._max_scale = state_dict.get("max_scale", self._max_scale)
        self._hysteresis = state_dict.get("hysteresis", self._hysteresis)
        self._consecutive_hysteresis = state_dict.get("consecutive_hysteresis", self._consecutive_hysteresis)
        self._init_hysteresis_tracker = state_dict.get("_hysteresis_tracker", self._hysteresis)
        self._init_skip_counts = (state_dict.get("_skipped_steps", 0), state_dict.get("_consecutive_skips", 0))
        self._forget()
        if self._scale is not None:
            self._hysteresis_tracker.fill_(self._init_hysteresis_tracker)
            self._fill_skip_counters()

    def _get_hysteresis_tracker(self) -> int:
        tracker = self._hysteresis_tracker
        return self._init_hysteresis_tracker if tracker is None else int(tracker.item())

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state["_last_sum_sq"] = state["_last_norm"] = None
        if self._enabled:
            state["_init_hysteresis_tracker"] = self._get_hysteresis_tracker()
            state["_hysteresis_tracker"] = None
        return state
