"""Checkpoints: an optimizer's state as torch's optimizers save it, and states of torch, Apex and this package read back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup

from .._checks import lists
from .._checks.types import type_name
from .._raw._split_master import join_master
from .._raw.judge_units import STATISTICS
from .._updates.op import RULES
from ._algorithm import SWITCHES, Algorithm
from ._foreign import translated
from ._groups import GroupChecks
from ._options import GROUP_OPTIONS, UNIT_KEYS
from ._state import unpacked_name
from ._store import Entry, Join, StateStore

_STATISTICS = "statistics"  # the key of a saved group with those of its unit
#: Values of group keys that old and foreign checkpoints lack.
_ABSENT = {"maximize": False, "capturable": False, "differentiable": False}
_OURS = (*GROUP_OPTIONS, *UNIT_KEYS, "unit", *SWITCHES)  # keys that torch's groups do not have


def without_process_groups(group: dict[str, Any]) -> dict[str, Any]:
    """A group of parameters with ``None`` in place of process groups, which belong to a running program and cannot be pickled. The keys
    stay: torch's flattened form reads all that the optimizer has."""
    return {key: None if isinstance(value, ProcessGroup) else value for key, value in group.items()}


class Uncast:
    """Hides a loaded state from torch's load_state_dict, which casts every tensor in a container to the parameter's dtype."""

    def __init__(self, value: Any):
        self.value = value


class Loaded(NamedTuple):
    """A checked state that is to be loaded."""

    entries: list[Entry]
    others: dict[Any, Any]  # entries of `optimizer.state` that belong to no parameter
    max_grad_norm: float | None
    seed: int
    statistics: list[Tensor | None]  # of each group's unit


