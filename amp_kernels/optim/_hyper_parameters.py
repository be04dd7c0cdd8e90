"""The numbers in the param groups as the update ops take them, made anew only when one of them was replaced."""

from __future__ import annotations

import numbers
import operator
from itertools import chain
from typing import Any

_NOT_NUMBERS = ("params", "param_names")  # the only values that may be lists: they are none of the ops' business


class HyperParameters:
    """What was computed from the groups, and the values it was computed from.

    Schedulers write into groups between any two steps, so every step compares, by identity: numbers cannot change in
    place. Learning rates do not take part, because they change with each step; :attr:`rates` reads them.
    """

    def __init__(self, groups: list[dict[str, Any]], *others: Any):
        self.others = others
        self.keys = list(chain.from_iterable(groups))
        self.values = list(chain.from_iterable([group.values() for group in groups]))
        self.lr_positions = [position for position, key in enumerate(self.keys) if key == "lr"]
        self.fixed = all(
            key in _NOT_NUMBERS or key == "lr" or _immutable(value)
            for key, value in zip(self.keys, self.values, strict=True)
        )
        self.options: list[float] = []  # as the op takes them
        self.decays: list[float] = []
        self.flags: list[int] = []
        self.used: list[tuple[str, ...]] = []  # of each group: the moments
        self.averaged: list[bool] = []

    def unchanged(self, groups: list[dict[str, Any]], *others: Any) -> bool:
        """Whether they are those of ``groups`` still, up to the learning rates."""
        values = list(chain.from_iterable([group.values() for group in groups]))
        if not self.fixed or others != self.others or len(values) != len(self.values):
            return False
        for position in self.lr_positions:
            self.values[position] = values[position]
        return all(map(operator.is_, values, self.values)) and list(chain.from_iterable(groups)) == self.keys


def _immutable(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_immutable, value))
    return value is None or isinstance(value, (str, numbers.Real))
