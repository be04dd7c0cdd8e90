"""Output of the training benchmark: a table for the terminal, a plot, and a JSON record."""

import json
import math
from pathlib import Path

from ..harness.tables import align, format_bytes, pyplot

COLUMNS = (
    "precision",
    "provider",
    "val. loss",
    "vs fp32",
    "vs torch",
    "tokens/s",
    "peak memory",
    "final scale",
    "skipped",
)


def table(results: list[dict]) -> str:
    """One row a run. "vs fp32" compares within a provider, "vs torch" within a precision; losses are nats per byte."""
    losses = {(result["provider"], result["dtype"]): result["validation_loss"] for result in results}
    rows = [COLUMNS]
    for result in results:
        provider, dtype, loss = result["provider"], result["dtype"], result["validation_loss"]
        rows.append(
            (
                dtype,
                provider,
                f"{loss:.4f}",
                _difference(loss, losses.get((provider, "fp32"))) if dtype != "fp32" else "",
                _difference(loss, losses.get(("torch", dtype))) if provider != "torch" else "",
                f"{result['tokens_per_second']:,.0f}",
                format_bytes(result["peak_memory_bytes"]),
                f"2^{math.log2(result['final_scale']):.0f}" if result["scaled"] else "",
                str(result["skipped_steps"]) if result["scaled"] else "",
            )
        )
    return align(rows)


def _difference(loss: float, reference: float | None) -> str:
    return "" if reference is None else f"{100 * (loss / reference - 1):+.2f} %"


def write_json(path: Path, record: dict) -> None:
    """Writes `record`; NaN and infinity, which JSON does not have, become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_plain(record), indent=1, allow_nan=False) + "\n")


def _plain(value):
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plot(path: Path, results: list[dict], title: str) -> bool:
    """Loss curves, their difference to FP32 and the loss scale into the PNG `path`. False if matplotlib is absent.

    The curves lie on top of each other when all is well, hence the difference; without an FP32 run it is to the first.
    """
    plt = pyplot()
    if plt is None:
        return False

    reference = next((result for result in results if result["dtype"] == "fp32"), results[0])
    scaled = [result for result in results if result["scales"]]
    heights = [3] + [2] * (len(results) > 1) + [2] * bool(scaled)
    figure, axes = plt.subplots(
        len(heights), 1, figsize=(9, 1.6 * sum(heights)), sharex=True, squeeze=False, height_ratios=heights
    )
    axes = list(axes[:, 0])
    for result in results:
        label = f"{result['name']}: {result['validation_loss']:.3f}"
        axes[0].plot(*_curve(_smooth(result["losses"])), label=label, **_style(result))
        axes[0].plot(*zip(*result["validation"], strict=True), "o", markersize=3.5, color=_style(result)["color"])
    axes[0].set_ylabel("loss, nats per byte")
    axes[0].set_title(title, fontsize=10)
    axes[0].legend(title="final validation loss (dots: validation)", fontsize=8, title_fontsize=8)
    if len(results) > 1:
        base = _smooth(reference["losses"])
        for result in results:
            difference = [loss - b for loss, b in zip(_smooth(result["losses"]), base, strict=True)]
            axes[1].plot(*_curve(difference), **_style(result))
        axes[1].set_ylabel(f"minus {reference['name']}")
    for result in scaled:
        axes[-1].plot(*_curve(result["scales"]), label=result["name"], **_style(result))
    if scaled:
        axes[-1].set_yscale("log", base=2)
        axes[-1].set_ylabel("loss scale")
        axes[-1].legend(fontsize=8)
    axes[-1].set_xlabel("step")
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True


def _curve(values: list[float]) -> tuple[range, list[float]]:
    return range(1, len(values) + 1), values


def _style(result: dict) -> dict:
    color = {"fp32": "tab:gray", "bf16": "tab:blue", "fp16": "tab:red"}[result["dtype"]]
    return {"color": color, "linestyle": "-" if result["provider"] == "torch" else "--", "linewidth": 1.2}


def _smooth(values: list[float], weight: float = 0.9) -> list[float]:
    """Exponential moving average with the usual correction of its start; a single batch's loss is mostly noise."""
    smoothed, average = [], 0.0
    for i, value in enumerate(values):
        average = weight * average + (1 - weight) * value
        smoothed.append(average / (1 - weight ** (i + 1)))
    return smoothed
