"""The harness's plots: shares of the roofline of everything, and TFLOP/s of the matrix products, case by case."""

from collections.abc import Callable
from pathlib import Path

from .harness.tables import pyplot

ROW_INCHES = 0.16


def plot_roofline(path: Path, rows: list[dict], title: str) -> bool:
    """Each provider's share of the roofline into the PNG `path`. False if matplotlib is not installed or nothing was
    timed."""
    timed = [row for row in rows if "roofline_share" in row]
    axis = "share of the roofline measured in the same run, % (above 100: from cache)"
    return _bars(path, timed, lambda row: 100 * row["roofline_share"], axis, 100, title)


def plot_products(path: Path, rows: list[dict], title: str) -> bool:
    """TFLOP/s of the matrix products by shape and provider into the PNG `path`; the line is the large product of the
    same run."""
    timed = [row for row in rows if row["op"].startswith("gemm") and "tflops" in row]
    ceiling = max((row["tflops_bf16"] for row in timed), default=0)
    return _bars(path, timed, lambda row: row["tflops"], "TFLOP/s", ceiling, title)


def _bars(path: Path, rows: list[dict], value: Callable, axis_label: str, line: float, title: str) -> bool:
    plt = pyplot()
    if plt is None or not rows:
        return False

    cases = list(dict.fromkeys((row["op"], row["shape"], row["dtype"]) for row in rows))
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    height = 0.8 / len(providers)
    figure, axis = plt.subplots(figsize=(10, 1.5 + ROW_INCHES * len(cases) * (1 + len(providers))))
    for i, provider in enumerate(providers):
        values = {(r["op"], r["shape"], r["dtype"]): value(r) for r in rows if r["provider"] == provider}
        places = [cases.index(case) + (i - (len(providers) - 1) / 2) * height for case in values]
        axis.barh(places, list(values.values()), height=height, label=provider)
    axis.set_yticks(range(len(cases)), ["  ".join(case) for case in cases], fontsize=8)
    axis.set_ylim(len(cases) - 0.5, -0.5)
    axis.set_xlabel(axis_label)
    axis.axvline(line, color="black", linewidth=0.8)
    axis.set_title(title, fontsize=10)
    axis.legend(fontsize=8)
    axis.grid(axis="x", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True
