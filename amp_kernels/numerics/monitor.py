"""A run watched step by step, without making the host wait for the device."""

from __future__ import annotations

import html
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._checks import lists
from .._dispatch.devices import at
from .._raw.check_and_norm import check_and_norm
from .._raw.exponent_histogram import INFINITY_BIN, LEAST_EXPONENT, exponent_histogram
from ..amp._readback import AsyncReader
from ..optim._base import FusedOptimizer
from . import _svg
from ._statistics import FLUSHED_BELOW, shifted, values_of

#: What the device tells of a step, in this order.
_FIGURES = ("loss", "scale", "skipped", "grad_norm", "update_ratio", "flushed_share")

#: Optimizers of torch whose fused step writes the gradients back, divided by the scale that it was given.
_DIVIDING = (torch.optim.Adam, torch.optim.SGD)


class StepMonitor:
    """Record loss, loss scale, skipped steps, gradient norm, update-to-weight ratio, share of flushed gradients,
    tokens/s and peak memory of every step; write them as they come, and a report with curves at the end.

    Call :meth:`step` once an iteration, after ``scaler.update()`` (or ``optimizer.step()``) and before ``zero_grad``.
    Figures stay on the device and are read when they have arrived, some steps late; nothing waits.

    Args:
        optimizer: whose parameters and gradients are measured.
        scaler: the gradient scaler, if there is one, of torch or of this package.
        unscaled: whether ``.grad`` no longer carries the loss scale when :meth:`step` is called, also of a skipped step. By
            default so for optimizers that are not fused, and not for those of this package; torch's fused ones divide
            the gradients of the steps that they take. A call of ``scaler.unscale_`` makes it so for all.
        every: the update-to-weight ratio and the share of flushed gradients are measured in one step of so many; they
            cost a copy of the weights and two reads. 0: never.
        jsonl: write a line of JSON for each step to this file.
        report: write an HTML report to this file when the monitor is closed: curves and a table of epochs, in one file
            that opens from a disk.
        tensorboard: write to this folder for TensorBoard; needs the package ``tensorboard``.
        show: called with the record of each step when it has arrived, such as ``lambda r: bar.set_postfix(loss=r["loss"])``.

    Attributes:
        records: a dict for each step of which the host has heard: ``step``, ``epoch``, ``loss``, ``scale`` (1 without a
            scaler), ``skipped`` (0 or 1), ``grad_norm`` (unscaled, before clipping), ``update_ratio`` (norm of the
            update over norm of the weights), ``flushed_share`` (of gradients at the current scale that are not zero,
            what FP16 rounds to zero), ``tokens_per_second`` and ``peak_memory`` (bytes of the CUDA allocator). NaN is
            what was not measured.

    Raises:
        ValueError: ``every`` is negative.
        ModuleNotFoundError: ``tensorboard`` is given and not installed.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(4))
        >>> optimizer = ak.optim.SGD([weight], lr=0.5)
        >>> with ak.numerics.StepMonitor(optimizer, every=1) as monitor:
        ...     for _ in range(2):
        ...         loss = weight.sum()
        ...         loss.backward()
        ...         optimizer.step()
        ...         monitor.step(loss, tokens=16)
        ...         optimizer.zero_grad()
        >>> [(record["loss"], record["grad_norm"], record["update_ratio"]) for record in monitor.records]
        [(4.0, 2.0, 0.5), (2.0, 2.0, 1.0)]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scaler: torch.amp.GradScaler | None = None,
        *,
        unscaled: bool | None = None,
        every: int = 10,
        jsonl: str | Path | None = None,
        report: str | Path | None = None,
        tensorboard: str | Path | None = None,
        show: Callable[[dict[str, float]], None] | None = None,
    ) -> None:
        lists.check_number("StepMonitor", "every", every, 0)
        self._optimizer, self._scaler, self._every, self._show = optimizer, scaler, every, show
        self._report = None if report is None else Path(report)
        self._lines = None if jsonl is None else Path(jsonl).open("a")  # noqa: SIM115 - until close(); a resumed run goes on
        self._board: Any = None
        if tensorboard is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(tensorboard))
        self.records: list[dict[str, float]] = []
        self._reader = AsyncReader()
        self._step = self._epoch = 0
        self._skipped: Tensor | None = getattr(scaler, "skipped_steps", None)  # the scaler's count at the last step
        self._unscaled = not getattr(optimizer, "_step_supports_amp_scaling", False) if unscaled is None else unscaled
        self._divides = (
            unscaled is None and isinstance(optimizer, _DIVIDING) and not isinstance(optimizer, FusedOptimizer)
        )
        self._scale_then = self._scale()  # what the gradients of the next step carry
        self._then = time.perf_counter()
        self._before = self._weights() if every else None  # of the step that will be measured, by parameter

    def __enter__(self) -> StepMonitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- a step ----

    @torch.no_grad()
    def step(self, loss: Tensor | float, tokens: int = 0) -> None:
        """End an iteration.

        Args:
            loss: of one element, unscaled.
            tokens: how many were trained on (or samples, whatever is to be counted by the second).
        """
        grads = [values_of(p.grad) for p in self._params() if p.grad is not None]
        device = grads[0].device if grads else torch.device("cpu")
        scale = at(self._scale_then, device)
        nan = torch.full((), math.nan, device=device)
        norm = _norm(grads) if grads else nan
        carried = torch.ones_like(scale) if self._unscaled else scale
        if self._divides:  # it takes the steps whose gradients are finite
            carried = torch.where(norm.isfinite(), 1.0, carried)
        measured = self._before is not None
        figures = (
            torch.as_tensor(loss, device=device, dtype=torch.float32).reshape(()),
            scale,
            self._newly_skipped(device),
            norm / carried,
            self._update_ratio() if measured else nan,
            self._flushed_share(grads, scale / carried) if measured and grads else nan,
        )
        now = time.perf_counter()
        note = {
            "step": self._step,
            "epoch": self._epoch,
            "tokens_per_second": tokens / (now - self._then) if tokens else math.nan,
            "peak_memory": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else math.nan,
        }
        self._reader.push(torch.stack([figure.float() for figure in figures]), note)
        self._step += 1
        self._before = self._weights() if self._every and self._step % self._every == 0 else None
        self._scale_then = self._scale()
        self._then = time.perf_counter()
        self._take()

    def epoch(self) -> None:
        """End an epoch: the steps after it count as the next one's."""
        self._epoch += 1

    def close(self) -> None:
        """Wait for what is still on its way, and write the report."""
        self._reader.wait()
        self._take()
        if self._lines is not None:
            self._lines.close()
        if self._board is not None:
            self._board.close()
        if self._report is not None:
            self._report.write_text(self.html())

    # ---- figures ----

    def _params(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _weights(self) -> dict[Tensor, Tensor]:
        params = self._params()
        return dict(zip(params, torch._foreach_add([values_of(p) for p in params], 0.0), strict=True))

    def _scale(self) -> Tensor:
        """The loss scale as it is now; 1 without a scaler."""
        scaler = self._scaler
        if scaler is None or not scaler.is_enabled():
            return torch.ones((), device="cpu")
        return torch.tensor(scaler._init_scale, device="cpu") if scaler._scale is None else scaler._scale.clone()

    def _newly_skipped(self, device: torch.device) -> Tensor:
        counted = getattr(self._scaler, "skipped_steps", None)
        if counted is None:
            return torch.full(
                (), math.nan if self._scaler is not None and self._scaler.is_enabled() else 0.0, device=device
            )
        counted = at(counted, device)
        new = counted - at(self._skipped, device)
        self._skipped = counted
        return new

    def _update_ratio(self) -> Tensor:
        """Of the parameters that there were before the step; groups may have been added since then."""
        now, before = [values_of(p) for p in self._before], list(self._before.values())
        return _norm(torch._foreach_sub(now, before)) / _norm(before)

    def _flushed_share(self, grads: list[Tensor], factor: Tensor) -> Tensor:
        counts = exponent_histogram(grads)[0].sum(0)
        numbers = shifted(counts, factor.log2().round().long())[1:INFINITY_BIN]
        return numbers[: FLUSHED_BELOW - LEAST_EXPONENT].sum() / numbers.sum()

    # ---- what has arrived ----

    def _take(self) -> None:
        for values, note in self._reader.arrived():
            record = {**note, **dict(zip(_FIGURES, values, strict=True))}
            self.records.append(record)
            if self._lines is not None:
                # JSON has no NaN: what was not measured is left out, what is not finite is text.
                kept = {
                    k: v if math.isfinite(v) else str(v) for k, v in record.items() if not math.isnan(v) or k == "loss"
                }
                self._lines.write(json.dumps(kept) + "\n")
                self._lines.flush()
            if self._board is not None:
                for key, value in record.items():
                    if key not in ("step", "epoch") and not math.isnan(value):
                        self._board.add_scalar(key, value, int(record["step"]))
            if self._show is not None:
                self._show(record)

    def html(self) -> str:
        """The report: a table of epochs, and a curve of each figure."""
        steps = [record["step"] for record in self.records]
        curves = []
        for key in ("loss", "scale", "grad_norm", "update_ratio", "flushed_share", "tokens_per_second", "peak_memory"):
            ys = [record[key] for record in self.records]
            measured = [(x, y) for x, y in zip(steps, ys, strict=True) if not math.isnan(y)]
            if measured:
                curves.append(
                    _svg.line(key.replace("_", " "), *zip(*measured, strict=True), logarithmic=key == "scale")
                )
        epochs = sorted({record["epoch"] for record in self.records})
        rows = [self._of_epoch(epoch) for epoch in epochs]
        header = ("epoch", "steps", "skipped", "mean loss", "last scale", "largest gradient norm", "mean tokens/s")
        skipped = [f"{int(record['step'])}" for record in self.records if record["skipped"] > 0]
        text = f"<p>Skipped steps: {html.escape(', '.join(skipped) or 'none')}</p>"
        return _svg.page("Training run", [_svg.table(rows, header), text, *curves])

    def _of_epoch(self, epoch: float) -> list[str]:
        of = [record for record in self.records if record["epoch"] == epoch]
        mean = lambda key: _mean([record[key] for record in of])  # noqa: E731
        norms = [record["grad_norm"] for record in of if math.isfinite(record["grad_norm"])]
        return [
            f"{int(epoch)}",
            f"{len(of)}",
            f"{sum(record['skipped'] > 0 for record in of)}",
            f"{mean('loss'):.4g}",
            f"{of[-1]['scale']:g}",
            f"{max(norms, default=math.nan):.4g}",
            f"{mean('tokens_per_second'):.4g}",
        ]


def _mean(values: list[float]) -> float:
    values = [value for value in values if math.isfinite(value)]
    return sum(values) / len(values) if values else math.nan


def _norm(tensors: list[Tensor]) -> Tensor:
    return check_and_norm(tensors)[0].sqrt()
