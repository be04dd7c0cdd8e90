"""The numbers of the parameter groups in the form of the update ops."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .._dispatch.devices import at
from .._updates.state import MAXIMIZE, STOCHASTIC
from ._algorithm import Algorithm
from ._groups import GroupChecks
from ._options import Options

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
        self._names = list(algorithm.declared.options)
        stochastic = STOCHASTIC if master_weights == "none" else 0
        self.options = [_option(group, name) for group in groups for name in self._names]
        self.ema_decays = [float(group.get("ema_decay") or 0.0) for group in groups]
        self.flags = [algorithm.flags(group) | stochastic | (MAXIMIZE if group["maximize"] else 0) for group in groups]
        self.used = [algorithm.moments(group, {}) for group in groups]  # of each group: the moments
        self.averaged = [group.get("ema_decay") is not None for group in groups]

    def unchanged(self, groups: list[dict[str, Any]], master_weights: str) -> bool:
        """Whether the groups still hold these numbers, up to the learning rates."""
        values = list(chain.from_iterable([group.values() for group in groups]))
        if not self._fixed or master_weights != self._master_weights or len(values) != len(self._values):
            return False
        for position in self._lr_positions:
            self._values[position] = values[position]
        return all(map(operator.is_, values, self._values)) and list(chain.from_iterable(groups)) == self._keys

    def set_rates(self, rates: list[float]) -> None:
        self.options[:: len(self._names)] = rates

    def fixed_numbers(self) -> list[Any]:
        """All numbers but learning rates and weight decays."""
        count = len(self._names)
        options = [value for i, value in enumerate(self.options) if i % count not in (0, count - 1)]
        return [options, *map(list, (self.ema_decays, self.flags, self.used, self.averaged))]


class HyperParameters:
    """Packs the numbers of the groups, anew only when one of them was replaced."""

    def __init__(self, algorithm: Algorithm, options: Options, checks: GroupChecks):
        self._algorithm, self._options, self._checks = algorithm, options, checks
        self._packed: PackedGroups | None = None
        self._decays: Sequence[Tensor] = ()

    def forget(self) -> None:
        self._packed = None

    def packed(self, groups: list[dict[str, Any]]) -> PackedGroups:
        """The numbers of the groups with the learning rates of now, checked. A rate that is a tensor counts as 0 here."""
        packed, master_weights = self._packed, self._options.master_weights
        if packed is None or not packed.unchanged(groups, master_weights):
            self._checks.check_numbers(groups)
            packed = self._packed = PackedGroups(groups, self._algorithm, master_weights)
        rates = [group["lr"] for group in groups]
        rates = [0.0 if isinstance(rate, Tensor) else rate for rate in rates]
        if not all(type(rate) is float and rate == rate for rate in rates):
            self._checks.check_numbers(groups)
        packed.set_rates([float(rate) for rate in rates])
        return packed

    def on_device(self, groups: list[dict[str, Any]], device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
        """Learning rates and weight decays that the op reads on the device: rates if any of them is a tensor, decays within
        :meth:`decays_from`."""
        rates = [group["lr"] for group in groups]
        decays = [at(decay, device) for decay in self._decays]
        if not any(isinstance(rate, Tensor) for rate in rates):
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


def _option(group: dict[str, Any], name: str) -> float:
    """The group's value of an option that the op declares."""
    if name == "lr":
        return 0.0  # set in each step
    return float(group["betas"][int(name[4:]) - 1] if name in ("beta1", "beta2") else group[name])


def _immutable(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_immutable, value))
    return value is None or isinstance(value, (str, numbers.Real))
