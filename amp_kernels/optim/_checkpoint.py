"""State in blocks: how it is laid out, filled, shown as torch shows it, saved and loaded."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .._checks import lists
from .._checks.lists import HALF_DTYPES
from .._dispatch.compiled import Traced
from .._raw._split_master import join_master, split_master
from .._sharding.local import like, local, local_value
from .._updates.op import RULES, UpdateOp
from .._updates.state import state_layout, view_like
from ._cached_step import CachedStep
from ._groups import CheckedGroups
from ._hyper_parameters import HyperParameters
from ._state import Block, Place, ShownState, SplitState, signature


class Uncast:
    """Keeps torch's load_state_dict, which casts every tensor to the parameter's dtype, away from a loaded state."""

    def __init__(self, value: Any):
        self.value = value


def _without_placeholders(values: dict[str, Any]) -> dict[str, Any]:
    """A loaded state without the empty dicts that torch's set_optimizer_state_dict puts where the flattened form has nothing."""
    return {name: value for name, value in values.items() if not isinstance(value, dict) or value}


class BlockedState(CheckedGroups):
    """The half of :class:`~amp_kernels.optim._base.FusedOptimizer` that owns the state.

    ``self.state[param]`` shows views of the flat buffers under torch's names; ``self._places`` knows where they are. A
    user may change a view in place, or replace or clear ``self.state[param]``: the next step notices and takes over
    what is shown.
    """

    _shows_step = True  # whether state[param]["step"] always exists, as in the torch optimizer of the same name
    _op: UpdateOp  # the optimizer's
    _required: tuple[str, ...] = ()  # what a loaded state must have besides moments

    def _moment_names(self, group: dict, loaded: dict) -> tuple[str, ...]:
        """State of a parameter of ``group`` that is as large as the parameter; ``loaded``: what a checkpoint has for
        it."""
        return self._op.declared.moments

    def _set_options(self, *arguments: Any) -> None:
        super()._set_options(*arguments)
        self._forget_places()

    def _forget_places(self) -> None:
        self._blocks: set[Block] = set()
        self._places: dict[int, Place] = {}  # by id(param): hashing a tensor is slow, and a place keeps its parameter
        self._forget_step()

    def _forget_step(self) -> None:
        """Drop what the last step left to save time in the next one."""
        self._batches: tuple[tuple, list] = ((), [])  # with what they depend on
        self._cached_step: CachedStep | None = None
        self._hyper_parameters: HyperParameters | None = None

    def _pack(self, entries: Iterable[tuple[dict, Tensor, dict]]) -> tuple[list[Place], list[tuple[Tensor, Tensor]]]:
        """Build blocks for ``(group, param, values)`` and fill them with the given values, or with initial ones if
        there are none.

        Changes nothing that exists. Returns the places, and the parameters that must be overwritten with a weight to
        agree with a loaded master (only split masters: a tie may have been rounded the other way).
        """
        sets: dict[tuple, tuple[dict, list[tuple[Tensor, Tensor, dict]]]] = {}
        for group, param, values in entries:
            piece = local(param)
            if not lists.is_dense(piece):
                raise ValueError(
                    f"{self._name}: a parameter is {lists.describe(piece)}, which leaves gaps in memory or overlaps "
                    "itself; accepted: any order of dimensions that covers its memory once"
                )
            names, averaged = self._wanted(group, values)
            key = id(group), piece.device, piece.dtype, names, averaged
            values = {name: local_value(value, param) for name, value in values.items()}
            sets.setdefault(key, (group, []))[1].append((param, piece, values))
        places: list[Place] = []
        overwrite: list[tuple[Tensor, Tensor]] = []
        for (_, device, dtype, names, averaged), (group, members) in sets.items():
            params, pieces = [param for param, _, _ in members], [piece for _, piece, _ in members]
            offsets, total = state_layout([piece.numel() for piece in pieces])
            has_master = dtype in HALF_DTYPES and self.master_weights in ("fp32", "split")
            # The step is part of the key of the random bits, so a checkpoint must have it.
            stochastic = dtype in HALF_DTYPES and self.master_weights == "none"
            master_dtype = torch.int16 if self.master_weights == "split" else torch.float32
            has_shadow = dtype == torch.float32 and self.shadow_dtype is not None
            block = Block(
                group,
                params,
                offsets,
                steps=torch.zeros(len(params), dtype=torch.float32, device=device),
                moments={name: torch.zeros(total, dtype=self.state_dtype, device=device) for name in names},
                master=torch.zeros(total if has_master else 0, dtype=master_dtype, device=device),
                averaged=averaged,
                ema=torch.zeros(total if averaged else 0, dtype=torch.float32, device=device),
                shadow=torch.zeros(total if has_shadow else 0, dtype=self.shadow_dtype or torch.float16, device=device),
            )
            if has_shadow:
                block.shadow_views = [view_like(block.shadow, p, o) for p, o in zip(params, offsets, strict=True)]
            for slot, (param, piece, values) in enumerate(members):
                views = {"step": block.steps[slot]} if self._shows_step or stochastic else {}
                views.update((name, view_like(buffer, piece, offsets[slot])) for name, buffer in block.moments.items())
                if has_master:
                    key = "master" if master_dtype == torch.float32 else "remainder"
                    views[key] = view_like(block.master, piece, offsets[slot])
                if averaged:
                    views["ema"] = view_like(block.ema, piece, offsets[slot])
                self._fill(piece, views, block.steps[slot], values, overwrite)
                shown = {name: view if name == "step" else like(view, param) for name, view in views.items()}
                state = SplitState(shown) if "remainder" in shown else ShownState(shown) if shown else None
                places.append(Place(param, block, slot, state, signature(param)))
        return places, overwrite

    def _fill(self, param: Tensor, shown: dict, step: Tensor, values: dict, overwrite: list) -> None:
        """Copy a loaded or carried-over state into its views; without one (``values`` is empty) it starts at zero, and
        an average at the weight."""
        declared = self._op.declared
        required = {*self._required, *declared.moments} - {*declared.optional}
        for name in {**dict.fromkeys(shown), "master": None}:
            value = values.get(name)
            if value is not None and name != "step" and not isinstance(value, Tensor):
                raise TypeError(f"{self._name}: the loaded {name} is a {type(value).__name__}; accepted: a tensor")
            if value is not None and name != "step" and value.shape != param.shape:
                raise ValueError(
                    f"{self._name}: the loaded {name} has shape {list(value.shape)}, its parameter {list(param.shape)}"
                )
            if value is not None and name in shown and name != "step":
                shown[name].copy_(value)
            elif value is None and values and name in required:
                raise ValueError(
                    f"{self._name}: the loaded state of a parameter of shape {list(param.shape)} lacks {name!r}"
                )
        loaded_step = torch.as_tensor(self._loaded_step(shown, values), dtype=torch.float32, device=step.device)
        if loaded_step.numel() != 1:
            raise ValueError(f"{self._name}: the loaded step has shape {list(loaded_step.shape)}; accepted: 1 element")
        step.copy_(loaded_step.reshape(()))
        master = values.get("master")
        if "master" in shown and master is None:
            shown["master"].copy_(param)
        elif "remainder" in shown and master is not None:
            weight, remainder = split_master(master.to(param.device, torch.float32), param.dtype)
            shown["remainder"].copy_(remainder)
            overwrite.append((param, weight))
        if "ema" in shown and values.get("ema") is None:
            shown["ema"].copy_(param if master is None or not {"master", "remainder"} & shown.keys() else master)

    def _refuse_moments_of_others(self, states: Iterable[dict[str, Any]]) -> None:
        """Raise for the state of another optimizer of this package that has all that this one needs, and more: Lion's moment
        is not Adam's first one. What no rule declares is the user's own."""
        others = {name for rule in RULES.values() for name in rule.declared.moments} - {*self._op.declared.moments}
        foreign = sorted({name for values in states for name in others & values.keys() if values[name] is not None})
        if foreign:
            raise ValueError(
                f"{self._name}: the loaded state has {', '.join(foreign)}; accepted: the state of the same kind of optimizer, "
                f"with {', '.join(self._op.declared.moments)}"
            )

    def _loaded_step(self, shown: dict, values: dict) -> Tensor | float:
        return values.get("step", 0.0)  # a tensor, or a number in old checkpoints

    def _commit(self, places: list[Place], overwrite: list[tuple[Tensor, Tensor]], state: dict) -> None:
        for param, weight in overwrite:
            param.copy_(weight)
        self._cached_step = None
        blocks = {place.block for place in places}
        self._blocks |= blocks
        for place in places:
            place.look()  # a load's own write must not count as one of others
            # In this order: after an interrupt in between the next step takes over what is shown.
            if place.state is not None:
                state[place.param] = place.state
            self._places[id(place.param)] = place
        for block in blocks:
            block.refresh_shadows()
        self._blocks = {place.block for place in self._places.values()}

    def _wanted(self, group: dict, loaded: dict) -> tuple[tuple[str, ...], bool]:
        """The moments of a parameter of ``group``, and whether its weight is averaged."""
        averaged = group.get("ema_decay") is not None or loaded.get("ema") is not None
        return self._moment_names(group, loaded), averaged

    def _outgrow(self) -> None:
        """Forget the places of parameters whose group asks for state that their block does not have (momentum, AMSGrad
        or the average was switched on), so that it is made anew, with what it holds."""
        for block in self._blocks:
            names, averaged = self._wanted(block.group, {})
            if not block.moments.keys() >= set(names) or averaged > block.averaged:
                self._cached_step = None
                for param in block.params:
                    place = self._places.get(id(param))
                    if place is not None and place.block is block:
                        del self._places[id(param)]

    def _exported(self, param: Tensor, values: dict, join: Callable[[Tensor, Tensor], Any] = join_master) -> dict:
        """A parameter's state as a checkpoint shows it: masters are float32 however they are kept."""
        if "remainder" not in values:
            return dict(values)
        rest = {key: value for key, value in values.items() if key != "remainder"}
        master = join(local(param.detach()), local(values["remainder"]))
        return {**rest, "master": like(master, param)}

    def _current(self, param: Tensor) -> dict:
        """A parameter's state as it stands, as a checkpoint shows it; empty if there is none."""
        place, values = self._places.get(id(param)), self.state.get(param) or {}
        if place is not None and place.converted:
            values = {key: value for key, value in values.items() if key != "remainder"}
        return self._exported(param, values) if values else {}

    def reload_model_params(self) -> None:
        """Take over the parameters as they are now: masters are set to them, without bits of their own, shadows too.

        In-place writes between steps (``model.load_state_dict``, ``clamp_``, a mask, an EMA swap) are taken over without
        it, element by element where the value changed. It is for writes that version counters do not show, through
        ``.data`` or by captured code: with a master the next step would continue from the old weights. And it is for writes
        that a split master must follow exactly: of its 16 bits nobody knows whose weight was written, so that all stay, which
        moves a written weight by up to half a unit in its last place, 0 and infinities excepted. Averages (``ema_decay``)
        stay as they are.
        """
        with torch.no_grad():
            for place in self._places.values():
                master = place.block.master
                if master.numel() and master.dtype == torch.float32:
                    place.view(master).copy_(place.piece)
                elif master.numel():
                    place.view(master).zero_()
                place.look()
            for block in self._blocks:
                block.refresh_shadows()

    def _look_at_params(self) -> None:
        """Take the parameters as they are for what their masters say."""
        for place in self._places.values():
            place.look()

    @torch.no_grad()
    def _adopt_writes(self) -> None:
        """Bring all masters in line with what others wrote into the parameters since the last step."""
        for place in self._places.values():
            place.adopt_write()

    def state_dict(self) -> dict[str, Any]:
        """As torch's. 16-bit parameters also have ``master``, the float32 weight, however it is kept; with ``ema_decay``
        there is ``ema``, the float32 average of the weight. Groups hold ``ema_decay`` and ``seed`` if they are in use.

        The tensors are views of the optimizer's flat buffers: ``torch.save`` stores each buffer once, ``pickle`` once
        per view.
        """
        return self._state_dict(join_master)

    def _state_dict(self, join: Callable[[Tensor, Tensor], Any]) -> dict[str, Any]:
        """With ``join(parameter, remainder)`` for a master that is kept split."""
        self._adopt_writes()
        export = functools.partial(type(self)._export, join=join)
        handle = self.register_state_dict_post_hook(export, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def _export(self, state_dict: dict[str, Any], join: Callable[[Tensor, Tensor], Any]) -> None:
        params = self._params()
        state = state_dict["state"]
        for key, values in state.items():
            if isinstance(key, int) and key < len(params):
                state[key] = self._exported(params[key], values, join)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, and reads torch's checkpoints, fused or not; values are copied into the flat buffers.

        Moments and masters are not rounded to the parameter's dtype. A 16-bit parameter whose state has no ``master``
        starts from the parameter as it is; a split master that is loaded also sets its parameter. An average that is not
        in the state starts at the weight. ``ema_decay``, ``seed`` and Apex' ``max_grad_norm`` of the groups count, as all
        their entries do; where they have none the optimizer's own stay.

        Raises:
            ValueError: groups, shapes or keys do not fit. Nothing has been changed then.
            TypeError: a hyper-parameter is no number, or a moment no tensor. Nor then.
        """

        def shield(_, loaded):
            return {**loaded, "state": {key: Uncast(values) for key, values in loaded["state"].items()}}

        handle = self.register_load_state_dict_pre_hook(shield)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        if self.shard_group is not None:
            raise TypeError(
                f"{self._name}: an optimizer with a shard_group cannot be pickled or copied, because a process group cannot; "
                "accepted: state_dict, and load_state_dict of an optimizer that is made with a group"
            )
        self._adopt_writes()
        state: dict[Any, Any] = defaultdict(dict)
        for param, values in self.state.items():
            if isinstance(param, Tensor):
                values = self._exported(param, values)
            state[param] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in values.items()}
        return {
            **super().__getstate__(),
            "state": state,
            "options": self._shared_options(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also the last step of load_state_dict: ``state`` then holds new states and groups only."""
        state = dict(state)
        self.__dict__.update(state.pop("options", {}))
        groups = state["param_groups"]
        for group in groups:
            if group.get("max_grad_norm") == 0:  # Apex, which keeps it in its groups: no clipping
                group["max_grad_norm"] = None
            if group.get("max_grad_norm") is not None:
                lists.check_number(self._name, "max_grad_norm", group["max_grad_norm"], 0.0)
        max_grad_norm = self._common("max_grad_norm", groups)
        for group in groups:
            group.pop("max_grad_norm", None)
            self._complete_group(group)
        seed = self._common("seed", groups)
        loaded = {key: value.value if isinstance(value, Uncast) else value for key, value in state["state"].items()}
        owned = {param for group in groups for param in group["params"]}
        for param in owned & loaded.keys():
            values = loaded[param]
            if not isinstance(values, dict):
                raise TypeError(
                    f"{self._name}: the loaded state of a parameter is a {type(values).__name__}; accepted: a dict"
                )
            if "remainder" in values:
                raise ValueError(
                    f"{self._name}: the loaded state has the remainder of a split master and not the master; accepted: what "
                    "state_dict returns"
                )
            loaded[param] = _without_placeholders(values)
        for group in groups:
            step = group.pop("step", None)  # Apex counts once for a group
            for param in group["params"] if step is not None else ():
                if loaded.get(param):
                    loaded[param] = {"step": step, **loaded[param]}
        self._refuse_moments_of_others(values for values in loaded.values() if isinstance(values, dict))
        with torch.no_grad():
            packed = self._pack(
                (group, param, loaded[param]) for group in groups for param in group["params"] if loaded.get(param)
            )
            rest = defaultdict(dict, {key: value for key, value in loaded.items() if key not in owned})
            super().__setstate__({**state, "state": rest})
            self._forget_places()
            self._commit(*packed, rest)
        self._traced = Traced(self, self.param_groups)
        self.max_grad_norm, self.seed = max_grad_norm, seed
        for group in groups:
            group["fused"], group["foreach"] = True, None