class CheckpointCodec:
    """Converts the state of one optimizer to the form of a checkpoint and back."""

    def __init__(self, name: str, algorithm: Algorithm, checks: GroupChecks, store: StateStore):
        self._name, self._algorithm, self._checks, self._store = name, algorithm, checks, store
        self._ours = {*_OURS, *algorithm.absent} - {"algorithm"}  # which goes with the state

    # ---- to a checkpoint ----

    def export(
        self,
        groups: list[dict[str, Any]],
        state_dict: dict[str, Any],
        statistics: list[Tensor],
        join: Join = join_master,
        keep_codes: bool = False,
    ) -> None:
        """Convert a state_dict, in which numbers stand for the parameters of ``groups``. ``statistics``: of each group's unit, or none."""
        state, params = state_dict["state"], [param for group in groups for param in group["params"]]
        for key, values in state.items():
            if isinstance(key, int) and key < len(params):
                state[key] = self._store.exported(params[key], values, join, keep_codes=keep_codes)
        saved = [without_process_groups(group) for group in state_dict["param_groups"]]
        for group in saved if not self._store.draws() else ():
            group.pop("seed", None)
        for group, values in zip(saved, statistics, strict=bool(statistics)):
            group[_STATISTICS] = values
        state_dict["param_groups"] = saved

    def exported_unit(self, groups: list[dict[str, Any]], state: dict[Any, Any], statistics: Tensor) -> dict[str, Any]:
        """The state_dict of an optimizer that has these groups alone."""
        number = {param: i for i, param in enumerate(param for group in groups for param in group["params"])}
        numbered = [{**group, "params": [number[param] for param in group["params"]]} for group in groups]
        for group in numbered:
            group.pop("unit", None)
        found = {"state": {i: state[param] for param, i in number.items() if param in state}, "param_groups": numbered}
        self.export(groups, found, [statistics] * len(groups))
        return found

    def read_unit(
        self, groups: list[dict[str, Any]], state_dict: dict[str, Any], defaults: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], Loaded]:
        """New groups in place of ``groups``, with their parameters and process groups, and what was loaded for them."""
        saved = self.shield(None, state_dict)
        sizes, own = ([len(group["params"]) for group in each] for each in (saved["param_groups"], groups))
        if sizes != own:
            raise ValueError(f"{self._name}: state_dict has groups of {sizes} parameters, and the unit of {own}")
        new = []
        for group, loaded in zip(groups, saved["param_groups"], strict=True):
            names = {key: group[key] for key in ("params", "param_names", "unit") if key in group}
            new.append({**loaded, **self.kept(group, loaded), **names})
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        params = [param for group in groups for param in group["params"]]
        found = zip(numbers, params, strict=True)
        return new, self.read(new, {p: saved["state"][i] for i, p in found if i in saved["state"]}, defaults)

    def copied(self, state: dict[Any, Any]) -> dict[Any, Any]:
        """A copy of ``optimizer.state`` for a pickle. Views would each be pickled with the whole buffer."""
        copies: dict[Any, Any] = defaultdict(dict)
        for key, values in state.items():
            values = self._store.exported(key, values) if isinstance(key, Tensor) else values
            copies[key] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in values.items()}
        return copies

    # ---- from a checkpoint ----

    def kept(self, live: dict[str, Any], loaded: dict[str, Any]) -> dict[str, Any]:
        """The entries that a group keeps when another takes its place: process groups, and keys of this package that that one
        lacks."""
        own = {key: value for key, value in live.items() if isinstance(value, ProcessGroup)}
        return own | {key: value for key, value in live.items() if key in self._ours and key not in loaded}

    def shield(self, _: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The hook that keeps torch's load_state_dict from casting."""
        missing = [key for key in ("state", "param_groups") if key not in state_dict]
        if missing:
            raise ValueError(
                f"{self._name}: state_dict has no {missing[0]!r}; accepted: the state_dict of an optimizer, with state and "
                "param_groups"
            )
        return {**state_dict, "state": {key: Uncast(values) for key, values in state_dict["state"].items()}}

    def read(self, groups: list[dict[str, Any]], state: dict[Any, Any], defaults: dict[str, Any]) -> Loaded:
        """Complete and check loaded groups, in place, and what was loaded for their parameters."""
        max_grad_norm = self._read_max_grad_norm(groups)
        statistics = [self._read_statistics(group) for group in groups]
        for group in groups:
            for key, value in {**_ABSENT, **self._algorithm.absent}.items():
                if key in defaults:
                    group.setdefault(key, value)
            self._checks.complete(group, defaults)
        seed = self._checks.common("seed", groups)
        loaded = {key: value.value if isinstance(value, Uncast) else value for key, value in state.items()}
        owned = {param for group in groups for param in group["params"]}
        moments = {param: self._algorithm.of(group).declared.moments for group in groups for param in group["params"]}
        for param in owned & loaded.keys():
            loaded[param] = translated(self._name, self._checked(loaded[param]), moments[param])
        for group in groups:
            step = group.pop("step", None)  # Apex has one count for a group
            for param in group["params"] if step is not None else ():
                if loaded.get(param):
                    loaded[param] = {"step": step, **loaded[param]}
        self._refuse_moments_of_others(values for values in loaded.values() if isinstance(values, dict))
        for group in groups:
            for position, param in enumerate(group["params"]):
                if loaded.get(param):
                    self._checks.check_param(group, position)
        entries = [(group, param, loaded[param]) for group in groups for param in group["params"] if loaded.get(param)]
        others = {key: value for key, value in loaded.items() if key not in owned}
        return Loaded(entries, others, max_grad_norm, seed, statistics)

    def _read_statistics(self, group: dict[str, Any]) -> Tensor | None:
        """Take those of a unit out of a loaded group."""
        values = group.pop(_STATISTICS, None)
        if values is not None and not (isinstance(values, Tensor) and values.shape == (len(STATISTICS),)):
            raise ValueError(
                f"{self._name}: the loaded statistics of a group are {values!r}; accepted: a tensor of {len(STATISTICS)} elements"
            )
        return values

    def _read_max_grad_norm(self, groups: list[dict[str, Any]]) -> float | None:
        """Apex keeps this option in its groups, where 0 stands for no clipping."""
        if self._checks.options.independent_groups:
            return self._checks.options.max_grad_norm
        for group in groups:
            if group.get("max_grad_norm") == 0:
                group["max_grad_norm"] = None
            if group.get("max_grad_norm") is not None:
                lists.check_number(self._name, "max_grad_norm", group["max_grad_norm"], 0.0)
        max_grad_norm = self._checks.common("max_grad_norm", groups)
        for group in groups:
            group.pop("max_grad_norm", None)
        return max_grad_norm

    def _checked(self, values: Any) -> dict[str, Any]:
        """The loaded state of a parameter, without the empty dicts that torch's set_optimizer_state_dict puts where the
        flattened form has nothing."""
        if not isinstance(values, dict):
            raise TypeError(
                f"{self._name}: the loaded state of a parameter has type {type_name(values)}; accepted: a dict"
            )
        if "remainder" in values:
            raise ValueError(
                f"{self._name}: the loaded state has the remainder of a split master and not the master; accepted: what "
                "state_dict returns"
            )
        return {name: value for name, value in values.items() if not isinstance(value, dict) or value}

    def _refuse_moments_of_others(self, states: Iterable[dict[str, Any]]) -> None:
        """Raise for the state of another optimizer of this package that has all that this one needs, and more: Lion's moment
        is not Adam's first one. A name that no rule declares is the user's own."""
        own = [name for member in self._algorithm.members for name in member.declared.moments]
        others = {name for rule in RULES.values() for name in rule.declared.moments} - {*own}
        held = {unpacked_name(name) for values in states for name, value in values.items() if value is not None}
        foreign = sorted(others & held)
        if foreign:
            raise ValueError(
                f"{self._name}: the loaded state has {', '.join(foreign)}; accepted: the state of the same kind of optimizer, "
                f"with {', '.join(own)}"
            )
