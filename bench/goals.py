"""The goals of the kernels on a GPU, compared with the rows of a run.

A goal is a limit on the geometric mean, the minimum or the maximum of one number of its cases. Cases that were wrong or not run
are left out; if the others meet the goal, it is open.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from .harness.rows import OURS, TRAINING, cases, copy_share, triton_ratio
from .harness.tables import Table

Providers = dict[str, dict]
Number = Callable[[Providers], float | None]


@dataclass(frozen=True)
class Goal:
    """A limit on `number` over the cases that `belongs` selects: `of` "mean" and "least" must reach `asked`, "most" must not exceed it."""

    what: str
    asked: float
    belongs: Callable[[dict], bool]
    number: Number
    of: str = "mean"


def speedup(providers: Providers) -> float | None:
    return providers.get(OURS, {}).get("speedup")


def share(providers: Providers) -> float | None:
    row = providers.get(OURS, {})
    return copy_share(row) if "roofline_share" in row else None


def peak(providers: Providers) -> float | None:
    ours, torch = (providers.get(name, {}).get("peak_gib") for name in (OURS, "torch"))
    return ours / torch if ours and torch else None


def family(name: str) -> Callable[[dict], bool]:
    return lambda row: name in row.get("families", ())


def op(name: str, *words: str, shape: str = "") -> Callable[[dict], bool]:
    """Rows of this op whose shape contains the words, or is `shape`."""
    return lambda row: (
        row["op"] == name and all(word in row["shape"] for word in words) and (not shape or row["shape"] == shape)
    )


def step(name: str, needed_bytes: int | None = None) -> Callable[[dict], bool]:
    """Whole optimizer steps over a list, of the layout that needs so many bytes a parameter."""
    return lambda row: (
        op("step", shape=name)(row)
        and (needed_bytes is None or row.get("bytes") == needed_bytes * row.get("params", 0))
    )


def gpt2(row: dict) -> bool:
    return row["op"] == TRAINING and row["model"] == "gpt2-124m" and row["dtype"] == "bf16"


LLAMA, RESNET = "llama-1b", "resnet-50"
GOALS = [
    Goal("GEMM, aligned: torch's time over ours", 1.0, family("aligned"), speedup),
    Goal("GEMM, aligned: each", 0.95, family("aligned"), speedup, "least"),
    Goal("GEMM, fp32 accumulated", 1.1, family("fp32 accumulated"), speedup),
    Goal("GEMM, unaligned controls", 4.0, family("unaligned controls"), speedup),
    Goal("linear + bias + gelu, forward + backward", 1.15, op("linear", "gelu forward + backward"), speedup),
    *(
        Goal(f"optimizer step, Llama-1B, {size} bytes per parameter", asked, step(LLAMA, size), speedup, "least")
        for size, asked in ((34, 1.8), (30, 2.05), (28, 2.2), (20, 3.1))
    ),
    Goal("optimizer step, Llama-1B: share of the copy rate, on the device, each", 0.95, step(LLAMA), share, "least"),
    Goal("optimizer step, ResNet-50: share of the copy rate, on the device, each", 0.90, step(RESNET), share, "least"),
    Goal("LayerNorm, forward + backward", 2.5, op("layer_norm", "forward + backward"), speedup),
    Goal("cross-entropy, forward + backward", 1.5, op("cross_entropy"), speedup),
    Goal("cross-entropy: share of the copy rate, each", 0.75, op("cross_entropy"), share, "least"),
    Goal("training step of GPT-2 124M, bf16: torch eager's time over ours", 1.7, gpt2, speedup),
    Goal("training step of GPT-2 124M, bf16: our peak memory over torch eager's", 0.55, gpt2, peak, "most"),
    Goal("optimizer step: CUDA's time on the device over Triton's", 0.97, op("step"), triton_ratio),
    Goal("GEMM: CUDA's time over Triton's", 0.85, lambda row: row["op"].startswith("gemm"), triton_ratio),
]


def table(rows: list[dict]) -> Table:
    """One line for each goal with a timed case."""
    lines = [("goal", "statistic", "target", "measured", "", "cases", "worst case")]
    for goal in GOALS:
        members = {case: p for case, p in cases(rows).items() if any(map(goal.belongs, p.values()))}
        numbers = {case: number for case, p in members.items() if (number := goal.number(p)) is not None}
        if not numbers:
            continue
        worst = (max if goal.of == "most" else min)(numbers, key=numbers.__getitem__)
        got = statistics.geometric_mean(numbers.values()) if goal.of == "mean" else numbers[worst]
        reached = got <= goal.asked if goal.of == "most" else got >= goal.asked
        said = "missed" if not reached else "met" if len(numbers) == len(members) else "open"
        counted = f"{len(numbers)}" + f" of {len(members)}" * (len(numbers) < len(members))
        lines.append((goal.what, goal.of, f"{goal.asked:g}", f"{got:.2f}", said, counted, " ".join(worst[1:])))
    return lines
