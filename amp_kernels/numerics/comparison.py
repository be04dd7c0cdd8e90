"""Compare training in 16 bits with training in FP32, on a short run before the long one."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from .._checks import lists
from .._checks.types import check_function, type_name
from .._removed import attributes_of
from ..amp import GradScaler

PRECISIONS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp16-unscaled": torch.float16,
}
_FACTOR = 3.0  # accepted difference, in standard errors
_CONCLUSIVE = 0.1  # of FP32's metric: the largest accepted difference that still says something


class _CountingScaler(GradScaler):
    """Also counts iterations, with or without scaling."""

    iterations = 0

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        self.iterations += 1
        super().update(new_scale)


@dataclass
class Run:
    """The argument of a training function in :func:`amp_kernels.numerics.parity`: everything that depends on the precision.

    Attributes:
        precision: ``"fp32"``, ``"bf16"``, ``"fp16"`` (with loss scaling) or ``"fp16-unscaled"``.
        seed: for other random generators; torch's and Python's are already seeded with it.
        device: the device to train on.
        scaler: a :class:`amp_kernels.GradScaler`, enabled only in ``"fp16"``. Always call its ``scale``, ``step`` and ``update``:
            ``update`` counts the steps.

    Examples:
        >>> run = ak.numerics.Run("bf16", seed=0, device=torch.device("cpu"))
        >>> with run.autocast():
        ...     print(torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype, run.scaler.is_enabled())
        torch.bfloat16 False
    """

    precision: str
    seed: int
    device: torch.device
    scaler: GradScaler = field(init=False)
    __getattr__ = attributes_of("amp_kernels.numerics.Run")

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ValueError(f"Run: precision is {self.precision!r}; accepted: {', '.join(PRECISIONS)}")
        self.scaler = _CountingScaler(self.device.type, enabled=self.precision == "fp16")

    def autocast(self) -> AbstractContextManager[object]:
        """``torch.autocast`` in this run's format; disabled in FP32."""
        dtype = PRECISIONS[self.precision]
        enabled = dtype != torch.float32
        return torch.autocast(self.device.type, dtype=dtype if enabled else torch.bfloat16, enabled=enabled)


@dataclass(frozen=True)
class Outcome:
    """The result of one run: the metric and the cost.

    Examples:
        >>> outcome = ak.numerics.Outcome("fp16", 0, metric=0.5, steps=100, skipped=2, seconds=4.0, peak_memory=None)
        >>> outcome.steps_per_second
        25.0
    """

    precision: str
    seed: int
    metric: float
    steps: int
    skipped: int
    seconds: float
    peak_memory: int | None  # bytes of the CUDA allocator
    curve: tuple[float, ...] = ()  # with parity(curve=True): the loss of each step

    @property
    def steps_per_second(self) -> float:
        return self.steps / self.seconds


