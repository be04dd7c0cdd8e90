"""The pictures of a results folder: one per family of ops, and one of whole training steps. Readable at 800 pixels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .harness.rows import OURS, cases
from .harness.tables import pyplot

MOST_BARS = 14
INCHES, DPI = 8.0, 150  # 1,200 pixels wide

#: The ops of each picture. A family without timed rows has none.
FAMILIES = {
    "step": ("step", "adamw_"),
    "products": ("gemm", "gemm_dact", "gemm_accumulate_"),
    "layers": ("linear", "mlp"),
    "norms": ("layer_norm", "rms_norm"),
    "losses": ("cross_entropy", "linear_cross_entropy"),
    "elementwise": ("activation", "activation_backward", "cast_", "embedding", "rotary"),
}

#: The trainings of the first picture: provider and name there.
TRAININGS = {
    "torch": "torch, eager",
    "torch.compile": "torch.compile",
    f"{OURS} three lines": "three lines",
    OURS: "three lines + fused loss",
    f"{OURS} compile": "the same, compiled",
    f"{OURS} fused norms": "fused loss, fused norms",
}
STEP, LAYOUTS = "llama-1b", ("fp32", "bf16 + fp32 master", "bf16 + split master")
BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 0}  # a number hides the line
THEIRS_COLOR, OURS_COLOR = "tab:gray", "tab:blue"

Bar = tuple[str, float, str]  # its name, length and color


def ratios(rows: list[dict], family: str) -> tuple[list[Bar], int]:
    """Torch's time over ours in the cases of a family, from best to worst, and the number of all cases.

    More than `MOST_BARS` cases are thinned out at equal distances in that order; the best and the worst stay."""
    timed = [row for row in rows if row["op"] in FAMILIES[family] and row["provider"] == OURS and "speedup" in row]
    timed.sort(key=lambda row: -row["speedup"])
    count = len(timed)
    if count > MOST_BARS:
        timed = [timed[round(i * (count - 1) / (MOST_BARS - 1))] for i in range(MOST_BARS)]
    # Those families tell the ops by shape and dtype.
    several = len({row["op"] for row in timed}) > 1 and family not in ("step", "products")
    names = [f"{row['op']} " * several + f"{row['shape']}, {row['dtype']}" for row in timed]
    names = [name.replace("forward", "fwd").replace("backward", "bwd") for name in names]
    color = [OURS_COLOR if row["speedup"] >= 1 else "tab:red" for row in timed]
    return [(name, row["speedup"], c) for name, row, c in zip(names, timed, color, strict=True)], count


def trainings(rows: list[dict]) -> tuple[list[Bar], list[Bar]]:
    """Milliseconds and peak GiB of the first model's training step in bf16."""
    bf16 = [row for row in rows if row["dtype"] == "bf16" and row["provider"] in TRAININGS]
    bf16 = [row for row in bf16 if row["shape"] == bf16[0]["shape"] and "peak_gib" in row]
    bars = [(TRAININGS[row["provider"]], row, _color(row["provider"])) for row in bf16]
    return [(name, row["ms"], c) for name, row, c in bars], [(name, row["peak_gib"], c) for name, row, c in bars]


def steps(rows: list[dict]) -> list[Bar]:
    """Milliseconds of the whole optimizer step over Llama-1B's tensors, torch's and ours by layout."""
    found = cases(row for row in rows if row["op"] == "step" and row["shape"] == STEP and "p50_us" in row)
    return [
        (f"{provider}, {layout}", providers[provider]["p50_us"] / 1e3, _color(provider))
        for layout in LAYOUTS
        if (providers := found.get(("step", STEP, layout)))
        for provider in ("torch", OURS)
        if provider in providers
    ]


def held(rows: list[dict]) -> list[Bar]:
    """Bytes a parameter of weights and optimizer state, by layout, from most to least.

    Torch's step has FP32 masters in every layout of 16-bit weights: the first is shown, and the one in which all is BF16."""
    found = [row for row in rows if row["op"] == "step" and row["shape"] == STEP and "state_bytes" in row]
    found = [row for row in found if row["provider"] in (OURS, "torch:all bf16") or row["dtype"] in LAYOUTS[:2]]
    found = [row for row in found if not row["provider"].startswith(f"{OURS}:")]
    names = [f"{row['provider']}" + f", {row['dtype']}" * (":" not in row["provider"]) for row in found]
    bars = [
        (name, row["state_bytes"] / row["params"], _color(row["provider"]))
        for name, row in zip(names, found, strict=True)
    ]
    return sorted(bars, key=lambda bar: -bar[1])


