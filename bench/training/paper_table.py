"""Reports the runs of the paper's table: tables in Markdown, and a figure."""

from __future__ import annotations

import math
import statistics
import textwrap
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

    # ---- picture

    def message(self) -> str:
        """The number of tasks that each format fails."""
        tasks = self.tasks()
        failures = {
            column: sum(self.failed(task, column) for task in tasks) for column in self.columns if column != REFERENCE
        }
        counted = "; ".join(f"{column} {count}" for column, count in failures.items())
        return f"Tasks that fail, of {len(tasks)}: {counted}"


def plot(path: Path, table: Table) -> bool:
    """The metrics as a grid, what failed in red, below the table's message, into the PNG ``path``. False if matplotlib is absent."""
    plt = pyplot()
    if plt is None:
        return False

    tasks, columns = table.tasks(), table.columns
    figure, axis = plt.subplots(figsize=(8.0, 1.6 + 0.42 * len(tasks)), layout="constrained")
    for y, task in enumerate(tasks):
        for x, column in enumerate(columns):
            if not table.of(task, column):
                continue
            failed = table.failed(task, column)
            color = "tab:red" if failed else "#dfe8f2" if column == REFERENCE else "#dff0df"
            axis.add_patch(plt.Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=color))
            mean = statistics.mean(table.values(task, column))
            shown = f"{mean:.3g}" if math.isfinite(mean) else "diverged"
            axis.text(x, y, shown, ha="center", va="center", fontsize=11, color="white" if failed else "black")
    axis.set_xlim(-0.5, len(columns) - 0.5)
    axis.set_ylim(len(tasks) - 0.5, -0.5)
    axis.set_xticks(range(len(columns)), [column.replace(" ", "\n") for column in columns], fontsize=11)
    axis.set_yticks(range(len(tasks)), [f"{task}, {table.metrics[task]}" for task in tasks], fontsize=10)
    axis.tick_params(length=0, top=True, bottom=False, labeltop=True, labelbottom=False)
    axis.spines[:].set_visible(False)
    figure.suptitle("\n".join(textwrap.wrap(table.message(), 90)), fontsize=11, x=0.01, ha="left")
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True
