"""Parameter groups: checked before anything changes, and packed for the update op."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .._checks import lists
from .._checks.types import check_iterable, type_name
from .._dispatch.devices import at
from .._raw._block8 import BLOCK
from .._sharding.local import is_dtensor, local
from .._updates.state import MAXIMIZE, STOCHASTIC
from ._algorithm import SWITCHES, Algorithm
from ._moments8 import has_whole_blocks, moment_dtype
from ._options import (
    DEFAULTS,
    GROUP_OPTIONS,
    UNIT_KEYS,
    Options,
    check_betas,
    check_group_options,
    check_unit,
    check_unit_options,
    checked_switch,
    misspelt,
    rounds_stochastically,
    state_dtype_of,
)

#: Hyper-parameters that must not be below 0, and torch's words for them.
_NOT_NEGATIVE = {
    "lr": "learning rate",
    "momentum": "momentum value",
    "eps": "epsilon value",
    "weight_decay": "weight_decay value",
}
NUMBERS = (*_NOT_NEGATIVE, "betas", "dampening")


class GroupChecks:
    """The checks of one optimizer's groups and parameters; error messages begin with ``name``."""

    def __init__(self, name: str, algorithm: Algorithm, options: Options):
        self._name, self._algorithm, self.options = name, algorithm, options

    def refuse_misspelt(self, group: dict[str, Any], index: int, defaults: dict[str, Any]) -> None:
        """Raise for a key of new group number ``index`` that misspells an option, because torch would keep it unread."""
        options = {**defaults, **DEFAULTS}
        for key in group:
            right = misspelt(key, options) if isinstance(key, str) and key not in options else None
            if right is not None:
                place = "in the constructor" if right in DEFAULTS and right not in GROUP_OPTIONS else "in a group"
                raise ValueError(
                    f"{self._name}: param_groups[{index}] has the key {key!r}, which is no option; accepted: "
                    f"{right} ({place})"
                )

    def complete(self, group: dict[str, Any], defaults: dict[str, Any]) -> None:
        """Add the options that live in groups, if they are in use, to a new or loaded group and check all that it
        holds. Without them a group has the keys of torch's."""
        options = self.options
        if options.ema_decay is not None:
            group.setdefault("ema_decay", options.ema_decay)
        if rounds_stochastically(group, options):
            group.setdefault("seed", options.seed)
        check_group_options(self._name, group)
        self._complete_unit(group)
        self.release_shard_group(group)
        accepted, hint = GROUP_OPTIONS, ""
        if options.independent_groups:
            accepted = *accepted, *UNIT_KEYS
        elif any(key in group for key in UNIT_KEYS):
            hint = f"; with independent_groups=True also {', '.join(UNIT_KEYS)}"
        for name, value in vars(options).items():
            if name in group and name not in accepted and group.pop(name) != value:
                raise ValueError(
                    f"{self._name}: {name} is an option of the optimizer, where it is {value!r}, and not of a group; "
                    f"accepted in groups: {', '.join(accepted)}{hint}"
                )
        missing = [key for key in NUMBERS if key in defaults and key not in group]
        if missing:
            raise ValueError(
                f"{self._name}: a group lacks {', '.join(missing)}; accepted: groups of the same kind of optimizer"
            )
        self._check_ranges(group, defaults)
        self._complete_switches(group, defaults)
        self._algorithm.of(group).check_group(self._name, group)

    def _complete_unit(self, group: dict[str, Any]) -> None:
        options = self.options
        check_unit(self._name, group, options.independent_groups)
        if options.independent_groups:
            for key in UNIT_KEYS:
                group.setdefault(key, getattr(options, key))
            group["skip_nonfinite"] = checked_switch(self._name, "skip_nonfinite", group["skip_nonfinite"])
            check_unit_options(self._name, group)

    def release_shard_group(self, group: dict[str, Any]) -> None:
        """Set the optimizer's own process group, which ZeroRedundancyOptimizer copies into the groups, to None: its state_dict has all
        that they hold, and it takes over what they hold here."""
        if group.get("shard_group") is self.options.shard_group is not None:
            group["shard_group"] = None

    def _complete_switches(self, group: dict[str, Any], defaults: dict[str, Any]) -> None:
        """Check them, and keep the learning rate that decoupled decay refers to, where schedulers keep it."""
        for key in SWITCHES:
            if key in defaults:
                group.setdefault(key, defaults[key])
            if group.get(key) and key not in self._algorithm.of(group).switches:
                raise ValueError(f"{self._name}: {key} is {group[key]!r}; accepted: False")
        if group.get("decouple_lr"):
            first = group.setdefault("initial_lr", float(group["lr"]))
            if not 0.0 < first < math.inf:
                raise ValueError(
                    f"{self._name}: decouple_lr is True and initial_lr, the first learning rate, is {first}; accepted: a number "
                    "above 0"
                )

    def check_params(self, group: dict[str, Any]) -> None:
        """Raise unless the kernels can update every parameter of the group that is trained. A frozen one may be of any dtype and
        class: :meth:`check_param` looks at it once it has a gradient or a state."""
        for position, param in enumerate(group["params"]):
            if param.requires_grad:
                self.check_param(group, position)

    def check_param(self, group: dict[str, Any], position: int) -> None:
        """Raise unless the kernels can update this parameter of the group."""
        label = group["param_names"][position] if "param_names" in group else f"params[{position}]"
        self._check_param(f"{self._name}: {label}", group["params"][position], group)

    def refuse_repeated(self, group: dict[str, Any], groups: list[dict[str, Any]]) -> None:
        """Raise if the new ``group`` has no parameters, or one that is in it twice or in one of ``groups``. Its ``params`` become
        a list."""
        label = f"{self._name}: param_groups[{len(groups)}]"
        if "params" not in group:
            raise KeyError(
                f"{label} has no 'params', only {', '.join(map(repr, group)) or 'nothing'}; accepted: a group with 'params'"
            )
        params = group["params"]
        if isinstance(params, set):
            return  # torch refuses it
        check_iterable(f"{label}['params']", params, "a tensor, model.parameters(), model.named_parameters()")
        group["params"] = [params] if isinstance(params, Tensor) else list(params)
        known = {id(param): f"{label} of group {i}" for i, old in enumerate(groups) for label, param in labels(old)}
        for label, param in labels(group):
            label = f"{label} of group {len(groups)}"
            first = known.setdefault(id(param), label)
            if first is not label:
                shape = list(param.shape) if isinstance(param, Tensor) else type_name(param)
                raise ValueError(
                    f"{self._name}: {label}, of shape {shape}, is the same parameter as {first}; accepted: each parameter once"
                )

    def check_numbers(self, groups: list[dict[str, Any]]) -> None:
        """Raise for a NaN, or what is no number, that was written into a group: it must not reach the weights."""
        for group in groups:
            for key in (*NUMBERS, "ema_decay", "max_grad_norm"):
                value = group.get(key)
                if value is None and (key not in group or key not in NUMBERS):
                    continue
                if key == "betas" and not isinstance(value, (tuple, list)):
                    check_betas(self._name, value, 2)
                for number in value if key == "betas" else (value,):
                    if not isinstance(number, (numbers.Real, Tensor)):  # NumPy's floats are Real too
                        raise TypeError(
                            f"{self._name}: {key} is {value!r}, of type {type_name(number)}; accepted: a number"
                        )
                    if isinstance(number, numbers.Real) and number != number:
                        raise ValueError(f"{self._name}: {key} is {value}; accepted: a number")

    def common(self, option: str, groups: list[dict[str, Any]]) -> Any:
        """The value of an option in all groups, or the optimizer's own if no group has it."""
        values = {group[option] for group in groups if option in group} or {getattr(self.options, option)}
        if len(values) > 1:
            raise ValueError(
                f"{self._name}: groups have the {option}s {sorted(values, key=str)}; accepted: the same one in all"
            )
        return values.pop()

    def _check_ranges(self, group: dict[str, Any], defaults: dict[str, Any]) -> None:
        """Raise unless the group's numbers are in range, in torch's wording; NaN never passes."""
        for key, words in _NOT_NEGATIVE.items():
            if key in group:
                self._check_range(key, group[key], math.inf, f"Invalid {words}")
        count = sum(name.startswith("beta") for name in self._algorithm.of(group).declared.options)
        betas = group.get("betas", ()) if count else ()
        if count and "betas" in group:
            check_betas(self._name, betas, count)
        for i, beta in enumerate(betas):
            self._check_range(f"betas[{i}]", beta, math.nextafter(1.0, 0.0), f"Invalid beta parameter at index {i}")

    def _check_range(self, label: str, value: Any, high: float, message: str) -> None:
        if isinstance(value, Tensor) and label != "lr":
            raise ValueError(f"{self._name}: {label} is a tensor; accepted: a number (only lr may be a tensor)")
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"{self._name}: lr is a tensor of {value.numel()} elements; accepted: 1-element")
        try:
            inside = 0.0 <= value <= high
        except TypeError:
            shown = f"{value!r}, of type {type_name(value)}"
            raise TypeError(f"{self._name}: {label} is {shown}; accepted: a number") from None
        if not inside:
            raise ValueError(f"{message}: {value}")

    def _check_param(self, label: str, param: Tensor, group: dict[str, Any]) -> None:
        if param.dtype not in lists.KERNEL_DTYPES:
            raise TypeError(f"{label} is {param.dtype}; accepted: {lists.names(lists.KERNEL_DTYPES)}")
        if param.layout is not torch.strided:
            raise TypeError(f"{label} has layout {param.layout}; accepted: torch.strided (dense)")
        if is_dtensor(param):
            if any(placement.is_partial() for placement in param.placements):
                raise ValueError(f"{label} has the placements {param.placements}; accepted: Shard and Replicate")
            if self.options.shadow_dtype is not None:
                raise ValueError(
                    f"{label} is a DTensor and shadow_dtype is {self.options.shadow_dtype}; accepted: None (whoever "
                    "gathers the pieces casts them: MixedPrecisionPolicy(param_dtype=...) of fully_shard)"
                )
            if moment_dtype(param.shape, state_dtype_of(group, self.options)) == torch.uint8 and not has_whole_blocks(
                param
            ):
                raise ValueError(
                    f"{label} has the placements {param.placements}, pieces of shape {list(local(param).shape)}, and state_dtype "
                    f"is '8bit'; accepted: contiguous pieces of whole blocks of {BLOCK} elements along the last dimension, or "
                    "another state_dtype"
                )
        elif is_traceable_wrapper_subclass(param):
            raise TypeError(
                f"{label} has type {type_name(param)}; accepted: plain tensors and DTensors "
                f"(torch.optim.{self._name}(fused=True) takes it, also under this package's GradScaler)"
            )
        if not is_lazy(param) and not lists.is_dense(local(param)):
            raise ValueError(
                f"{label} is {lists.describe(local(param))}, which leaves gaps in memory or overlaps itself; "
                "accepted: any order of dimensions that covers its memory once"
            )
        self._algorithm.of(group).check_param(label, param, group)


