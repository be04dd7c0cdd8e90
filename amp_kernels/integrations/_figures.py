"""The figures that all callbacks log."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from ..numerics.monitor import peak_memory


class Figures:
    """Counts steps, their seconds and the skipped ones. Nothing waits for the device but a use of the reported tensors."""

    def __init__(self) -> None:
        self.stepping = False  # between before_step and after_step
        self._scaler: torch.amp.GradScaler | None = None
        self._skipped: Tensor | float = 0.0
        self.restart()

    def restart(self) -> None:
        """Rates are those of the steps from now on."""
        self.steps, self._seconds, self._then = 0, 0.0, time.perf_counter()

    def pause(self) -> None:
        """Leave out the time since the last step: it was an evaluation or a checkpoint."""
        self._then = time.perf_counter()

    def before_step(self, scaler: torch.amp.GradScaler | None) -> None:
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.scale = None if self._scaler is None else self._scaler._scale.clone()
        self.stepping = True

    def after_step(self) -> None:
        self.steps, self.stepping = self.steps + 1, False
        self._tick()
        if self._scaler is not None:  # torch's scaler has no count; it lowers the scale in each skipped step
            counted = getattr(self._scaler, "skipped_steps", None)
            self._skipped = self._skipped + (self._scaler._scale < self.scale) if counted is None else counted.float()

    def _tick(self) -> None:
        now = time.perf_counter()
        self._seconds, self._then = self._seconds + now - self._then, now

    def take(self, **counts: int) -> dict[str, Tensor | float]:
        """The figures by their names; rates are those of the steps and of ``counts``."""
        self._tick()
        found: dict[str, Tensor | float] = {}
        for name, count in {"steps": self.steps, **counts}.items():
            found[f"{name}_per_second"] = count / self._seconds
        if self._scaler is not None:
            found |= {"loss_scale": self._scaler._scale.clone(), "skipped_steps": self._skipped}
        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        peak = peak_memory(torch.device("cuda" if on_gpu else "cpu"))
        return {**found, "peak_memory_gib": peak / 2**30}
