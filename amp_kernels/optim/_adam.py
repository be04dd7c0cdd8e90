"""What Adam and AdamW share: all but their signatures and the way the decay enters, which is a flag of each group."""

from __future__ import annotations

from typing import Any

from ..ops._blocks import COUPLED_DECAY
from ..ops.adamw import op as adamw_
from ._base import FusedOptimizer


class AdamStep(FusedOptimizer):
    """The state, the checks and the step of both."""

    _op = adamw_
    _moment_arguments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    _required = ("step", "exp_avg", "exp_avg_sq")

    def _check_group(self, group: dict[str, Any]) -> None:
        self._check_float("weight_decay", group["weight_decay"])
        self._check_range("learning rate", group["lr"])
        self._check_range("epsilon value", group["eps"])
        self._check_range("weight_decay value", group["weight_decay"])
        self._check_betas(group["betas"])

    def _moment_names(self, group: dict[str, Any], loaded: dict[str, Any]) -> tuple[str, ...]:
        if group.get("amsgrad") or loaded.get("max_exp_avg_sq") is not None:
            return "exp_avg", "exp_avg_sq", "max_exp_avg_sq"
        return "exp_avg", "exp_avg_sq"

    def _flags(self) -> list[int]:
        coupled = [0 if group["decoupled_weight_decay"] else COUPLED_DECAY for group in self.param_groups]
        return [flags | extra for flags, extra in zip(super()._flags(), coupled, strict=True)]

    def _hyper(self) -> tuple[list[float], ...]:
        return *self._betas(), self._numbers("eps"), self._numbers("weight_decay")