@dataclass(frozen=True)
class Parity:
    """The outcomes of all runs, and a verdict on each format.

    A format has parity if the mean of its metric differs from FP32's by at most ``factor`` times the standard error of that
    difference, estimated from the spread over seeds: ``sqrt(var / n + var_fp32 / n)``. A format with a non-finite metric does
    not have parity. If that accepted difference exceeds a tenth of FP32's metric, seeds differ so much that the comparison could
    hardly fail: a format within it is *inconclusive*, which is no parity. Then train longer, or with more seeds.

    Examples:
        >>> runs = [ak.numerics.Outcome(p, s, 1.0 + s / 100 + (p == "fp16"), 10, 0, 1.0, None) for p in ("fp32", "fp16") for s in (0, 1, 2)]
        >>> parity = ak.numerics.Parity(tuple(runs))
        >>> parity.holds("fp16"), bool(parity)
        (False, False)
    """

    outcomes: tuple[Outcome, ...]
    factor: float = _FACTOR

    def _metrics(self, precision: str) -> list[float]:
        return [outcome.metric for outcome in self.outcomes if outcome.precision == precision]

    def difference(self, precision: str) -> tuple[float, float]:
        """The mean metric minus FP32's, and the accepted magnitude of this difference."""
        return self._compared(self._metrics(precision), self._metrics("fp32"))

    def _compared(self, ours: list[float], theirs: list[float]) -> tuple[float, float]:
        if not all(map(math.isfinite, ours + theirs)):
            return math.nan, math.nan
        spread = math.sqrt(statistics.variance(ours) / len(ours) + statistics.variance(theirs) / len(theirs))
        # Allow a millionth of the value for rounding if the metric does not depend on the seed.
        allowed = max(self.factor * spread, 1e-6 * abs(statistics.mean(theirs)))
        return statistics.mean(ours) - statistics.mean(theirs), allowed

    def parted(self, precision: str) -> int | None:
        """The step from which on the curve differs from FP32's by more than is accepted, to the end; ``None`` if it does not at the end.

        Each twentieth of the run is compared as the metric is, by its mean.

        Raises:
            ValueError: the runs have no curves; ``parity(curve=True)`` makes them.
        """
        ours, theirs = ([o.curve for o in self.outcomes if o.precision == name] for name in (precision, "fp32"))
        steps = min(map(len, ours + theirs), default=0)
        if not steps:
            raise ValueError(
                f"Parity.parted: the runs of {precision!r} have no curves; accepted: those of parity(curve=True)"
            )
        parted, size = None, _window(steps)
        for end in range(steps, size - 1, -size):
            means = ([statistics.fmean(curve[end - size : end]) for curve in curves] for curves in (ours, theirs))
            difference, allowed = self._compared(*means)
            if abs(difference) <= allowed:  # NaN differs
                break
            parted = end - size
        return parted

    def verdict(self, precision: str) -> str:
        """``"parity"``, ``"DIFFERS"`` or ``"inconclusive"``."""
        difference, allowed = self.difference(precision)
        if not abs(difference) <= allowed:  # NaN differs
            return "DIFFERS"
        conclusive = allowed <= _CONCLUSIVE * abs(statistics.mean(self._metrics("fp32")))
        return "parity" if conclusive or precision == "fp32" else "inconclusive"

    def holds(self, precision: str) -> bool:
        return self.verdict(precision) == "parity"

    def __bool__(self) -> bool:
        return all(self.holds(precision) for precision in self.precisions)

    @property
    def precisions(self) -> list[str]:
        return list(dict.fromkeys(outcome.precision for outcome in self.outcomes))

    def __str__(self) -> str:
        rows = [("format", "metric", "spread", "difference", "allowed", "steps/s", "skipped", "peak memory", "verdict")]
        for precision in self.precisions:
            of = [outcome for outcome in self.outcomes if outcome.precision == precision]
            metrics = self._metrics(precision)
            difference, allowed = self.difference(precision)
            memory = max((outcome.peak_memory or 0) for outcome in of)
            verdict = "" if precision == "fp32" else self.verdict(precision)
            if verdict == "DIFFERS" and all(outcome.curve for outcome in self.outcomes):
                verdict += f" from step {self.parted(precision)} on"
            rows.append(
                (
                    precision,
                    f"{statistics.mean(metrics):.5g}",
                    f"{statistics.stdev(metrics) if all(map(math.isfinite, metrics)) else math.nan:.2g}",
                    "" if precision == "fp32" else f"{difference:+.2g}",
                    "" if precision == "fp32" else f"{allowed:.2g}",
                    f"{statistics.median(outcome.steps_per_second for outcome in of):.3g}",
                    f"{sum(outcome.skipped for outcome in of)}",
                    f"{memory / 2**20:.1f} MiB" if memory else "-",
                    verdict,
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def parity(
    train: Callable[[Run], Any],
    *,
    precisions: Sequence[str] = ("fp32", "bf16", "fp16"),
    seeds: int = 3,
    device: torch.device | str = "cpu",
    factor: float = _FACTOR,
    curve: bool = False,
    show: Callable[[Outcome], None] | None = None,
) -> Parity:
    """Train in several formats with the same seeds, and compare the difference from FP32 with the spread over seeds.

    Args:
        train: trains from scratch and returns the metric to compare, such as the validation loss. Its argument is a
            :class:`amp_kernels.numerics.Run`. It builds its model and data from the seeded generators, puts both on
            ``run.device``, uses ``run.autocast()`` for the forward and the loss, and ``run.scaler`` for the backward and the
            step. It depends on the format in no other way.
        precisions: any of ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"fp16-unscaled"``; FP32 is always run.
        seeds: number of seeds, at least 2; the seeds are 0, 1, ...
        device: the device to train on.
        factor: accepted difference in standard errors.
        curve: ``train`` returns the losses of all steps in place of the metric, which is then the mean of their last twentieth. Curves are
            compared from step to step, and the result says from where on they part (:meth:`Parity.parted`).
        show: called with each :class:`amp_kernels.numerics.Outcome`.

    Returns:
        A :class:`amp_kernels.numerics.Parity`: print it, or use it as a boolean.

    Raises:
        ValueError: a precision is unknown, or there are fewer than 2 seeds.
        TypeError: ``train`` did not return a number, or with ``curve=True`` no list of numbers.

    Examples:
        >>> def train(run):
        ...     model = torch.nn.Linear(4, 1).to(run.device)
        ...     optimizer = ak.optim.AdamW(model.parameters(), lr=0.05)
        ...     for _ in range(80):
        ...         x = torch.randn(32, 4, device=run.device)
        ...         with run.autocast():
        ...             loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        ...         run.scaler.scale(loss).backward()
        ...         run.scaler.step(optimizer)
        ...         run.scaler.update()
        ...         optimizer.zero_grad()
        ...     return model.weight.mean().item()
        >>> bool(ak.numerics.parity(train, precisions=["bf16"], seeds=2))
        True
    """
    if not callable(train):
        raise TypeError(f"parity: train has type {type_name(train)}; accepted: a function of a Run")
    unknown = [precision for precision in precisions if precision not in PRECISIONS]
    if unknown:
        raise ValueError(f"parity: precisions has {unknown[0]!r}; accepted: {', '.join(PRECISIONS)}")
    check_function("parity", "show", show)
    lists.check_count("parity", "seeds", seeds, 2)
    lists.check_number("parity", "factor", factor, 0.0)
    outcomes = []
    for seed in range(seeds):
        for precision in dict.fromkeys(("fp32", *precisions)):
            outcome = _train(train, precision, seed, torch.device(device), curve)
            outcomes.append(outcome)
            if show is not None:
                show(outcome)
    outcomes.sort(key=lambda outcome: list(PRECISIONS).index(outcome.precision))
    return Parity(tuple(outcomes), factor)


def _window(steps: int) -> int:
    """The steps of a curve whose losses count as one figure."""
    return max(1, steps // 20)


def _train(train: Callable[[Run], Any], precision: str, seed: int, device: torch.device, curve: bool) -> Outcome:
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    random.seed(seed)
    torch.manual_seed(seed)
    run = Run(precision, seed, device)
    begin = time.perf_counter()
    metric, losses = train(run), ()
    if curve:
        if not isinstance(metric, (list, tuple, torch.Tensor)) or not len(metric):
            raise TypeError(
                f"parity: train returned {type_name(metric)}; accepted with curve=True: the losses of all steps, a list"
            )
        losses = tuple(map(_number, metric))
        metric = statistics.fmean(losses[-_window(len(losses)) :])
    metric = _number(metric)
    if on_gpu:
        torch.cuda.synchronize(device)
    return Outcome(
        precision,
        seed,
        metric,
        run.scaler.iterations,
        int(run.scaler.skipped_steps) if run.scaler.is_enabled() else 0,
        time.perf_counter() - begin,
        torch.cuda.max_memory_allocated(device) if on_gpu else None,
        losses,
    )


def _number(value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, (int, float)):
        raise TypeError(f"parity: train returned a value of type {type_name(value)}; accepted: a number")
    return float(value)
