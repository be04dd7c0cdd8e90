"""A run in a few lines, for the README: against torch, also where torch is faster."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator

from .harness.rows import OURS, cases
from .harness.tables import Table

FAMILIES = ("aligned", "skinny", "fp32 accumulated", "epilogue", "unaligned")
LISTS = ("llama-1b", "resnet-50")
PROVIDERS = ("torch", "torch.compile", OURS, f"{OURS} compile", f"{OURS} fused norms")
WIDTH = 118


def text(rows: list[dict], training: list[dict]) -> str:
    first = rows[0]
    dates = " and ".join(sorted({row["date"][:10] for row in rows}))
    head = f"{first['device']}, torch {first['versions']['torch']}, {dates}. "
    head += "Ratios are torch's time divided by ours: below 1, torch is faster."
    points = [*products(rows), *steps(rows), *trainings(training)]
    if bad := [row for row in rows if row["provider"] == OURS and row["status"] != "ok"]:
        points.append(f"wrong or not run: {len(bad)}")
    wrapped = [textwrap.fill(f"- {point}", WIDTH, subsequent_indent="  ") for point in points]
    return "\n".join([textwrap.fill(head, WIDTH), "", *wrapped])


def figures(rows: list[dict], training: list[dict]) -> str:
    """Three figures with their conditions, for the first screen."""
    points = []
    if torch := _bf16(training, "torch"):
        ours = min((row for row in training if row["dtype"] == "bf16" and row["provider"] in PROVIDERS[2:]), key=_ms)
        compiled = _bf16(training, "torch.compile")
        variant = ours["provider"].removeprefix(OURS).strip()
        points.append(
            f"**{ours['ms']:.1f} ms and {ours['peak_gib']:.1f} GiB** for a training step of {torch['shape']} in BF16"
            f"{f' ({variant})' if variant else ''}; torch takes "
            f"{torch['ms']:.1f} ms and {torch['peak_gib']:.1f} GiB"
            + (f", torch.compile {compiled['ms']:.1f} ms and {compiled['peak_gib']:.1f} GiB" if compiled else "")
        )
    both = cases(rows).get(("step", LISTS[0], "bf16 + split master"), {})
    if "p50_us" in both.get("torch", {}) and "p50_us" in both.get(OURS, {}):
        torch, ours = both["torch"], both[OURS]
        held = [row["state_bytes"] / row["params"] for row in (ours, torch)]
        points.append(
            f"**{ours['p50_us'] / 1e3:.1f} ms** for unscaling, clipping and AdamW over the BF16 weights of {LISTS[0]}; torch's fused AdamW "
            f"with FP32 masters takes {torch['p50_us'] / 1e3:.1f} ms"
        )
        points.append(
            f"**{held[0]:.0f} bytes a parameter** for weights and optimizer state with split masters; {held[1]:.0f} with FP32 masters"
        )
    if not points:
        return ""
    dates = " and ".join(sorted({row["date"][:10] for row in [*training, *both.values()]}))
    device, version = rows[0]["device"], rows[0]["versions"]["torch"]
    lines = [textwrap.fill(f"- {point}", WIDTH, subsequent_indent="  ") for point in points]
    return "\n".join([f"On an {device} ({dates}, torch {version}):", "", *lines])


def _bf16(training: list[dict], provider: str) -> dict | None:
    return next((row for row in training if (row["dtype"], row["provider"]) == ("bf16", provider)), None)


def _ms(row: dict) -> float:
    return row["ms"]


def table(rows: list[dict], training: list[dict], unchanged: Callable[[dict], bool]) -> Table:
    """At most ten lines: mean and worst ratio of each family, also those in which torch is faster; those that were timed with the
    kernels of today first."""
    groups = {
        **{f"matrix products, {family}": lambda row, f=family: f in row.get("families", ()) for family in FAMILIES},
        "linear layers, MLPs": lambda row: row["op"] in ("linear", "mlp"),
        "norms": lambda row: row["op"] in ("layer_norm", "rms_norm"),
        **{f"optimizer step, {name}": lambda row, n=name: (row["op"], row["shape"]) == ("step", n) for name in LISTS},
    }
    head, lines = ("", "cases", "torch's time / ours, mean", "worst", "worst case", "kernels"), []
    for name, belongs in groups.items():
        if members := sorted(filter(belongs, timed(rows)), key=lambda row: row["speedup"]):
            mean, worst = statistics.geometric_mean(row["speedup"] for row in members), members[0]
            case = f"{worst['shape']} {worst['dtype']}"
            today = _today(map(unchanged, members))
            lines.append((name, str(len(members)), f"{mean:.2f}", f"{worst['speedup']:.2f}", case, today))
    for row in training:
        if row["dtype"] == "bf16" and row["provider"] == OURS:
            today = _today([unchanged(row)])
            lines.append((f"training step, {row['model']}", "1", *[f"{row['speedup']:.2f}"] * 2, row["shape"], today))
            break
    return [head, *sorted(lines, key=lambda line: line[-1] != "today's")]


def _today(unchanged: Iterable[bool]) -> str:
    return "today's" if all(unchanged) else "earlier"


def products(rows: list[dict]) -> Iterator[str]:
    """The products' families: geometric mean and least of their ratios."""
    found = []
    for family in FAMILIES:
        ratios = [row["speedup"] for row in timed(rows) if family in row.get("families", ())]
        if ratios:
            found.append(f"{family} {statistics.geometric_mean(ratios):.2f} ({min(ratios):.2f})")
    if found:
        yield f"matrix multiplication vs cuBLAS, mean (worst): {', '.join(found)}"


def steps(rows: list[dict]) -> Iterator[str]:
    """The whole step over a list: ratios of the wall's, the device's and the host's times, from the least to the most of
    its layouts."""
    for name in LISTS:
        of_list = [p for (op, shape, _), p in cases(rows).items() if (op, shape) == ("step", name)]
        both = [
            (p["torch"], p[OURS]) for p in of_list if "speedup" in p.get(OURS, {}) and "p50_us" in p.get("torch", {})
        ]
        if not both:
            continue
        parts = [
            f"{part} {between(torch[key] / ours[key] for torch, ours in both)}"
            for part, key in (("device", "device_us"), ("host", "host_us"))
            if all(key in row for pair in both for row in pair)
        ]
        yield f"whole optimizer step, {name}: {between(ours['speedup'] for _, ours in both)}" + (
            f" ({', '.join(parts)})" if parts else ""
        )


def trainings(rows: list[dict]) -> Iterator[str]:
    """Milliseconds and peak memory of a training step in bf16."""
    for (_, shape, dtype), providers in cases(rows).items():
        if dtype != "bf16":
            continue
        said = [
            f"{name} {row['ms']:.1f} ms" + f", {row['peak_gib']:.1f} GiB" * ("peak_gib" in row)
            for name, row in providers.items()
            if name in PROVIDERS
        ]
        yield f"training step, {shape}: {'; '.join(said)}"


def timed(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["provider"] == OURS and "speedup" in row]


def between(values: Iterable[float]) -> str:
    ordered = sorted(values)
    low, high = f"{ordered[0]:.2f}", f"{ordered[-1]:.2f}"
    return low if low == high else f"{low}-{high}"