def _color(provider: str) -> str:
    return OURS_COLOR if provider.startswith(OURS) else THEIRS_COLOR


def draw(folder: Path, rows: list[dict], training: list[dict]) -> list[str]:
    """Draws the pictures of these rows into their folder, and returns their names without the suffix; none without matplotlib."""
    plt = pyplot()
    if plt is None:
        return []
    drawn = ["training"] * _draw_training(plt, folder / "training.png", rows, training)
    if bars := held(rows):
        title = f"bytes a parameter that weights and optimizer state hold, {STEP}"
        _draw(plt, folder / "memory.png", [(title, bars, "", None)], _source(rows))
        drawn.append("memory")
    for family in FAMILIES:
        bars, count = ratios(rows, family)
        if bars:
            told = f"{family}: torch's time / ours" + f", {len(bars)} of {count} cases" * (count > len(bars))
            _draw(plt, folder / f"{family}.png", [(f"{told}; below 1, torch is faster", bars, "", 1.0)], _source(rows))
            drawn.append(family)
    return drawn


def _draw_training(plt, path: Path, rows: list[dict], training: list[dict]) -> bool:
    times, peaks = trainings(training)
    if not times:
        return False
    model = next(row["shape"] for row in training)
    panels = [
        (f"training step, {model}, bf16: milliseconds", times, "ms", None),
        ("the same: peak memory, GiB", peaks, "GiB", None),
    ]
    if of_step := steps(rows):
        panels.append((f"optimizer step, {STEP}: milliseconds", of_step, "ms", None))
    last = [row["losses"][-1] for row in training if row.get("losses")]
    note = f"{_source(training)}"
    if last:
        between = " to ".join(sorted({f"{min(last):.4f}", f"{max(last):.4f}"}))
        note += f". Loss after {len(training[0]['losses'])} steps: {between}"
    note += ".\nFused loss: ak.linear_cross_entropy instead of head and loss."
    _draw(plt, path, panels, note)
    return True


def _source(rows: list[dict]) -> str:
    """Device, version and dates of the rows."""
    dates = " and ".join(sorted({row["date"][:10] for row in rows}))
    return f"{rows[0]['device']}, torch {rows[0]['versions']['torch']}, {dates}"


def _draw(plt, path: Path, panels: list[tuple[str, list[Bar], str, float | None]], note: str) -> None:
    """Horizontal bars in panels one below the other, each bar with its number; `note` stands below."""
    counts = [len(bars) for _, bars, _, _ in panels]
    figure, axes = plt.subplots(
        len(panels),
        1,
        squeeze=False,
        figsize=(INCHES, 0.7 + sum(0.55 + 0.3 * count for count in counts)),
        height_ratios=[count + 0.5 for count in counts],
        layout="constrained",
    )
    for axis, (title, bars, unit, line) in zip(axes.flat, panels, strict=True):
        names, lengths, colors = zip(*bars, strict=True)
        places = range(len(bars))
        axis.barh(places, lengths, color=colors, height=0.75)
        for place, length in zip(places, lengths, strict=True):
            axis.text(length, place, f"  {_number(length)} {unit}".rstrip(), va="center", fontsize=11, bbox=BEHIND)
        axis.set_yticks(places, names, fontsize=11)
        axis.set_ylim(len(bars) - 0.4, -0.6)
        axis.set_xlim(0, 1.2 * max(lengths))
        axis.set_xticks([])
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        if len(panels) > 1:
            axis.set_title(title, fontsize=12, loc="left")
        if line is not None:
            axis.axvline(line, color="black", linewidth=1)
    if len(panels) == 1:  # its names may be long
        figure.suptitle(panels[0][0], fontsize=12, x=0.01, ha="left")
    figure.supxlabel(note, fontsize=9, x=0.01, ha="left")
    figure.savefig(path, dpi=DPI)
    plt.close(figure)


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def pictures(folder: Path) -> Iterator[str]:
    """The names of the pictures that a folder has, the first one first."""
    return (name for name in ("training", "memory", *FAMILIES) if (folder / f"{name}.png").exists())
