"""The base of all fused optimizers: torch's interface over a state store, a step plan and a checkpoint codec.

An optimizer of this package is ``class X(FusedOptimizer, torch.optim.X)``, or ``class X(StandaloneOptimizer)`` where torch
has none. Deriving from torch's class makes ``isinstance`` checks of training frameworks hold, and its constructor supplies
the validation, the group keys and the defaults. :class:`FusedOptimizer` comes first and replaces everything that touches state.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT, _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from .._checks.types import check_mapping
from .._dispatch.compiled import CompiledHandle, HasCompiledCalls, compiled_call
from .._raw._split_master import join_master
from .._sharding.agreement import Agreement
from ._algorithm import SWITCHES, Algorithm
from ._checkpoint import CheckpointCodec
from ._gradients import StepAnswer, StepRequest
from ._groups import GroupChecks
from ._independent import HasUnits
from ._options import (
    DEFAULTS,
    FixedAttribute,
    GroupOptionAttribute,
    MixedPrecision,
    OptionAttribute,
    Options,
    UnitsAttribute,
    checked_options,
)
from ._plan import StepPlan
from ._store import Join, StateStore


def hooked_if_watched(step: Callable[..., Any]) -> Callable[..., Any]:
    """``step``, in torch's wrapper only where there is a hook or a profiler: the wrapper takes 10 us of the host."""
    hooked = Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def call(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        watched = (
            torch.compiler.is_compiling()
            or torch.autograd._profiler_enabled()
            or self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
        )
        return (hooked if watched else step)(self, *args, **kwargs)

    return call


class FusedOptimizer(HasUnits, HasCompiledCalls, Optimizer):
    """Base of the optimizers here; see the module's docstring. A subclass names its algorithm."""

    _algorithm: Algorithm
    profile_hook_step = staticmethod(hooked_if_watched)  # torch's constructor wraps `step` in it
    _request: StepRequest | None = None
    _answer: StepAnswer | None = None
    _in_closure = False
    _released: Any = None  # the handle of release_gradients
    _switches: dict[str, bool] = {}  # noqa: RUF012 (never written)

    master_weights = OptionAttribute[str]()
    shadow_dtype = OptionAttribute[torch.dtype | None]()
    state_dtype = OptionAttribute[torch.dtype | str]()
    state_device = FixedAttribute[str | None]()
    independent_groups = UnitsAttribute()
    max_grad_norm = OptionAttribute[float | None]()
    spike_zscore = OptionAttribute[float | None]()
    spike_decay = OptionAttribute[float]()
    spike_warmup = OptionAttribute[int]()
    spike_action = OptionAttribute[str]()
    skip_nonfinite = OptionAttribute[bool]()
    ema_decay = OptionAttribute[float | None]()
    unscale_grads = OptionAttribute[bool]()
    zero_grads = OptionAttribute[bool]()
    shard_group = OptionAttribute[ProcessGroup | None]()
    seed = GroupOptionAttribute[int]()

    def _set_options(
        self,
        options: MixedPrecision,
        foreach: bool | None,
        fused: bool | None,
        differentiable: bool,
        **switches: bool,
    ) -> None:
        """The first call of all constructors. ``foreach`` and ``fused`` are hints without effect. ``switches`` become defaults of
        groups where they are on."""
        name = type(self).__name__
        checked = checked_options(name, options)
        if differentiable:
            raise RuntimeError(f"{name}: differentiable is True; accepted: False (the step is one fused op)")
        if fused and foreach:
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
        self._switches = {key: True for key, on in switches.items() if on}
        self._build(checked)

    def _build(self, options: Options) -> None:
        name = type(self).__name__
        self._options = options
        self._checks = GroupChecks(name, self._algorithm, options)
        self._store = StateStore(name, self._algorithm, options)
        self._plan = StepPlan(name, self._algorithm, options, self._checks, self._store)
        self._codec = CheckpointCodec(name, self._algorithm, self._checks, self._store)

    def __repr__(self) -> str:
        head, *groups = super().__repr__().split("\n", 1)
        return "\n".join([head, *(f"    {name}: {value}" for name, value in vars(self._options).items()), *groups])

    def _params(self) -> list[Tensor]:
        """All parameters, in the order of their numbers in the state_dict."""
        return [param for group in self.param_groups for param in group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, and refuses what the kernels cannot update.

        Raises:
            TypeError: a parameter is not float16, bfloat16 or float32, or is a tensor subclass other than DTensor. A frozen one may
                be anything: the first step in which it has a gradient raises the same.
            ValueError: a hyper-parameter is out of range, NaN or unsupported, a key misspells an option, a parameter has gaps in
                memory or is a DTensor whose pieces have to be summed (``Partial``), or torch's own reasons (a non-leaf
                tensor, ...).
        """
        self.defaults.update(self._switches)
        if isinstance(param_group, dict):
            self._checks.refuse_misspelt(
                param_group, len(self.param_groups), {**dict.fromkeys(SWITCHES), **self.defaults}
            )
            self._checks.refuse_repeated(param_group, self.param_groups)
        count = len(self.param_groups)
        try:
            super().add_param_group(param_group)
            group = self.param_groups[-1]
            self._checks.complete(group, self.defaults)
            seed = self._checks.common("seed", self.param_groups)
            self._checks.check_params(group)
            if self._plan.units is not None:
                self._plan.units.read(self.param_groups)
            if self._plan.host is not None:
                self._plan.host.prepare(group["params"])
            self._options.seed = seed
            group["fused"] = True
        except BaseException:
            del self.param_groups[count:]
            raise
        self._compiled_handle = CompiledHandle(self, self.param_groups)

    # ---- the step ----

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True if torch.amp.GradScaler is to hand over grad_scale and found_inf, without a sync, and not to unscale and skip itself.
        False within a closure, whose gradients carry no scale: Lightning asks there whether it may clip them.
        """
        return not (self.unscale_grads or self._in_closure)

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        """Ignore the value that torch's constructors assign."""

    @compiled_call()
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, units: Iterable[str | int] | None = None) -> Any:
        """Update all parameters that have a gradient, in one pass per device and without a host sync.

        Gradients are read, not written: after a step under a :class:`amp_kernels.GradScaler` they still carry the loss
        scale. ``unscale_grads=True`` and ``zero_grads=True``, which sets them to 0 at the end, also do so when the step
        is skipped. With ``max_grad_norm`` they count as clipped. A step alone is never skipped, unless
        ``skip_nonfinite=True``.

        Args:
            closure: reevaluates the model and returns the loss.
            units: with ``independent_groups=True``, the units to step, by name (``unit`` of the groups, or a group's index). Others
                stay, with their gradients. ``None``: all.

        Returns:
            The closure's result, or ``None``.

        Raises:
            RuntimeError: a gradient is sparse; or gradients are released, and this step does not fit to the updates within backward
                (:func:`release_gradients`).
            TypeError: a gradient is complex or an integer.
            ValueError: a hyper-parameter is NaN, there is no such unit, or groups of a unit differ in its options. Nothing has been
                changed when any of these is raised.
        """
        loss, released, asked = None, self._released, None if units is None else self._asked(units)
        if closure is not None:
            if released is not None:
                raise RuntimeError(
                    f"{type(self).__name__}: a closure would run backward within step(), and gradients are released; accepted: None"
                )
            self._in_closure = True
            try:
                with torch.enable_grad():
                    loss = closure()
            finally:
                self._in_closure = False
        request = self._request or self._default_request()
        if asked is not None:
            request = request._replace(units=asked)
        if released is None or released.check_step(request):
            answer = self._plan.step(self.param_groups, self.state, request)
            if self._answer is not None:
                self._answer = answer
        if released is not None:
            released.end_step()
        return loss

    @torch._disable_dynamo  # as torch's
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. With :func:`release_gradients` it also ends a step, as after a backward that failed."""
        if self._released is not None:
            self._released.reset()
        super().zero_grad(set_to_none)

    def _default_request(self, max_norm: float | None = None) -> StepRequest:
        """The step that the optimizer's options ask for, with the scale and flag that torch's scaler leaves in attributes.

        Raises:
            ValueError: a scaler gives a ``max_norm`` and the optimizer has a ``max_grad_norm``.
        """
        own, check = self._options.max_grad_norm, self._options.skip_nonfinite
        if self.independent_groups:
            limits = [group["max_grad_norm"] for group in self.param_groups if group["max_grad_norm"] is not None]
            own, check = limits[0] if limits else None, False  # each unit has its own
        if max_norm is not None and own is not None:
            raise ValueError(
                f"GradScaler.step: max_norm is {max_norm} and max_grad_norm of {type(self).__name__} is {own}; accepted: one of them"
            )
        found_inf = getattr(self, "found_inf", None)
        if not isinstance(found_inf, Tensor):
            found_inf = None  # torch's scaler leaves the int 0 if there are no gradients
        norm = own if max_norm is None and not self.independent_groups else max_norm
        return StepRequest(getattr(self, "grad_scale", None), found_inf, check, norm)

    def _step_on_request(self, request: StepRequest, step: Callable[[], Any]) -> tuple[Any, StepAnswer]:
        """Call ``step``, which steps this optimizer, and have that step follow the request of a gradient scaler.

        ``step`` is a call of the public method, possibly of a wrapper, so that hooks and the wrapper's own work take place.

        Returns:
            The result of ``step``, and what the optimizer found; an empty answer if it was not stepped.
        """
        try:
            self._request, self._answer = request, StepAnswer()
            result = step()
            return result, self._answer
        finally:
            self._request = self._answer = None

    def _agreement(self) -> Agreement:
        """The ranks to agree with on norms and skips."""
        return self._plan.agreement(self.param_groups)

    # ---- state ----

    def reload_model_params(self) -> None:
        """Set the masters to the current parameters, without extra bits, and bring the shadows up to date.

        In-place writes between steps (``model.load_state_dict``, ``clamp_``, a mask, an EMA swap) need no call: the next step
        adopts each value that changed. Call this after writes that version counters do not show, through ``.data`` or by
        captured code; otherwise masters continue from the old weights. Call it also where a split master must follow a write
        exactly: its 16 bits cannot tell which elements were overwritten, so all stay, which moves a written weight by up to
        half a unit in its last place (0 and infinities excepted). Averages (``ema_decay``) stay as they are.
        """
        self._store.reload_params()

    def offload_state(self) -> None:
        """Move the state to host memory, pinned where parameters are on a GPU, until :meth:`reload_state`: between phases of a run
        that train and others that do not, such as sampling. Its memory on the device is freed, but for what a ``state_dict`` of
        before still shows. ``step`` is refused in between; ``state_dict`` works, with tensors on the CPU. With
        ``state_device="cpu"`` both do nothing.

        Raises:
            RuntimeError: there is not enough memory. Nothing has been changed then.

        Examples:
            >>> model = torch.nn.Linear(4, 2)
            >>> optimizer = ak.optim.AdamW(model.parameters())
            >>> model(torch.ones(1, 4)).sum().backward()
            >>> optimizer.step()
            >>> optimizer.offload_state()
            >>> optimizer.reload_state()
            >>> optimizer.step()
        """
        self._plan.forget()
        self._store.offload()

    def reload_state(self) -> None:
        """Move the state back to the devices that :meth:`offload_state` took it from, with the same bits. It does nothing without.

        Raises:
            RuntimeError: there is not enough memory. Nothing has been changed then.
        """
        self._plan.forget()
        self._store.reload()

    def state_dict(self) -> dict[str, Any]:
        """As torch's. 16-bit parameters also have ``master``, the float32 weight, however it is kept; with ``ema_decay``
        there is ``ema``, the float32 average of the weight. Moments in 8 bits are float32 here; a load encodes them anew, which
        keeps the values, but not always the codes and exponents. All moments are float32 under FSDP1, which saves one dtype per
        parameter. Groups hold ``ema_decay`` if it is in use, ``seed`` once a parameter has state whose steps draw random bits, and
        no process group.

        The tensors are views of the optimizer's flat buffers: ``torch.save`` stores each buffer once, ``pickle`` once
        per view.
        """
        state = self._state_dict_with(join_master)
        self._store.note_exported()
        return state

    def _state_dict_with(self, join: Join, *, keep_codes: bool = False) -> dict[str, Any]:
        """The state_dict, with ``join(parameter, remainder)`` for a split master, and with the codes and exponents of 8-bit moments
        if ``keep_codes``."""
        self._store.adopt_writes()

        def export(optimizer: FusedOptimizer, state_dict: dict[str, Any]) -> None:
            optimizer._codec.export(optimizer.param_groups, state_dict, self._statistics(), join, keep_codes)

        handle = self.register_state_dict_post_hook(export, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, and reads the checkpoints of torch, fused or not, of Apex, and of the 8-bit optimizers of bitsandbytes and
        torchao; values are copied into the flat buffers.

        Moments and masters are not rounded to the parameter's dtype; with ``state_dtype="8bit"`` moments are rounded to
        nearest, once. A split master that is loaded also sets its parameter. A master or an average that the state does not have,
        or that nothing was loaded into since :meth:`state_dict` handed it out (a partial load of torch's distributed checkpoint),
        starts at the parameter, also if that is loaded afterwards, up to the next step. ``ema_decay``, ``seed`` and Apex'
        ``max_grad_norm`` of the groups count, as all their entries do; where they have none the optimizer's own stay, and so do
        process groups, and the units of its groups with their options.

        Raises:
            ValueError: groups, shapes or keys do not fit. Nothing has been changed then.
            TypeError: ``state_dict`` is no dict, a hyper-parameter no number, or a moment no tensor. Nor then.
        """
        check_mapping(type(self).__name__, "state_dict", state_dict, "the state_dict of an optimizer")
        handle = self.register_load_state_dict_pre_hook(self._codec.shield)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        in_groups = any(isinstance(value, ProcessGroup) for group in self.param_groups for value in group.values())
        if self.shard_group is not None or in_groups:
            raise TypeError(
                f"{type(self).__name__}: an optimizer with a shard_group cannot be pickled or copied, because a process group "
                "cannot; accepted: state_dict, and load_state_dict of an optimizer that is made with a group"
            )
        self._store.adopt_writes()
        state = super().__getstate__()
        groups = list(map(dict, self.param_groups))
        for group, values in zip(groups, self._statistics(), strict=False):
            group["statistics"] = values.clone()
        copied, options = self._codec.copied(self.state), dict(vars(self._options))
        return {**state, "param_groups": groups, "state": copied, "options": options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also the last step of load_state_dict: ``state`` then holds new states and groups only."""
        state = dict(state)
        options = state.pop("options", None)
        if options is not None:
            self._build(Options(**{**DEFAULTS, **options}))
        groups = state["param_groups"]
        for group, live in zip(groups, self.__dict__.get("param_groups", ()), strict=False):
            group.update(self._codec.kept(live, group))
        self._store.complete()
        loaded = self._codec.read(groups, state["state"], self.__dict__.get("defaults", {}))
        packed = self._store.pack(loaded.entries, load=True)
        state["state"] = shown = defaultdict(dict, loaded.others)
        own, of_options, undo = dict(vars(self)), dict(vars(self._options)), self._store.undo(packed)
        units = self._plan.units
        of_units = {} if units is None else dict(vars(units))
        try:
            super().__setstate__(state)
            self._store.clear()
            self._plan.forget()
            self._store.commit(packed, shown)
            self._compiled_handle = CompiledHandle(self, self.param_groups)
            self._options.max_grad_norm, self._options.seed = loaded.max_grad_norm, loaded.seed
            if units is not None:
                units.read(groups, replaced=True)
                units.load_statistics(dict(zip(units.of_groups, loaded.statistics, strict=True)))
            for group in groups:
                group["fused"], group["foreach"] = True, None
        except BaseException:  # an interrupt, too
            vars(self).update(own)
            vars(self._options).update(of_options)
            vars(units).update(of_units) if units is not None else None
            undo()
            self._plan.forget()
            raise


class StandaloneOptimizer(FusedOptimizer):
    """Base of optimizers that torch does not have: adds the group keys that all of torch's share."""

    def __init__(self, params: ParamsT, **defaults: Any) -> None:
        super().__init__(params, {**defaults, "foreach": None, "differentiable": False, "fused": True})
