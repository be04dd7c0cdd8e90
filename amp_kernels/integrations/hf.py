"""For the Trainer of Hugging Face."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Trainer, TrainerCallback

from ._figures import Figures


class Callback(TrainerCallback):
    """Adds to each record of the Trainer's log that has a loss: ``loss_scale`` and ``skipped_steps`` (under ``fp16=True``),
    ``steps_per_second``, ``samples_per_second``, ``tokens_per_second`` (with ``include_num_input_tokens_seen``) and
    ``peak_memory_gib``. Rates are those since the last record. The Trainer itself logs ``grad_norm``, unscaled and before clipping.

    :meth:`attach` puts it before the reporters of ``report_to``. In the Trainer's ``callbacks=`` it comes after them: its figures are then
    printed and in ``state.log_history``, and TensorBoard and W&B lack them.
    """

    def attach(self, trainer: Trainer) -> Callback:
        """Add this callback to a Trainer, before all others. Returns the callback."""
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._figures, self._tokens = Figures(), state.num_input_tokens_seen

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self._figures.before_step(
            getattr(optimizer, "scaler", None)
        )  # the optimizer is accelerate's, which holds the scaler

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._figures.after_step()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if hasattr(self, "_figures"):  # also without training
            self._figures.pause()

    on_save = on_evaluate

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "loss" not in logs:
            return  # of an evaluation, or the summary
        batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        counts = {"samples": self._figures.steps * batch, "tokens": state.num_input_tokens_seen - self._tokens}
        self._tokens = state.num_input_tokens_seen
        figures = self._figures.take(**{name: count for name, count in counts.items() if count}).items()
        found = {name: value.item() if isinstance(value, Tensor) else value for name, value in figures}
        self._figures.restart()
        logs.update(found)
        state.log_history[-1].update(found)
