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
        super()._check_group(group)
        if not group.get("bias_correction", True):  # of Apex
            raise ValueError(f"{self._name}: bias_correction is False; accepted: True")

    def _moment_names(self, group: dict[str, Any], loaded: dict[str, Any]) -> tuple[str, ...]:
        if group.get("amsgrad") or loaded.get("max_exp_avg_sq") is not None:
            return self._moment_arguments
        return self._moment_arguments[:2]

    def _flags(self, group: dict[str, Any]) -> int:
        return super()._flags(group) | (0 if group["decoupled_weight_decay"] else COUPLED_DECAY)

    def _hyper(self) -> tuple[list[float], ...]:
        return *self._betas(), self._numbers("eps"), self._numbers("weight_decay")
