"""Monitor a run step by step without host syncs."""

from __future__ import annotations

import json
import math
import resource
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._checks import lists
from .._checks.types import check_function, check_scaler, type_name
from .._dispatch.devices import at
from .._raw.check_and_norm import check_and_norm
from .._raw.exponent_histogram import INFINITY_BIN, LEAST_EXPONENT, exponent_histogram
from .._removed import refuse
from ..amp._readback import AsyncReader
from ..optim._base import FusedOptimizer
from ._statistics import FLUSHED_BELOW, shifted, values_of

#: The figures computed on the device, in this order.
_FIGURES = ("loss", "scale", "skipped", "grad_norm", "update_ratio", "flushed_share")

#: torch's optimizers whose fused step writes the unscaled gradients back.
_DIVIDING = (torch.optim.Adam, torch.optim.SGD)


class StepMonitor:
    """Record loss, loss scale, skipped steps, gradient norm, update-to-weight ratio, share of flushed gradients, tokens/s and
    peak memory of every step. Writes each record when it arrives.

    Call :meth:`step` once per iteration, after ``scaler.update()`` (or ``optimizer.step()``) and before ``zero_grad``. Figures
    are read back asynchronously, some steps late, without waiting for the device.

    Args:
        optimizer: its parameters and gradients are measured.
        scaler: the gradient scaler, if there is one, of torch or of this package.
        unscaled: ``True`` if ``.grad`` is unscaled when :meth:`step` is called, also after a skipped step. The default is True
            for optimizers that are not fused and False for this package's; torch's fused ones unscale the gradients only of
            steps that they take. Pass True if the loop calls ``scaler.unscale_``.
        every: measure the update-to-weight ratio and the share of flushed gradients once in this many steps, at the cost of a
            copy of the weights and two reads. 0: never.
        jsonl: write a line of JSON for each step to this file.
        tensorboard: write to this folder for TensorBoard, which draws curves; needs the package ``tensorboard``.
        show: called with the record of each step when it arrives, for example ``lambda r: bar.set_postfix(loss=r["loss"])``.

    Attributes:
        records: a dict for each step that has arrived: ``step``, ``epoch``, ``loss``, ``scale`` (1 without a scaler),
            ``skipped`` (0 or 1), ``grad_norm`` (unscaled, before clipping), ``update_ratio`` (norm of the update divided by
            the norm of the weights), ``flushed_share`` (share of the nonzero gradients that FP16 rounds to zero at the current
            scale), ``tokens_per_second`` and ``peak_memory`` (bytes of the CUDA allocator; on a CPU the most that the process has
            held, the interpreter included). NaN means not measured.
        precision: the run's optimizer, dtypes of its parameters, options of mixed precision, loss scaling and torch's switches for
            products, as text. The first line of ``jsonl`` has it, and TensorBoard its text.

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
        tensorboard: str | Path | None = None,
        show: Callable[[dict[str, float]], None] | None = None,
        **removed: Any,
    ) -> None:
        refuse("numerics.StepMonitor", removed)
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(f"StepMonitor: optimizer has type {type_name(optimizer)}; accepted: an optimizer")
        check_scaler("StepMonitor", scaler)
        check_function("StepMonitor", "show", show)
        lists.check_number("StepMonitor", "every", every, 0)
        self._optimizer, self._scaler, self._every, self._show = optimizer, scaler, every, show
        self._lines = None if jsonl is None else Path(jsonl).open("a")  # noqa: SIM115 - open until close(); a resumed run appends
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
        self._scale_then = self._scale()  # the scale of the next step's gradients
        self.precision = self._precision()
        if self._board is not None:
            self._board.add_text("precision", "  \n".join(f"{key}: {value}" for key, value in self.precision.items()))
        self._then = time.perf_counter()
        self._before = self._weights() if every else None  # weights before the next measured step, by parameter

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
            loss: the unscaled loss, one element.
            tokens: number of tokens (or samples) in this step, for the rate per second.
        """
        grads = [values_of(p.grad) for p in self._params() if p.grad is not None]
        device = grads[0].device if grads else torch.device("cpu")
        scale = at(self._scale_then, device)
        nan = torch.full((), math.nan, device=device)
        norm = _norm(grads) if grads else nan
        carried = torch.ones_like(scale) if self._unscaled else scale
        if self._divides:  # only a step that is taken unscales its gradients
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
            "peak_memory": peak_memory(device),
        }
        self._reader.push(torch.stack([figure.float() for figure in figures]), note)
        self._step += 1
        self._before = self._weights() if self._every and self._step % self._every == 0 else None
        self._scale_then = self._scale()
        self._then = time.perf_counter()
        self._take()

    def epoch(self) -> None:
        """End an epoch: later steps belong to the next one."""
        self._epoch += 1

    def close(self) -> None:
        """Wait for pending records and close the files."""
        self._reader.wait()
        self._take()
        if self._lines is not None:
            self._lines.close()
        if self._board is not None:
            self._board.close()

    # ---- figures ----

    def _precision(self) -> dict[str, str]:
        options = vars(self._optimizer._options) if isinstance(self._optimizer, FusedOptimizer) else {}
        scaler = self._scaler
        found = {
            "optimizer": type(self._optimizer).__name__,
            "parameters": ", ".join(sorted({str(p.dtype) for p in self._params()})),
            **{
                name: value
                for name, value in options.items()
                if isinstance(value, (bool, int, float, str, torch.dtype))
            },
            "loss_scaling": type(scaler).__name__ if scaler is not None and scaler.is_enabled() else "none",
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "torch": torch.__version__,
        }
        return {name: str(value).replace("torch.", "") for name, value in found.items()}

    def _params(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _weights(self) -> dict[Tensor, Tensor]:
        params = self._params()
        return dict(zip(params, torch._foreach_add([values_of(p) for p in params], 0.0), strict=True))

    def _scale(self) -> Tensor:
        """The current loss scale; 1 without a scaler."""
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
        """The update ratio of the parameters that existed before the step; groups may have been added since."""
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
                # JSON has no NaN: omit values that were not measured, write non-finite ones as text.
                kept = {
                    k: v if math.isfinite(v) else str(v) for k, v in record.items() if not math.isnan(v) or k == "loss"
                }
                head = {} if len(self.records) > 1 else {"precision": self.precision}
                self._lines.write(json.dumps({**kept, **head}) + "\n")
                self._lines.flush()
            if self._board is not None:
                for key, value in record.items():
                    if key not in ("step", "epoch") and not math.isnan(value):
                        self._board.add_scalar(key, value, int(record["step"]))
            if self._show is not None:
                self._show(record)


def peak_memory(device: torch.device) -> int:
    """Bytes of the CUDA allocator; elsewhere the most that the process has held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _norm(tensors: list[Tensor]) -> Tensor:
    return check_and_norm(tensors)[0].sqrt()
