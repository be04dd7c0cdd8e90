"""torch's gradient scaler without its host sync, with clipping in the same read, and with bounds on the scale.

With an optimizer of this package a step reads the gradients once for the non-finite flag and the norm, and updates in one pass.
Both decisions stay on the device, and the gradients are not rewritten. A fused optimizer of torch gets the same check, then
torch's own protocol (``grad_scale`` and ``found_inf`` attributes). For any other optimizer the gradients are unscaled in place, and
one ``.item()`` decides.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler as _GradScaler
from torch.amp.grad_scaler import OptState
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from .._checks import lists
from .._dispatch.compiled import CompiledHandle, HasCompiledCalls, compiled_call
from .._dispatch.devices import Copies, at, by_device, largest_flag
from .._dispatch.switch import is_enabled
from .._raw.check_and_norm import check_and_norm
from .._raw.unscale import unscale_
from .._raw.update_scale import update_scale_
from .._sharding.agreement import Agreement
from .._sharding.zero import inner_optimizer
from ..optim._base import FusedOptimizer
from ._abandoned import record_of, watch_backward
from ._ranks import Agreements, agreed, has_foreign, local_grads
from ._skips import SkipRecord, stepped_flags
from .clip import clip

Outputs = TypeVar("Outputs")  # a tensor, or a list, tuple or iterable of tensors


class GradScaler(HasCompiledCalls, _GradScaler):
    """A :class:`torch.amp.GradScaler` that never waits for the device, and clips without another pass.

    Everything torch documents holds, checkpoints included. What differs, on purpose:

    - an optimizer of this package or a fused one of torch is stepped without a host sync and without a pass that
      unscales gradients: one of this package leaves ``.grad`` scaled (see its ``unscale_grads``), torch's write it
      unscaled within a step that they take, and leave it scaled where they skip;
    - finiteness is tested on the *unscaled* value (torch tests the scaled one and lets ``1e30 / 2**-30`` through);
    - flags of devices and optimizers are combined by maximum (torch adds them up, and its fused optimizers take 2.0 for
      "no overflow");
    - a fused optimizer none of whose parameters has a gradient counts as checked and clean;
    - a closure is refused in any position, and :meth:`update` takes an integer scale too.

    Args:
        device: device type, as in torch.
        init_scale: first scale, above 0 and not below ``min_scale``.
        growth_factor: above 1; what the scale is multiplied by after ``growth_interval`` iterations without overflow.
        backoff_factor: below 1; what it is multiplied by after an overflow.
        growth_interval: in iterations.
        enabled: ``False`` makes every method a no-op, except that :meth:`step` steps (and clips, if asked to). So it is
            while the package is switched off (:func:`amp_kernels.set_enabled`).
        min_scale: the scale is not backed off below this.
        max_scale: nor grown above this.
        hysteresis: overflows, counted since the scale last grew, from which on it backs off; 1 is torch's rule.
            Megatron-LM uses 2.
        consecutive_hysteresis: count only overflows in a row: DeepSpeed's option of that name.
        dynamic: ``False`` keeps the scale fixed; an overflow still skips the step.
        max_consecutive_skips: abort training when so many steps in a row were skipped: :meth:`update` then raises
            a ``RuntimeError`` that names the tensors whose gradients were not finite in the last of them. On the CPU
            the last skipped step's own ``update`` does; on a GPU a later one, usually the next: the host does not wait
            to hear of it. Until a step is taken, every further skip raises again. Not part of the checkpoint. It costs
            a flag per tensor, and with optimizers that are not of this package one more read of the gradients.
        shard_group: for optimizers that are not of this package, the ranks on which they hold different parameters of one
            model, which no DTensor shows: the process group of FSDP1. Those of this package have it as an option of theirs.

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
        # Also present when disabled: torch's getters then work instead of failing for a missing attribute.
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        self._growth_interval = growth_interval
        check = lists.check_number
        if enabled:  # torch's own checks: some versions let NaN pass, some fail on it without a word
            check("GradScaler", "growth_factor", growth_factor)
            check("GradScaler", "backoff_factor", backoff_factor)
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        check("GradScaler", "min_scale", min_scale, 0.0)
        if self._enabled:  # a scale below its bound would rise with the first overflow
            check("GradScaler", "init_scale", init_scale, max(min_scale, math.ulp(0.0)))
            check("GradScaler", "backoff_factor", backoff_factor, math.ulp(0.0))
            check("GradScaler", "growth_interval", growth_interval, 0)
        check("GradScaler", "max_scale", max_scale, min_scale)
        check("GradScaler", "hysteresis", hysteresis, 1)
        self._min_scale, self._max_scale, self._hysteresis, self._dynamic = min_scale, max_scale, hysteresis, dynamic
        self._init_hysteresis_tracker, self._consecutive_hysteresis = hysteresis, bool(consecutive_hysteresis)
        self._hysteresis_tracker: Tensor | None = None
        self.skips, self._agreements = SkipRecord(max_consecutive_skips), Agreements(shard_group)
        self.compiled_handle = CompiledHandle(self)
        self._last_sum_sq: Tensor | None = None
        self._last_norm: Tensor | None = None

    # ---- what happened, without a sync ----

    @property
    @torch._disable_dynamo  # a program would read it before it ran the step
    def last_grad_norm(self) -> Tensor | None:
        """L2 norm of the unscaled gradients before clipping, as the last :meth:`step` measured it: float32, 0-dim, on the device.

        ``None`` if that step measured none: always so without ``max_norm`` unless the optimizer is one of this package
        and the gradients had not been unscaled before. Infinite or NaN after an overflow.
        """
        return self._last_norm if self._last_sum_sq is None else self._last_sum_sq.sqrt()

    @property
    @torch._disable_dynamo
    def last_step_skipped(self) -> bool | None:
        """Whether any optimizer's step was skipped in the latest iteration of which the host has heard.

        It never waits for the device. On the CPU that is the iteration which the last ``update`` ended. On a GPU it
        is an earlier one as long as the host runs ahead: at the time of an ``update``, that of the one before or still
        earlier; ``scaler.consecutive_skips > 0`` is the exact answer, as a tensor on the device. ``None`` before the
        first answer. An ``update`` in a CUDA graph is only reported by
        :func:`amp_kernels.graph_step`.
        """
        return self.skips.last_skipped()

    @property
    def skipped_steps(self) -> Tensor:
        """How many iterations had a skipped step, so far: int64, 0-dim, on the scale's device (the CPU before the first use)."""
        return self.skips.counter(0)

    @property
    def consecutive_skips(self) -> Tensor:
        """How many of these were the last ones in a row: int64, 0-dim, on the same device; 0 once a step was taken."""
        return self.skips.counter(1)

    # ---- the iteration ----

    def scale(self, outputs: Outputs) -> Outputs:
        """Multiply a tensor, or each in an iterable, by the scale.

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
        return scaled

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._hysteresis_tracker = torch.full((), self._init_hysteresis_tracker, dtype=torch.int32, device=dev)
        self.skips.create_counters(dev)

    def written_tensors(self) -> list[Tensor]:
        tensors = self._scale, self._growth_tracker, self._hysteresis_tracker, self.skips.pair
        return [tensor for tensor in tensors if tensor is not None]

    def _record(self, optimizer: Optimizer) -> dict[str, Any]:
        return record_of(self._per_optimizer_states, optimizer)

    def _agreement(self, optimizer: Optimizer) -> Agreement:
        agreement = self._agreements.over(optimizer)
        self.skips.joined_by(agreement)
        return agreement

    @compiled_call()
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale in place and check them: one launch per device, no host sync.

        Raises:
            RuntimeError: called twice since :meth:`update`, or after :meth:`step`.
            ValueError: a gradient is float16; dividing it in place could underflow. ``step(optimizer, max_norm=...)``
                clips such gradients, with an optimizer of this package, without unscaling them in place.
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
            self.skips.find_nonfinite(optimizer, None)
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
        self.skips.find_nonfinite(optimizer, None)
        return agreed(agreement, flags._per_device_tensors, self._scale.device)

    @compiled_call("max_norm")
    def step(self, optimizer: Optimizer, *args: Any, max_norm: float | None = None, **kwargs: Any) -> Any:
        """Step the optimizer unless its gradients are not finite, clipping them first if asked to.

        Args:
            optimizer: any optimizer whose gradients carry this scaler's scale.
            args, kwargs: for ``optimizer.step``.
            max_norm: clip the total L2 norm of the unscaled gradients to this, as
                :func:`torch.nn.utils.clip_grad_norm_` would. An optimizer of this package clips inside its update and
                leaves ``.grad`` alone; with others this is ``unscale_``, clip, step. Also in effect when the scaler is
                disabled and when the gradients have been unscaled already.

        Returns:
            What ``optimizer.step`` returns; ``None`` if a host-side skip happened.

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
                raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
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
        """Step ``optimizer``, which is ``inner`` or steps it; ``inner`` checks, clips and skips as requested."""
        if inner.shard_group is None and (inner is not optimizer or self._agreements.shard_group is not None):
            raise ValueError(
                f"GradScaler.step: {type(inner).__name__} has no shard_group, so that each rank would clip and skip by its "
                "own parameters; accepted: the option shard_group=... of the optimizer"
            )
        request = inner.default_request()._replace(max_norm=max_norm)
        state = self._per_optimizer_states[id(optimizer)] if self._enabled else None
        if state is not None and inner.unscale_grads and state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        ready = state is not None and state["stage"] is OptState.READY
        if ready:
            request = request._replace(
                grad_scale=self._scale if request.grad_scale is None else self._scale * request.grad_scale,
                check=True,
                per_tensor=self.skips.limit is not None,
            )
        elif state is not None:  # unscaled; what was done to the gradients since then is the user's will: no new check
            request = request._replace(found_inf=self._combined(state))
        try:
            result, answer = inner.step_on_request(request, lambda: optimizer.step(*args, **kwargs))
        finally:
            if self._enabled and "grad_scale" in inner.__dict__:
                del inner.grad_scale
        if state is not None:
            if ready:
                state["found_inf_per_device"] = answer.found_infs or self._clean()
                self.skips.add_nonfinite((inner, *flags) for flags in answer.nonfinite)
            self.skips.joined_by(answer.agreement)
            state["stage"] = OptState.STEPPED
        self._last_sum_sq = answer.sum_sq
        return result

    def _step_fused(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> Any:
        """torch's protocol for fused optimizers: they get scale and flag as attributes and skip on the device."""
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
        """Check without writing the gradients, which torch's does. ``grad_scale``: what they are to be divided by."""
        self._check_scale_growth_tracker("_check_inf_per_device")
        grads = local_grads(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        self.skips.find_nonfinite(optimizer, self._scale if grad_scale is None else grad_scale)
        if has_foreign(grads):
            return super()._check_inf_per_device(optimizer)
        agreement = self._agreement(optimizer)
        scales = Copies(self._scale if grad_scale is None else grad_scale)
        dense = [grad if lists.is_dense(grad) else grad.contiguous() for grad in grads]
        found = {device: check_and_norm(list_, scales.get(device))[1] for device, list_ in by_device(dense).items()}
        state["found_inf_per_device"] = agreed(agreement, found, self._scale.device) or self._clean()
        return state["found_inf_per_device"]

    def _clean(self) -> dict[torch.device, Tensor]:
        """The record of a check that had nothing to look at."""
        return {self._scale.device: torch.zeros((), dtype=torch.float32, device=self._scale.device)}

    def _combined(self, state: dict[str, Any]) -> Tensor:
        """One flag out of those of all devices, on the scale's device: their maximum, so that it stays 0 or 1."""
        return largest_flag((state["found_inf_per_device"] or self._clean()).values(), self._scale.device)

    @compiled_call("new_scale")
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """End the iteration: move the scale by what all checks found, on the device; or set it to ``new_scale``.

        Args:
            new_scale: a number, or a tensor of one element without gradient on this scaler's device type, as in torch.

        Raises:
            AssertionError: nothing was checked since the last update, or ``new_scale`` is not acceptable.
            ValueError: ``new_scale`` is not a positive number.
            RuntimeError: ``max_consecutive_skips`` steps in a row were skipped. The update itself has been made.
        """
        if not self._enabled:
            return
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        found_infs = [
            at(flag, scale.device)
            for state in self._per_optimizer_states.values()
            for flag in state["found_inf_per_device"].values()
        ]
        stepped = {}
        if self.skips.counts_steps():
            stepped = stepped_flags(self._per_optimizer_states, scale.device, OptState.STEPPED)
        if new_scale is not None:
            if not isinstance(new_scale, Tensor):
                lists.check_number("GradScaler.update", "new_scale", new_scale, math.ulp(0.0))
                new_scale = float(new_scale)
            elif new_scale.numel() == 1:
                new_scale = new_scale.reshape(())  # torch accepts shape [1], and then fails to copy it
            super().update(new_scale)
        else:
            if not found_infs:
                raise AssertionError("No inf checks were recorded prior to update.")
            self._per_optimizer_states.clear()  # first: an interrupt must not leave half an iteration
            if self._dynamic:
                factors = self._growth_factor, self._backoff_factor, self._growth_interval
                rule = *factors, self._min_scale, self._max_scale, self._hysteresis, self._consecutive_hysteresis
                update_scale_(scale, growth_tracker, self._hysteresis_tracker, found_infs, *rule, *self.skips.counters)
        if found_infs:
            self.skips.end_iteration(found_infs, stepped, counted=new_scale is None and self._dynamic, scale=scale)

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """torch's entries and this class's own, as numbers (syncs); torch's scaler loads it. Empty if disabled."""
        state = super().state_dict()
        if state:
            skipped, consecutive = self.skips.counts()
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
        """Load what :meth:`state_dict` returned, or torch's, which leaves this class's own entries as they are.

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
        self.skips.restart((state_dict.get("_skipped_steps", 0), state_dict.get("_consecutive_skips", 0)))
        if self._scale is not None:
            self._hysteresis_tracker.fill_(self._init_hysteresis_tracker)

    def _get_hysteresis_tracker(self) -> int:
        tracker = self._hysteresis_tracker
        return self._init_hysteresis_tracker if tracker is None else int(tracker.item())

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state["_last_sum_sq"] = state["_last_norm"] = None
        del state["compiled_handle"]
        if self._enabled:
            state["_init_hysteresis_tracker"] = self._get_hysteresis_tracker()
            state["_hysteresis_tracker"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.compiled_handle = CompiledHandle(self)

    # ---- for graph_step ----

    # Copies everything that an iteration changes. Returns a function that restores it.
    def snapshot(self) -> Callable[[], None]:
        tensors = [(tensor, tensor.clone()) for tensor in self.written_tensors()]
        restore_skips, records = self.skips.snapshot(), dict(self._per_optimizer_states)

        def restore() -> None:
            for tensor, value in tensors:
                tensor.copy_(value)
            restore_skips()
            self._per_optimizer_states.clear()
            self._per_optimizer_states.update(records)

        return restore

    # Reports an iteration that a graph has replayed.
    def report_replay(self) -> None:
        if self._enabled:
            self.skips.report(self._scale, [])
