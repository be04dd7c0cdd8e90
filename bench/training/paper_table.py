"""Reports the runs of the paper's table: tables in Markdown, and a figure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from amp_kernels.numerics import Outcome, Parity

from ..harness.tables import pyplot

FAILED = "✗"
REFERENCE = "fp32"


@dataclass(frozen=True)
class Table:
    """Rows of the results by task and column.

    ``metrics`` has the metric's name by task, in the order of the lines; ``columns`` is the order of the columns. A column fails a
    task if its metric, the smaller the better, exceeds FP32's by more than ``factor`` standard errors of that difference, as
    the spread over seeds tells them (``amp_kernels.numerics.Parity``), or if a run's is not finite.
    """

    rows: list[dict]
    metrics: dict[str, str]
    columns: list[str]
    factor: float

    def tasks(self) -> list[str]:
        return [task for task in self.metrics if any(row["task"] == task for row in self.rows)]

    def of(self, task: str, column: str) -> list[dict]:
        return [row for row in self.rows if row["task"] == task and row["column"] == column]

    def values(self, task: str, column: str) -> list[float]:
        """The metric by seed; JSON has null for what is not finite."""
        return [math.nan if row["metric"] is None else row["metric"] for row in self.of(task, column)]

    def failed(self, task: str, column: str) -> bool:
        """Never with one seed alone: there is no spread then to measure a difference by."""
        values, reference = self.values(task, column), self.values(task, REFERENCE)
        if not all(map(math.isfinite, values)):
            return True
        if column == REFERENCE or min(len(values), len(reference)) < 2:
            return False
        outcomes = [
            Outcome(name, seed, metric, steps=0, skipped=0, seconds=0.0, peak_memory=None)
            for name, metrics in ((REFERENCE, reference), (column, values))
            for seed, metric in enumerate(metrics)
        ]
        difference, allowed = Parity(tuple(outcomes), self.factor).difference(column)
        return difference > allowed

    def vanished(self, task: str, column: str) -> float:
        """The share of the activation gradients that are zero here and not in FP32."""
        here = statistics.mean(row["zero_share"] for row in self.of(task, column))
        reference = [row["zero_share"] for row in self.of(task, REFERENCE)]
        zero = statistics.mean(reference) if reference else 0.0
        return max(here - zero, 0.0) / (1 - zero) if zero < 1 else 0.0

    # ---- Markdown

    def metric(self, task: str, column: str) -> str:
        values = self.values(task, column)
        if not all(map(math.isfinite, values)):
            return f"diverged {FAILED}"
        spread = f" ± {statistics.stdev(values):.1g}" if len(values) > 1 else ""
        shown = f"{statistics.mean(values):.3g}{spread}"
        return f"**{shown}** {FAILED}" if self.failed(task, column) else shown

    def vanished_share(self, task: str, column: str) -> str:
        share = self.vanished(task, column)
        return f"{share:.0%}" if share >= 0.005 else "0"

    def skipped(self, task: str, column: str) -> str:
        return str(sum(row["skipped"] for row in self.of(task, column)))

    def memory(self, task: str, column: str) -> str:
        rows = self.of(task, column)
        return " / ".join(f"{max(row[key] for row in rows) / 1024:,.0f}" for key in ("state_bytes", "peak_bytes"))

    def markdown(self, show: Callable[[str, str], str], *, named: bool = False) -> str:
        """One line a task, ``show(task, column)`` in its cells; ``named``: with the metric's name."""
        lines = ["| | " + " | ".join(self.columns) + " |", "|---" * (len(self.columns) + 1) + "|"]
        for task in self.tasks():
            cells = [show(task, column) if self.of(task, column) else "" for column in self.columns]
            lines.append(f"| {task}{f', {self.metrics[task]}' if named else ''} | " + " | ".join(cells) + " |")
        return "\n".join(lines)

    def page(self, machine: dict) -> str:
        """All tables, and what they were measured on."""
        cpu = sum(row["cpu_seconds"] for row in self.rows) / 60
        skips = any(row["skipped"] for row in self.rows)
        return "\n\n".join(
            (
                f"{machine['device']}, torch {machine['versions']['torch']}, {machine['date'][:10]}: {len(self.rows)} runs, "
                f"{cpu:.1f} minutes of CPU time.",
                f"Metric, smaller is better: mean ± standard deviation over seeds. {FAILED} marks a result worse than FP32 by more "
                f"than {self.factor:g} standard errors of the difference.",
                self.markdown(self.metric, named=True),
                "Share of the activation gradients that are zero, but not zero in FP32.",
                self.markdown(self.vanished_share),
                *(
                    ("Skipped steps, summed over the seeds.", self.markdown(self.skipped))
                    if skips
                    else ("No step was skipped.",)
                ),
                "Memory of parameters and optimizer state / peak memory of a step, KiB.",
                self.markdown(self.memory),
            )
        )


def plot(path: Path, table: Table, title: str) -> bool:
    """A panel for each task, a dot for each run, what failed in red, into the PNG ``path``. False if matplotlib is absent."""
    plt = pyplot()
    if plt is None:
        return False

    tasks = table.tasks()
    across = min(4, len(tasks))
    down = math.ceil(len(tasks) / across)
    figure, axes = plt.subplots(down, across, figsize=(2.7 * across, 1.0 + 2.2 * down), squeeze=False, sharey=True)
    for axis in axes.flat[len(tasks) :]:
        axis.remove()
    for axis, task in zip(axes.flat, tasks, strict=False):
        for place, column in enumerate(table.columns):
            values = table.values(task, column)
            if not values:
                continue
            color = "tab:red" if table.failed(task, column) else "tab:blue" if column != REFERENCE else "tab:gray"
            axis.plot(values, [place] * len(values), "o", color=color, markersize=4, alpha=0.7)
            if not all(map(math.isfinite, values)):
                axis.text(
                    0.5, place, "diverged", color=color, fontsize=8, transform=axis.get_yaxis_transform(), va="center"
                )
        reference = [value for value in table.values(task, REFERENCE) if math.isfinite(value)]
        if reference:
            axis.axvline(statistics.mean(reference), color="tab:gray", linewidth=0.8)
        axis.set_title(task, fontsize=9)
        axis.set_xlabel(table.metrics[task], fontsize=7)
        axis.tick_params(labelsize=7)
        axis.locator_params(axis="x", nbins=4)
        axis.grid(axis="x", alpha=0.3)
    axes[0, 0].set_yticks(range(len(table.columns)), table.columns)
    axes[0, 0].set_ylim(len(table.columns) - 0.5, -0.5)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True