def labels(group: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The group's parameters, each with its name, if it was built from ``named_parameters()``, or its position."""
    names = group.get("param_names")
    for i, entry in enumerate(group["params"]):
        yield entry if isinstance(entry, tuple) else (names[i] if names else f"params[{i}]", entry)


_rate = operator.itemgetter("lr")
_NOT_NUMBERS = ("params", "param_names")  # the only values that may be lists: no op reads them


class PackedGroups:
    """The arguments of the op that come from the groups, and the values that they were computed from.

    Schedulers write into groups between any two steps, so every step compares, by identity: numbers cannot change in
    place. Learning rates are not compared, because they change with each step.
    """

    def __init__(self, groups: list[dict[str, Any]], algorithm: Algorithm, master_weights: str):
        self._master_weights = master_weights
        self._keys = list(chain.from_iterable(groups))
        self._values = list(chain.from_iterable([group.values() for group in groups]))
        self._lr_positions = [position for position, key in enumerate(self._keys) if key == "lr"]
        self._fixed = all(
            key in _NOT_NUMBERS or key == "lr" or _immutable(value)
            for key, value in zip(self._keys, self._values, strict=True)
        )
        stochastic = STOCHASTIC if master_weights == "none" else 0
        members = [algorithm.of(group) for group in groups]
        own = list(zip(members, groups, strict=True))
        #: By op the options of all groups: 0 in those of another op, and for a learning rate until it is set.
        self.options = {
            member.declared.name: [
                0.0 if name == "lr" or member is not other else member.option(group, name)
                for other, group in own
                for name in member.declared.options
            ]
            for member in algorithm.members
        }
        self.ema_decays = [float(group.get("ema_decay") or 0.0) for group in groups]
        common = [stochastic | (MAXIMIZE if group["maximize"] else 0) for group in groups]
        self.flags = [member.flags(group) | bits for (member, group), bits in zip(own, common, strict=True)]
        self.used = [member.moments(group, {}) for member, group in own]  # of each group: the moments
        self.constants = [member.constants(group) for member, group in own]
        self.averaged = [group.get("ema_decay") is not None for group in groups]

    def unchanged(self, groups: list[dict[str, Any]], master_weights: str) -> bool:
        """True if the groups still hold these numbers, up to the learning rates."""
        values = list(chain.from_iterable(map(dict.values, groups)))
        if not self._fixed or master_weights != self._master_weights or len(values) != len(self._values):
            return False
        for position in self._lr_positions:
            self._values[position] = values[position]
        return all(map(operator.is_, values, self._values)) and list(chain.from_iterable(groups)) == self._keys

    def set_rates(self, rates: list[float]) -> None:
        for options in self.options.values():
            options[:: len(options) // len(rates)] = rates

    def fixed_numbers(self) -> list[Any]:
        """All numbers but learning rates and weight decays."""
        options = []
        for values in self.options.values():
            count = len(values) // len(self.flags)
            options += [value for i, value in enumerate(values) if i % count not in (0, count - 1)]
        return [options, *map(list, (self.ema_decays, self.flags, self.used, self.averaged, self.constants))]


class HyperParameters:
    """Packs the numbers of the groups again, only when one of them was replaced."""

    def __init__(self, algorithm: Algorithm, options: Options, checks: GroupChecks):
        self._algorithm, self._options, self._checks = algorithm, options, checks
        self._packed: PackedGroups | None = None
        self._tensor_rates = False  # of the groups that were packed last
        self._decays: Sequence[Tensor] = ()

    def forget(self) -> None:
        self._packed = None

    @property
    def on_host(self) -> bool:
        """True if no number of the groups that were packed last is read on the device."""
        return not (self._decays or self._tensor_rates)

    def packed(self, groups: list[dict[str, Any]]) -> PackedGroups:
        """The numbers of the groups with the learning rates of now, checked. A rate that is a tensor counts as 0 here."""
        packed, master_weights = self._packed, self._options.master_weights
        if packed is None or not packed.unchanged(groups, master_weights):
            for group in groups:
                self._checks.release_shard_group(group)
            self._checks.check_numbers(groups)
            self._options.seed = self._checks.common("seed", groups)
            packed = self._packed = PackedGroups(groups, self._algorithm, master_weights)
        rates, odd = list(map(_rate, groups)), False
        self._tensor_rates = False
        for i, rate in enumerate(rates):
            if isinstance(rate, Tensor):
                self._tensor_rates, rates[i] = True, 0.0
            elif type(rate) is not float or rate != rate:
                odd = True
        if odd:
            self._checks.check_numbers(groups)
            rates = list(map(float, rates))
        packed.set_rates(rates)
        return packed

    def on_device(self, groups: list[dict[str, Any]], device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
        """Learning rates and weight decays that the op reads on the device: rates if any of them is a tensor, decays within
        :meth:`decays_from`."""
        if self.on_host:
            return [], []
        rates = list(map(_rate, groups))
        decays = [at(decay, device) for decay in self._decays]
        if not self._tensor_rates:
            return [], decays
        return [
            at(rate, device).float().reshape(())
            if isinstance(rate, Tensor)
            else torch.full((), rate, dtype=torch.float32, device=device)
            for rate in rates
        ], decays

    @contextmanager
    def decays_from(self, decays: Sequence[Tensor]) -> Iterator[None]:
        """Within the block steps read the weight decays from these tensors, one float64 scalar per group."""
        self._decays = decays
        try:
            yield
        finally:
            self._decays = ()


def _immutable(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_immutable, value))
    return value is None or isinstance(value, (str, numbers.Real, ProcessGroup, torch.dtype))
