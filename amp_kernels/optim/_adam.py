"""What Adam and AdamW share: all but their signatures and the way the decay enters, which is a flag of each group."""

from __future__ import annotations

from typing import Any

from ..ops._blocks import COUPLED_DECAY
from ..ops.adamw import op as adamw_
from ._base import FusedOptimizer


class AdamStep(FusedOptimizer):
    """The state, the checks and the step of both."""

    _required = ("step", "exp_avg", "exp_avg_sq")

    def _check_group(self, group: dict[str, Any]) -> None:
        self._check_float("weight_decay", group["weight_decay"])
        self._check_range("learning rate", group["lr"])
        self._check_range("epsilon value", group["eps"])
        self._check_range("weight_decay value", group["weight_decay"])
        self._check_betas(group["betas"])
        if group.get("amsgrad"):
            raise ValueError(f"{self._name}: amsgrad is True; accepted: False (torch.optim.{self._name} has it)")

    def _moment_names(self, group: dict[str, Any], loaded: dict[str, Any]) -> tuple[str, ...]:
        return "exp_avg", "exp_avg_sq"

    def _flags(self) -> list[int]:
        coupled = [0 if group["decoupled_weight_decay"] else COUPLED_DECAY for group in self.param_groups]
        return [flags | extra for flags, extra in zip(super()._flags(), coupled, strict=True)]

    def _update(self, batch, grads, tensors, max_norm) -> None:
        adamw_(
            batch.params,
            grads,
            [block.moments["exp_avg"] for block in batch.blocks],
            [block.moments["exp_avg_sq"] for block in batch.blocks],
            [block.steps for block in batch.blocks],
            [block.master for block in batch.blocks],
            [block.shadow for block in batch.blocks],
            batch.layout,
            *tensors,
            self._host_lrs(),
            *self._betas(),
            self._numbers("eps"),
            self._numbers("weight_decay"),
            self._flags(),
            max_norm,
        )
