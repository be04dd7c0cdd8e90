"""What may stand in an optimizer and its groups: options and numbers, completed and checked before anything changes."""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from torch import Tensor

from .._dispatch.compiled import OneOpEach
from ._options import DEFAULTS, GROUP_OPTIONS, MixedPrecision, check_group_options, complete, misspelt

#: Hyper-parameters that must not be below 0, and torch's words for them.
_NOT_NEGATIVE = {
    "lr": "learning rate",
    "momentum": "momentum value",
    "eps": "epsilon value",
    "weight_decay": "weight_decay value",
}
NUMBERS = (*_NOT_NEGATIVE, "betas", "dampening")


class CheckedGroups(OneOpEach, torch.optim.Optimizer):
    """The part of :class:`~amp_kernels.optim._base.FusedOptimizer` that knows options and groups."""

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _params(self) -> list[Tensor]:
        """All parameters, in the order of their numbers in the state_dict."""
        return [param for group in self.param_groups for param in group["params"]]

    def _set_options(
        self, options: MixedPrecision, foreach: bool | None, fused: bool | None, differentiable: bool
    ) -> None:
        """Check and keep what all constructors take; ``foreach`` and ``fused`` are hints without effect."""
        options = complete(self._name, options)
        if differentiable:
            raise RuntimeError(f"{self._name}: differentiable is True; accepted: False (the step is one fused op)")
        if fused and foreach:
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
        self.master_weights = options["master_weights"]
        self.shadow_dtype = options["shadow_dtype"]
        self.state_dtype = options["state_dtype"]
        self.max_grad_norm = options["max_grad_norm"]
        self.skip_nonfinite = bool(options["skip_nonfinite"])
        self.ema_decay = options["ema_decay"]
        self.unscale_grads = bool(options["unscale_grads"])
        self.zero_grads = bool(options["zero_grads"])
        self.shard_group = options["shard_group"]
        self.seed = options["seed"]

    def _shared_options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in DEFAULTS}

    def __repr__(self) -> str:
        head, *groups = super().__repr__().split("\n", 1)
        return "\n".join([head, *(f"    {name}: {value}" for name, value in self._shared_options().items()), *groups])

    def _refuse_misspelt(self, group: dict[str, Any]) -> None:
        """Raise for a key of a new group that nothing would read because it misspells an option."""
        options = {**self.defaults, **DEFAULTS}
        for key in group:
            right = misspelt(key, options) if isinstance(key, str) and key not in options else None
            if right is not None:
                place = "in the constructor" if right in DEFAULTS and right not in GROUP_OPTIONS else "in a group"
                raise ValueError(
                    f"{self._name}: param_groups[{len(self.param_groups)}] has the key {key!r}, which is no option; accepted: "
                    f"{right} ({place})"
                )

    def _complete_group(self, group: dict[str, Any]) -> None:
        """Give a new or loaded group the options that live in groups, if they are in use (otherwise the groups have the
        keys of torch's), and check all that it holds."""
        if self.ema_decay is not None:
            group.setdefault("ema_decay", self.ema_decay)
        if self.master_weights == "none":
            group.setdefault("seed", self.seed)
        check_group_options(self._name, group)
        for name, value in self._shared_options().items():
            if name in group and name not in GROUP_OPTIONS and group.pop(name) != value:
                raise ValueError(
                    f"{self._name}: {name} is an option of the optimizer, where it is {value!r}, and not of a group; "
                    f"accepted in groups: {', '.join(GROUP_OPTIONS)}"
                )
        missing = [key for key in NUMBERS if key in self.__dict__.get("defaults", ()) and key not in group]
        if missing:
            raise ValueError(
                f"{self._name}: a group lacks {', '.join(missing)}; accepted: groups of the same kind of optimizer"
            )
        self._check_group(group)

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise unless the group's numbers are in range, in torch's wording; NaN never passes."""
        for key, words in _NOT_NEGATIVE.items():
            if key in group:
                self._check_range(key, group[key], math.inf, f"Invalid {words}")
        betas, usual = group.get("betas", ()), self.__dict__.get("defaults", {}).get("betas")
        if usual is not None and not (isinstance(betas, (tuple, list)) and len(betas) == len(usual)):
            raise ValueError(f"{self._name}: betas is {betas!r}; accepted: {len(usual)} numbers")
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
            kind = type(value).__name__
            raise TypeError(f"{self._name}: {label} is {value!r}, a {kind}; accepted: a number") from None
        if not inside:
            raise ValueError(f"{message}: {value}")

    def _check_numbers(self) -> None:
        """Schedulers write into groups; a NaN or a text that got in there must not reach the weights."""
        for group in self.param_groups:
            for key in (*NUMBERS, "ema_decay"):
                value = group.get(key)
                for number in value if isinstance(value, (tuple, list)) else (value,):
                    if isinstance(number, str):
                        raise TypeError(f"{self._name}: {key} is {value!r}, a str; accepted: a number")
                    if isinstance(number, numbers.Real) and number != number:  # NumPy's floats are Real too
                        raise ValueError(f"{self._name}: {key} is {value}")

    def _common(self, name: str, groups: list[dict[str, Any]]) -> Any:
        """The option ``name`` of all groups, the optimizer's own where none has it."""
        values = {group[name] for group in groups if name in group} or {getattr(self, name)}
        if len(values) > 1:
            raise ValueError(
                f"{self._name}: groups have the {name}s {sorted(values, key=str)}; accepted: the same one in all"
            )
        return values.pop()
