"""torch's gradient scaler without its host sync, with clipping in the same read, and with bounds on the scale.

With an optimizer of this package, one read of the gradients gives the non-finite flag and the norm, and one pass updates; both
decisions stay on the device, and gradients are not written. torch's fused optimizers get the same check and torch's protocol
(attributes ``grad_scale`` and ``found_inf``). For other optimizers, gradients are unscaled in place, with one ``.item()``.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.distributed import ProcessGroup
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from .._checks import lists
from .._checks.stack import users_line
from .._checks.types import check_device_type, check_mapping
from .._dispatch.compiled import CompiledHandle, HasCompiledCalls, compiled_call
from .._dispatch.devices import at, restorer
from .._dispatch.switch import is_enabled
from .._raw.update_scale import op as update_scale
from .._sharding.agreement import Agreement
from .._sharding.zero import inner_optimizer
from ..optim._base import FusedOptimizer
from ..optim._release import watch_scaled
from ._arguments import check_closure, check_optimizer, one_norm
from ._gradients import Agreements, check, has_foreign, local_grads, unscale
from ._records import clean, combined, record_of, stepped_flags, watch_backward
from ._scale_rule import CheckedSetters, ScaleRule, acceptable_scale, check_factors, check_state
from ._skips import SkipRecord
from .clip import clip

Outputs = TypeVar("Outputs")  # a tensor, or a list, tuple or iterable of tensors


class GradScaler(HasCompiledCalls, CheckedSetters):
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
            such as the process group of FSDP1. This package's optimizers have their own option ``shard_group``. Groups of either
            may have the key ``shard_group`` of :class:`amp_kernels.optim.MixedPrecision`.

    Raises:
        AssertionError: a factor is out of range, as in torch.
        ValueError: another number is out of range or NaN, or ``device`` names no device type.
        TypeError: ``device`` is not a string, or a number of iterations or overflows not a whole one.

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
        check_device_type("GradScaler", device)  # torch.cuda.amp.GradScaler begins with init_scale
        enabled = enabled and is_enabled()
        if enabled and device == "cuda" and torch.cuda.amp.common.amp_definitely_not_available():
            warnings.warn(
                "GradScaler: device is 'cuda' and CUDA is not available, so the scaler is disabled; accepted: "
                "GradScaler('cpu'), and enabled=False without this warning",
                stacklevel=users_line(),
            )
            enabled = False
        # Set these even when disabled, so that torch's getters work.
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        self._growth_interval = growth_interval
        if enabled:
            check_factors(growth_factor, backoff_factor)
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._rule = ScaleRule(min_scale, max_scale, hysteresis, consecutive_hysteresis, dynamic)
        if self._enabled:
            self._rule.check_torchs(init_scale, backoff_factor, growth_interval)
        self._skips, self._agreements = SkipRecord(max_consecutive_skips), Agreements(shard_group)
        self._compiled_handle = CompiledHandle(self)
        self._last_sum_sq = self._last_norm = None

    # ---- what happened, without a sync ----

    @property
    @torch._disable_dynamo  # a compiled graph would read it before it ran the step
    def last_grad_norm(self) -> Tensor | None:
        """L2 norm of the unscaled gradients before clipping in the last :meth:`step`: float32, 0-dim, on the device.

        ``None`` if that step computed no norm: without ``max_norm``, only optimizers of this package compute it, and only if the
        gradients were not unscaled before. Infinite or NaN after an overflow.
        """
        return self._last_norm if self._last_sum_sq is None else self._last_sum_sq.sqrt()

    @property
    @torch._disable_dynamo
    def last_step_skipped(self) -> bool | None:
        """True if an optimizer's step was skipped in the latest iteration whose flag has arrived on the host.

        Reading it never waits for the device. On the CPU, that is the iteration ended by the last ``update``. On a GPU the host
        runs ahead, and it is an earlier iteration; ``scaler.consecutive_skips > 0`` is the exact answer, as a tensor on the device.
        ``None`` before the first flag arrives. For an ``update`` in a CUDA graph, only :func:`amp_kernels.graph_step` reports it.
        """
        return self._skips.last_skipped()

    @property
    def skipped_steps(self) -> Tensor:
        """Number of iterations with a skipped step: int64, 0-dim, on the scale's device (the CPU before the first use)."""
        return self._skips.counter(0)

    @property
    def consecutive_skips(self) -> Tensor:
        """Number of consecutive skipped iterations up to now: int64, 0-dim, on the same device; 0 after a step was taken."""
        return self._skips.counter(1)

    # ---- the iteration ----

    def scale(self, outputs: Outputs) -> Outputs:
        """Multiply a tensor, or each tensor in an iterable, by the scale.

        Raises:
            ValueError: an output is neither.
        """
        if torch.compiler.is_compiling() and isinstance(outputs, Tensor):  # torch's method would cause a graph break
            if not self._enabled:
                return outputs
            if self._scale is not None and not self._per_optimizer_states:
                return outputs * at(self._scale, outputs.device)
        scaled = super().scale(outputs)
        if self._enabled:
            watch_backward(scaled, self._per_optimizer_states)
            watch_scaled(scaled, self._scale)
        return scaled

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._rule.create_tracker(dev)
        self._skips.create_counters(dev)

    def _written_tensors(self) -> list[Tensor]:
        return [t for t in (self._scale, self._growth_tracker, self._rule.tracker, self._skips.pair) if t is not None]

    def _agreement(self, optimizer: Optimizer) -> Agreement:
        agreement = self._agreements.over(optimizer)
        self._skips.joined_by(agreement)
        return agreement

    @compiled_call()
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale in place and check them: one launch per device, no host sync.

        Raises:
            RuntimeError: called twice since :meth:`update`, or after :meth:`step`.
            ValueError: a gradient is float16; dividing it in place could underflow. With an optimizer of this package,
                ``step(optimizer, max_norm=...)`` clips such gradients without unscaling them in place.
            AssertionError: ``scale`` was not called before.
            TypeError: ``optimizer`` is no optimizer.
        """
        if self._enabled:
            if not isinstance(optimizer, Optimizer):
                check_optimizer("unscale_", optimizer)
            record_of(self._per_optimizer_states, optimizer)
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
        else:
            flags = unscale(local_grads(optimizer), inv_scale, found_inf, self._agreement(optimizer))
        self._skips.find_nonfinite(optimizer, None)
        return flags

    @compiled_call("max_norm", "max_grad_norm")
    def step(
        self,
        optimizer: Optimizer,
        *args: Any,
        max_norm: float | None = None,
        max_grad_norm: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step the optimizer if its gradients are finite, clipping them first with ``max_norm``.

        Args:
            optimizer: any optimizer whose gradients have this scaler's scale.
            args, kwargs: arguments of ``optimizer.step``.
            max_norm: clip the total L2 norm of the unscaled gradients to this value, like
                :func:`torch.nn.utils.clip_grad_norm_`. An optimizer of this package clips inside its update and does not write
                ``.grad``; others unscale, clip, and step. Also applies when the scaler is disabled and when the gradients are
                already unscaled. An optimizer that has a ``max_grad_norm`` of its own is refused.
            max_grad_norm: the same by the name of the optimizers' option.

        Returns:
            The result of ``optimizer.step``; ``None`` if the host skipped it.

        Raises:
            RuntimeError: called twice since :meth:`update`, or with a closure.
            AssertionError: ``scale`` was not called before, or (optimizers that are not fused) no parameter has a
                gradient.
            ValueError: ``max_norm`` is negative or NaN, or given twice, here or in the optimizer; gradients of an optimizer that is
                not fused are float16; or parameters on a part of a mesh differ between its parts and their group has no
                ``shard_group``.
            TypeError: ``optimizer`` is no optimizer, or a number stands where ``optimizer.step`` takes a closure.
        """
        if not isinstance(optimizer, Optimizer):
            check_optimizer("step", optimizer)
        if args:
            check_closure(optimizer, args[0])
        if max_grad_norm is not None:
            max_norm = one_norm(max_norm, max_grad_norm)
        if max_norm is not None:
            lists.check_number("GradScaler.step", "max_norm", max_norm, 0.0)
        if self._enabled:
            if "closure" in kwargs or any(map(callable, args)):
                raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
            self._check_scale_growth_tracker("step")
            if record_of(self._per_optimizer_states, optimizer)["stage"] is OptState.STEPPED:
                raise RuntimeError("step() has already been called since the last update().")
        self._last_sum_sq = self._last_norm = None
        if isinstance(inner := inner_optimizer(optimizer), FusedOptimizer):
            return self._step_ours(optimizer, inner, max_norm, args, kwargs)
        if max_norm is not None:
            agreement = self._agreement(optimizer)
            agreement.settle("GradScaler.step")
            if self._enabled and self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
                self.unscale_(optimizer)
            params = [p for group in optimizer.param_groups for p in group["params"]]
            self._last_norm = (
                clip(params, agreement, max_norm, name="GradScaler.step")
                if agreement
                else clip_grad_norm_(params, max_norm)
            )
        takes_scale = self._enabled and getattr(optimizer, "_step_supports_amp_scaling", False)
        if takes_scale and "grad_scaler" not in inspect.signature(optimizer.step).parameters:
            return self._step_fused(optimizer, args, kwargs)
        return super().step(optimizer, *args, **kwargs)  # the old protocol, or none

    def _step_ours(
        self, optimizer: Optimizer, inner: FusedOptimizer, max_norm: float | None, args: tuple, kwargs: dict
    ) -> Any:
        """Step ``inner``, which is ``optimizer`` or wrapped by it. It writes its findings into the request."""
        self._agreements.check_declared(optimizer, inner)
        request = inner._default_request(max_norm)
        state = self._per_optimizer_states[id(optimizer)] if self._enabled else None
        if state is not None and inner.unscale_grads and state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        ready = state is not None and state["stage"] is OptState.READY
        if ready:
            request = request._replace(
                grad_scale=self._scale if request.grad_scale is None else self._scale * request.grad_scale,
                check=True,
                per_tensor=self._skips.limit is not None,
            )
        elif state is not None:  # unscaled; what was done to the gradients since then is the user's will: no new check
            request = request._replace(found_inf=combined(state, self._scale.device))
        try:
            result, answer = inner._step_on_request(request, lambda: optimizer.step(*args, **kwargs))
        finally:
            if self._enabled and "grad_scale" in inner.__dict__:
                del inner.grad_scale
        if state is not None:
            if ready:
                state["found_inf_per_device"] = answer.found_infs or clean(self._scale.device)
                if answer.nonfinite:
                    self._skips.add_nonfinite((inner, *flags) for flags in answer.nonfinite)
            self._skips.joined_by(answer.agreement)
            state["stage"] = OptState.STEPPED
        self._last_sum_sq = answer.sum_sq
        return result

    def _step_fused(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> Any:
        """torch's protocol for fused optimizers: scale and flag are attributes, and the device skips the step."""
        state = self._per_optimizer_states[id(optimizer)]
        preset = getattr(optimizer, "grad_scale", None)
        if state["stage"] is OptState.READY:
            preset = self._scale if preset is None else self._scale * preset
            self._check_inf_per_device(optimizer, preset)
        optimizer.grad_scale, optimizer.found_inf = preset, combined(state, self._scale.device)
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
        state, scale = self._per_optimizer_states[id(optimizer)], self._scale if grad_scale is None else grad_scale
        self._skips.find_nonfinite(optimizer, scale)
        if has_foreign(grads):
            return super()._check_inf_per_device(optimizer)
        state["found_inf_per_device"] = check(grads, scale, self._agreement(optimizer)) or clean(self._scale.device)
        return state["found_inf_per_device"]

    @compiled_call("new_scale")
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
        found_infs, device = [], scale.device
        for record in self._per_optimizer_states.values():
            for flag in record["found_inf_per_device"].values():
                found_infs.append(flag if flag.device == device else at(flag, device))
        stepped = stepped_flags(self._per_optimizer_states, scale.device) if self._skips.taken else {}
        if new_scale is not None:
            super().update(acceptable_scale(new_scale))
        else:
            if not found_infs:
                raise AssertionError(
                    "No inf checks were recorded prior to update. Call step(optimizer) or unscale_(optimizer) of this scaler first."
                )
            self._per_optimizer_states.clear()  # first: an interrupt must not leave half an iteration
            rule, factors = self._rule, (self._growth_factor, self._backoff_factor, self._growth_interval)
            if rule.dynamic:
                options = rule.min_scale, rule.max_scale, rule.hysteresis, rule.consecutive_hysteresis
                update_scale(scale, growth_tracker, rule.tracker, found_infs, *factors, *options, *self._skips.counters)
        if found_infs:
            self._skips.end_iteration(found_infs, stepped, new_scale is None and self._rule.dynamic, scale)

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """torch's entries and those of this class, as numbers (host sync); torch's scaler loads it. Empty if disabled."""
        if state := super().state_dict():
            skipped, consecutive = self._skips.counts()
            state |= {**self._rule.state_dict(), "_skipped_steps": skipped, "_consecutive_skips": consecutive}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`, or torch's, which leaves the entries of this class unchanged.

        Raises:
            RuntimeError: the dict is empty, that is, from a disabled scaler.
            TypeError, ValueError: the dict is the state of another object or no dict, or the scale or the growth interval is no
                number or out of range. Nothing was loaded.
        """
        check_mapping("GradScaler.load_state_dict", "state_dict", state_dict, "the state_dict of a gradient scaler")
        if self._enabled and state_dict:
            check_state(state_dict)
        super().load_state_dict(state_dict)
        if self._enabled:
            self._rule.load_state_dict(state_dict)
            self._skips.restart((state_dict.get("_skipped_steps", 0), state_dict.get("_consecutive_skips", 0)))

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__() | {"_last_sum_sq": None, "_last_norm": None}
        del state["_compiled_handle"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._compiled_handle = CompiledHandle(self)

    # For graph_step: copies everything that an iteration changes. Returns a function that restores it.
    def _snapshot(self) -> Callable[[], None]:
        restore_tensors, restore_skips = restorer(self._written_tensors()), self._skips.snapshot()
        records = dict(self._per_optimizer_states)

        def restore() -> None:
            restore_tensors()
            restore_skips()
            self._per_optimizer_states.clear()
            self._per_optimizer_states.update(records)

        return restore

    # For graph_step: reports an iteration that a graph has replayed.
    def _report_replay(self) -> None:
        if self._enabled:
            self._skips.report(self._scale, [])
