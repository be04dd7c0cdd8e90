"""The figure of the mixed-precision paper for any model: gradients by power of two, and FP16's range."""

from __future__ import annotations

import math
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import lists
from .._checks.types import check_scaler, type_name
from .._raw.exponent_histogram import BINS, INFINITY_BIN, LEAST_EXPONENT, NAN_BIN, exponent_histogram
from .._removed import attributes_of
from ._hooks import TensorHooks
from ._statistics import FLUSHED_BELOW, FP16_MAX, SUBNORMAL_BELOW, flushed_share, shifted, values_of

_BAR = 50  # characters of the longest bar of the text


class GradientHistogram:
    """Count a model's gradients by power of two inside the block: activation gradients between modules, and parameter gradients.

    Micikevicius et al., *Mixed Precision Training* (ICLR 2018), figures 2 and 3: most activation gradients of a detector are
    below FP16's range, and a loss scale moves them into it. Run in FP32 or BF16 to see the losses that FP16 *would* have at any
    scale; run in FP16 to see the remaining values. The scaler's loss scale is divided out of the counts.

    Counts stay on the device; the host reads them when a result is requested.

    Args:
        model: gradients of leaf modules' outputs and of all parameters that require one are counted, in every backward.
        scaler: the gradient scaler of the loop, if it has one. Its scale is rounded to the nearest power of two.

    Raises:
        TypeError: ``model`` is not a module.

    Examples:
        >>> model = torch.nn.Linear(4, 2)
        >>> with ak.numerics.GradientHistogram(model) as histogram:
        ...     model(torch.ones(3, 4)).sum().mul(2.0**-30).backward()
        >>> histogram.flushed_share("activations", scale=1.0), histogram.flushed_share("activations", scale=2.0**10)
        (1.0, 0.0)
        >>> histogram.advise()  # no value is lost from the first scale on, and none overflows up to the second
        (32.0, 17592186044416.0)
    """

    __getattr__ = attributes_of("amp_kernels.numerics.GradientHistogram")

    def __init__(self, model: nn.Module, scaler: torch.amp.GradScaler | None = None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"GradientHistogram: model has type {type_name(model)}; accepted: a torch.nn.Module")
        check_scaler("GradientHistogram", scaler)
        self._model, self._scaler = model, scaler
        self._handles: list[Any] = []
        self._hooks = TensorHooks()
        self._counts: dict[str, Tensor] = {}  # by name: activations of modules, "parameter <name>"
        self._largest: dict[str, Tensor] = {}

    # ---- the block ----

    def __enter__(self) -> GradientHistogram:
        for name, module in self._model.named_modules():
            if next(module.children(), None) is None:
                self._handles.append(module.register_forward_hook(self._after(f"activations {name}".strip())))
        for name, param in self._model.named_parameters():
            if param.requires_grad and param.is_leaf:
                self._handles.append(param.register_post_accumulate_grad_hook(self._of_parameter(f"parameters {name}")))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooks.remove()

    def _after(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            for leaf in torch.utils._pytree.tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    self._hooks.add(leaf, (name,), lambda grad: self._add(name, grad))

        return hook

    def _of_parameter(self, name: str) -> Any:
        return lambda param: None if param.grad is None else self._add(name, param.grad)

    @torch.no_grad()
    def _add(self, name: str, grad: Tensor) -> None:
        (counts,), (largest,) = exponent_histogram([values_of(grad)])
        scale = None if self._scaler is None or not self._scaler.is_enabled() else self._scaler._scale
        if scale is not None:
            exponent = scale.to(counts.device).log2().round()
            counts, largest = shifted(counts, -exponent.long()), largest * (-exponent).exp2()
        if name in self._counts:
            self._counts[name] += counts
            self._largest[name] = torch.maximum(self._largest[name], largest)
        else:
            self._counts[name], self._largest[name] = counts, largest

    # ---- results ----

    def counts(self, of: str = "") -> Tensor:
        """The summed columns of :func:`amp_kernels.numerics.exponent_histogram`, int64 ``[280]`` on the CPU.

        Args:
            of: ``"activations"`` or ``"parameters"``, optionally followed by the name of a parameter or of a module (including
                everything inside it); or ``""`` for everything.
        """
        inside = (f"{of} ", f"{of}.") if of else ""
        chosen = [counts.cpu() for name, counts in self._counts.items() if name == of or name.startswith(inside)]
        return torch.stack(chosen).sum(0) if chosen else torch.zeros(BINS, dtype=torch.int64, device="cpu")

    def flushed_share(self, of: str = "", *, scale: float) -> float:
        """The share of the nonzero values that FP16 rounds to zero at this loss scale (below ``2**-25``)."""
        lists.check_number("GradientHistogram.flushed_share", "scale", scale, math.ulp(0.0))
        return flushed_share(self.counts(of), scale)

    def worst(self, count: int = 5, *, scale: float = 1.0) -> list[tuple[str, float]]:
        """The modules that lose the largest shares of their nonzero gradients in FP16 at this loss scale, the worst first.

        Args:
            count: how many.
            scale: the loss scale; 1 is no scaling.

        Returns:
            Pairs of a name that :meth:`counts` takes, ``"activations <module>"`` or ``"parameters <module>"`` with all parameters of the
            module itself, and its share.

        Examples:
            >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
            >>> with ak.numerics.GradientHistogram(model) as histogram:
            ...     hidden = model[0](torch.ones(3, 4))
            ...     (model[1](hidden.detach()).sum() * 2.0**-30 + hidden.sum()).backward()
            >>> histogram.worst(2)
            [('activations 1', 1.0), ('parameters 1', 1.0)]
        """
        lists.check_count("GradientHistogram.worst", "count", count, 1)
        lists.check_number("GradientHistogram.worst", "scale", scale, math.ulp(0.0))
        of_modules: dict[str, Tensor] = {}
        for name, counts in self._counts.items():
            kind, _, path = name.partition(" ")
            module = f"{kind} {path.rpartition('.')[0]}".strip() if kind == "parameters" else name
            of_modules[module] = of_modules.get(module, 0) + counts.cpu()
        shares = [(name, flushed_share(counts, scale)) for name, counts in of_modules.items()]
        return sorted(shares, key=lambda pair: -pair[1])[:count]

    def advise(self, tolerance: float = 1e-3) -> tuple[float, float]:
        """The range of loss scales, powers of two, for which FP16 can represent these gradients.

        Args:
            tolerance: the share of nonzero values that may be flushed to zero.

        Returns:
            ``(low, high)``: the smallest scale that flushes at most that share, and the largest scale for which the largest
            finite gradient is below FP16's maximum. If ``low > high``, no scale satisfies both. ``(1.0, inf)`` if all gradients
            are zero.
        """
        lists.check_number("GradientHistogram.advise", "tolerance", tolerance, 0.0, 1.0)
        counts = self.counts()
        numbers = counts[1:INFINITY_BIN]
        if not numbers.sum():
            return 1.0, math.inf
        lost = numbers.cumsum(0) <= tolerance * numbers.sum()
        first_kept = LEAST_EXPONENT + int(lost.sum())
        largest = max(value.item() for value in self._largest.values())
        return 2.0 ** max(FLUSHED_BELOW - first_kept, 0), 2.0 ** math.floor(math.log2(FP16_MAX / largest))

    def __str__(self) -> str:
        """The figure as text: a line for each power of two in use, with its fate in unscaled FP16."""
        lines = []
        for title in ("activations", "parameters"):
            counts = self.counts(title).tolist()
            total = sum(counts)
            if not total:
                continue
            lines.append(f"gradients of {title}: {total} values, {counts[0] / total:.1%} zero")
            numbers = {LEAST_EXPONENT + i: n for i, n in enumerate(counts[1:INFINITY_BIN]) if n}
            most = max(numbers.values(), default=1)
            for exponent, n in numbers.items():
                bar = "#" * math.ceil(_BAR * n / most)
                lines.append(f"  2^{exponent:<5}{n / total:7.2%}  {_fate(exponent):<9} {bar}".rstrip())
            lines += [
                f"  {name}: {counts[column]}"
                for name, column in (("inf", INFINITY_BIN), ("NaN", NAN_BIN))
                if counts[column]
            ]
        low, high = self.advise()
        advice = (
            f"FP16 can represent them at loss scales from {_power(low)} to {_power(high)}"
            if low <= high
            else "FP16 cannot represent them at any loss scale"
        )
        return "\n".join([*lines, advice])


def _power(scale: float) -> str:
    return "inf" if scale == math.inf else f"2^{math.log2(scale):.0f}"


def _fate(exponent: int) -> str:
    """The result of converting values with this exponent to FP16, unscaled."""
    if exponent < FLUSHED_BELOW:
        return "zero"
    if exponent < SUBNORMAL_BELOW:
        return "subnormal"
    return "" if exponent < 16 else "overflow"
