"""The rule by which a loss scale moves, beyond torch's factors: bounds and hysteresis."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from .._checks import lists
from .._raw.update_scale import HYSTERESIS

_RANGES = {"growth_factor": (1.0, math.inf), "backoff_factor": (math.ulp(0.0), 1.0)}
_OPTIONS = ("min_scale", "max_scale", "hysteresis", "consecutive_hysteresis")


class ScaleRule:
    """The options of :class:`amp_kernels.GradScaler` that torch's scaler lacks, and the count of overflows on the device."""

    def __init__(
        self, min_scale: float, max_scale: float, hysteresis: int, consecutive_hysteresis: bool, dynamic: bool
    ):
        lists.check_number("GradScaler", "min_scale", min_scale, 0.0)
        lists.check_number("GradScaler", "max_scale", max_scale, min_scale)
        lists.check_count("GradScaler", "hysteresis", hysteresis, *HYSTERESIS)
        self.min_scale, self.max_scale, self.hysteresis = min_scale, max_scale, hysteresis
        self.consecutive_hysteresis, self.dynamic = bool(consecutive_hysteresis), dynamic
        self.tracker: Tensor | None = None  # int32: overflows until the scale backs off
        self._start = hysteresis

    def check_torchs(self, init_scale: float, backoff_factor: float, growth_interval: int) -> None:
        """Check the numbers of torch's scaler, which lets NaN and a scale out of range pass."""
        least = max(self.min_scale, math.ulp(0.0))  # below it, overflows would raise the scale
        lists.check_number("GradScaler", "init_scale", init_scale, least, torch.finfo(torch.float32).max)
        lists.check_number("GradScaler", "backoff_factor", backoff_factor, math.ulp(0.0))
        lists.check_count("GradScaler", "growth_interval", growth_interval, 0)

    def create_tracker(self, device: torch.device) -> None:
        self.tracker = torch.full((), self._start, dtype=torch.int32, device=device)

    def state_dict(self) -> dict[str, Any]:
        """The options and the count, as numbers; waits for the device."""
        count = self._start if self.tracker is None else int(self.tracker.item())
        return {**{name: getattr(self, name) for name in _OPTIONS}, "_hysteresis_tracker": count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the entries that are there. Without a count it starts at the hysteresis."""
        for name in _OPTIONS:
            setattr(self, name, state.get(name, getattr(self, name)))
        self._start = state.get("_hysteresis_tracker", self.hysteresis)
        if self.tracker is not None:
            self.tracker.fill_(self._start)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "tracker": None, "_start": self.state_dict()["_hysteresis_tracker"]}


class CheckedSetters(GradScaler):
    """torch's scaler, whose setters check their number: an update on the device cannot."""

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor of a growth, at least 1."""
        check_update_numbers("GradScaler.set_growth_factor", growth_factor=new_factor)
        super().set_growth_factor(new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor of a backoff, above 0 and at most 1."""
        check_update_numbers("GradScaler.set_backoff_factor", backoff_factor=new_factor)
        super().set_backoff_factor(new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the iterations without overflow before a growth; 0: none."""
        check_update_numbers("GradScaler.set_growth_interval", growth_interval=new_interval)
        super().set_growth_interval(new_interval)


def check_factors(growth_factor: float, backoff_factor: float) -> None:
    """Refuse NaN before torch's checks, which accept it in some versions and fail without a message in others."""
    lists.check_number("GradScaler", "growth_factor", growth_factor)
    lists.check_number("GradScaler", "backoff_factor", backoff_factor)


def check_update_numbers(name: str, **numbers: float) -> None:
    """Refuse numbers with which an update would spoil the scale. ``name``: of the function, for the error."""
    for number, value in numbers.items():
        if number == "growth_interval":
            lists.check_count(name, number, value, 0)
        else:
            lists.check_number(name, number, value, *_RANGES[number])


def check_state(state: dict[str, Any]) -> None:
    """Refuse the state of another object, and numbers of a checkpoint that torch's scaler would take and fail with later."""
    missing = [
        key
        for key in ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
        if key not in state
    ]
    if missing:
        raise ValueError(
            f"GradScaler.load_state_dict: state_dict has no {missing[0]!r}, only {lists.some(list(map(repr, state)), most=4)}; "
            "accepted: the state_dict of a gradient scaler"
        )
    lists.check_number("GradScaler.load_state_dict", "scale", state["scale"], 0.0)
    lists.check_count("GradScaler.load_state_dict", "_growth_tracker", state["_growth_tracker"], 0)
    check_update_numbers("GradScaler.load_state_dict", **{name: state[name] for name in (*_RANGES, "growth_interval")})


def acceptable_scale(new_scale: float | Tensor) -> float | Tensor:
    """A user's new scale in a form that torch's scaler takes."""
    if not isinstance(new_scale, Tensor):
        lists.check_number("GradScaler.update", "new_scale", new_scale, math.ulp(0.0))
        return float(new_scale)
    return new_scale.reshape(()) if new_scale.numel() == 1 else new_scale  # torch accepts shape [1], but cannot copy it
