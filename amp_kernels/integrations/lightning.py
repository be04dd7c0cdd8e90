"""For Lightning's Trainer."""

from __future__ import annotations

from typing import Any

import lightning
from torch.optim import Optimizer

from ..amp import get_total_norm
from ..optim import refresh_shadows
from ._figures import Figures


class Callback(lightning.Callback):
    """Logs after each step, as ``self.log`` of the module does: ``grad_norm`` (unscaled, before clipping, for one read of the gradients),
    ``loss_scale`` and ``skipped_steps`` (with a scaler in the precision plugin), ``steps_per_second`` (of the epoch) and
    ``peak_memory_gib``.

    It also refreshes the 16-bit copies of ``shadow_dtype`` where callbacks that average weights write them: before the first batch of an
    epoch and at the end of ``fit``. Its place among the callbacks does not matter.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._figures = Figures()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            refresh_shadows(pl_module)
            self._figures.restart()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        self._figures.before_step(getattr(trainer.precision_plugin, "scaler", None))
        self._norm = get_total_norm(
            [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        )
        if self._figures.scale is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            self._norm = self._norm / self._figures.scale  # it unscales inside its step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._figures.stepping:  # not a batch that only adds to the gradients
            self._figures.after_step()
            pl_module.log_dict({"grad_norm": self._norm, **self._figures.take()})

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if hasattr(self, "_figures"):  # the sanity check comes before the training
            self._figures.pause()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        refresh_shadows(pl_module)
