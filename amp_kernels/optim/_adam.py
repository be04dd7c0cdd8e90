"""What Adam and AdamW share: all but their signatures and the way the decay enters, which is a flag of each group."""

from __future__ import annotations

from typing import Any

from .._updates.adamw import adamw_
from .._updates.state import COUPLED_DECAY
from ._base import FusedOptimizer


class AdamStep(FusedOptimizer):
    """The state, the checks and the step of both."""

    _op = adamw_
    _required = ("step",)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if not group.get("bias_correction", True):  # of Apex
            raise ValueError(f"{self._name}: bias_correction is False; accepted: True")

    def _moment_names(self, group: dict[str, Any], loaded: dict[str, Any]) -> tuple[str, ...]:
        if group.get("amsgrad") or loaded.get("max_exp_avg_sq") is not None:
            return self._op.declared.moments
        return self._op.declared.moments[:2]

    def _flags(self, group: dict[str, Any]) -> int:
        return super()._flags(group) | (0 if group["decoupled_weight_decay"] else COUPLED_DECAY)
