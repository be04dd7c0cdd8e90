"""One run of the training benchmark: one provider, one precision, from the seed to the validation loss. It can be interrupted and resumed.

`save()` writes everything a step depends on: parameters, optimizer, scaler, random generators and the step number, which
is also the position in the data. Histories are kept on the device, so that a step never waits for the host.
"""

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import amp_kernels as ak

from ..harness.case import DTYPES
from ..harness.memory import cpu_peak
from .data import Text
from .gpt import GPT, MODELS
from .progress import Progress
from .trainers import TRAINERS

SEGMENT = 10  # steps between two synchronizations: the unit of timing and of the progress bar
EVALUATIONS = 4
KEPT = 2  # checkpoints: the newest, and one should that be damaged


@dataclass(frozen=True)
class Settings:
    """Everything but the text that decides the outcome of a run, as plain values: they travel in the checkpoint."""

    model: str
    steps: int
    dtypes: tuple[str, ...]
    providers: tuple[str, ...]
    seed: int
    deterministic: bool
    device: str


class Trial:
    """Trains `settings.model` with `provider` in `dtype` (a key of DTYPES); `checkpoint` is the file of a run to
    continue; `layout` places the model on ranks (ranks.py)."""

    def __init__(
        self, settings: Settings, text: Text, provider: str, dtype: str, checkpoint: Path | None = None, layout=None
    ):
        self.settings, self.text, self.provider, self.dtype = settings, text, provider, dtype
        self.config = MODELS[settings.model]
        self.device = torch.device(settings.device)
        self.scaled = dtype == "fp16"
        self.name = f"{dtype} {provider}"
        self.points = {settings.steps * (i + 1) // EVALUATIONS for i in range(EVALUATIONS)} - {0}

        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        torch.manual_seed(settings.seed)
        model = GPT(self.config).to(self.device)  # drawn on the CPU: the same weights on every device
        self.trainer = TRAINERS[provider](
            model,
            self.device,
            self.config.lr,
            scaled=self.scaled,
            growth_interval=self.config.growth_interval,
            layout=layout,
        )
        self.losses = torch.full((settings.steps,), float("nan"), device=self.device)
        self.scales = torch.full((settings.steps,), float("nan"), device=self.device)
        self.validation: list[list[float]] = []  # [step, loss]
        self.step_seconds: list[float] = []  # one mean per timed segment
        self.seconds = 0.0
        self.peak_bytes = 0
        self.step = 0
        if checkpoint is not None:
            self._load(checkpoint)
        self.first_step = self.step

    def train(
        self, interrupted: Callable[[], bool] = lambda: False, save: Callable[[], None] | None = None, every: int = 1
    ) -> bool:
        """Runs until the end (True) or until `interrupted()` (False), which is asked after every step. Calls `save` at the
        first synchronization after `every` steps or more."""
        saved = self.step
        progress = self._progress()
        try:
            while self.step < self.settings.steps:
                stopped = self._segment(interrupted)
                if self.step in self.points and not any(step == self.step for step, _ in self.validation):
                    self.validation.append([self.step, self._validate()])
                progress.update(self.step, **self._figures())
                if stopped:
                    return False
                if save is not None and self.step - saved >= every:
                    save()
                    saved = self.step
            return True
        finally:
            self.peak_bytes = max(self.peak_bytes, self._cuda_peak())
            progress.close()

    def _segment(self, interrupted: Callable[[], bool]) -> bool:
        """Steps up to the next synchronization; True if interrupted."""
        start = self.step
        end = min(p for p in {(start // SEGMENT + 1) * SEGMENT, *self.points} if p > start)
        self._synchronize()
        begin = time.perf_counter()
        stopped = False
        while self.step < end and not stopped:
            # The second step of a process is the first that finds optimizer state: its memory is every later step's.
            second = self.step == min(self.first_step + 1, self.settings.steps - 1)
            with self._count() if second else contextlib.nullcontext():
                self._train_step()
            stopped = interrupted()
        self._synchronize()
        elapsed = time.perf_counter() - begin
        self.seconds += elapsed
        # The first segment of a process holds warm-up and the memory count; an interrupted one may be a single step.
        if start > self.first_step and self.step == end:
            self.step_seconds.append(elapsed / (end - start))
        return stopped

    def _train_step(self) -> None:
        tokens, targets = self._to_device(self._batch())
        self.trainer.set_lr(self.config.lr_at(self.step, self.settings.steps))
        with self._autocast():
            loss = self.trainer.model(tokens, targets)
        self.trainer.update(loss)
        self.losses[self.step] = loss.detach()
        self.scales[self.step] = self.trainer.scale()
        self.step += 1

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.text.batch(self.settings.seed, self.step, self.config.batch, self.config.context)

    def _progress(self) -> Progress:
        return Progress(self.name, self.settings.steps, self.step)

    @torch.no_grad()
    def _validate(self) -> float:
        """Mean loss over the validation windows in the run's own precision."""
        self.trainer.model.eval()
        losses = []
        for batch in self.text.validation_batches(self.config.batch, self.config.context, self.config.eval_batches):
            with self._autocast():
                losses.append(self.trainer.model(*self._to_device(batch)))
        self.trainer.model.train()
        return torch.stack(losses).double().mean().item()

    def save(self, path: Path, **extra: Any) -> None:
        """Writes a checkpoint, with `extra` in addition to what the run itself needs to continue bit for bit."""
        ak.checkpoint.save(path, **self.trainer.parts(), extra={**extra, "running": self._running()}, keep=KEPT)

    def _running(self) -> dict:
        """State of the loop, without the trainer's parts."""
        return {
            "provider": self.provider,
            "dtype": self.dtype,
            "step": self.step,
            "losses": self.losses,
            "scales": self.scales,
            "validation": self.validation,
            "step_seconds": self.step_seconds,
            "seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
        }

    def _load(self, path: Path) -> None:
        self._restore(ak.checkpoint.load(path, **self.trainer.parts())["running"])

    def _restore(self, saved: dict) -> None:
        self.step = saved["step"]
        self.losses.copy_(saved["losses"])
        self.scales.copy_(saved["scales"])
        self.validation = saved["validation"]
        self.step_seconds = saved["step_seconds"]
        self.seconds, self.peak_bytes = saved["seconds"], saved["peak_bytes"]

    def result(self) -> dict:
        """The run as plain values, for the table, the plot and the JSON record."""
        per_step = statistics.median(self.step_seconds) if self.step_seconds else self.seconds / max(self.step, 1)
        return {
            "name": self.name,
            "provider": self.provider,
            "dtype": self.dtype,
            "scaled": self.scaled,
            "steps": self.step,
            "validation_loss": self.validation[-1][1],
            "tokens_per_second": self.config.batch * self.config.context / per_step,
            "seconds": self.seconds,
            "peak_memory_bytes": self.peak_bytes,
            "final_scale": self.scales[-1].item() if self.scaled else None,
            "skipped_steps": self.step - self.trainer.updates(),
            "validation": self.validation,
            "losses": self.losses.tolist(),
            "scales": self.scales.tolist() if self.scaled else None,
        }

    def _figures(self) -> dict[str, str]:
        figures = {"loss": f"{self.losses[self.step - 1].item():.3f}"}
        if self.scaled:
            figures["scale"] = f"2^{self.scales[self.step - 1].log2().item():.0f}"
            figures["skipped"] = str(self.step - self.trainer.updates())
        if self.step_seconds:
            figures["steps/s"] = f"{1 / self.step_seconds[-1]:.1f}"
        return figures

    def _autocast(self):
        dtype = DTYPES[self.dtype]
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype != torch.float32)

    def _to_device(self, batch: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.to(self.device) for tensor in batch]

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _cuda_peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0

    @contextlib.contextmanager
    def _count(self):
        """Counts the peak memory of a step on the CPU: held memory and the most that torch's allocator held on top of it."""
        if self.device.type == "cuda":
            yield
            return
        held = self.trainer.held_bytes()
        with cpu_peak() as peak:
            yield
        self.peak_bytes = max(self.peak_bytes, held + peak[0])
