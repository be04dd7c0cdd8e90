"""Times the ops against their peers on this machine and records rows, a table and a plot.

python -m amp_kernels bench                        # everything, on CUDA if there is a GPU, else on the CPU
python -m amp_kernels bench --op gemm --shape 4096 --dtype bf16
python -m amp_kernels bench --op step --quick
"""

import argparse
import faulthandler
import gc
import importlib
import json
import pkgutil
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from . import environment, ops, peers, report
from .harness import Case, Effort, measure
from .plot import plot
from .roofline import Roofline

HANG_SECONDS = 180  # for one case, checks and warm-up included
KEY = ("op", "shape", "dtype", "provider")
COLUMNS = (
    "op",
    "shape",
    "dtype",
    "provider",
    "p50 us",
    "p20",
    "p80",
    "GB/s",
    "TFLOP/s",
    "roofline",
    "speed-up",
    "error",
)


def modules() -> dict[str, str]:
    """Module of each benchmark by its name: the files of ops/, and the whole step."""
    package = __package__
    found = {info.name: f"{package}.ops.{info.name}" for info in pkgutil.iter_modules(ops.__path__)}
    return {**found, "step": f"{package}.step"}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m amp_kernels bench", description=__doc__.splitlines()[0])
    parser.add_argument("--op", help=f"comma-separated list of {', '.join(modules())} (default: all)")
    parser.add_argument("--shape", help="only cases whose shape contains this text")
    parser.add_argument("--dtype", help="only cases whose dtype contains this text, such as bf16")
    parser.add_argument("--provider", help="comma-separated list of torch, amp_kernels and peers (default: all)")
    parser.add_argument("--device", help="cpu, cuda or cuda:<index> (default: CUDA if there is one)")
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds: a look, not a record")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument("--out", type=Path, help="folder of the results (default bench/results/<device>)")
    options = parser.parse_args(argv)
    unknown = set(_split(options.op) or ()) - set(modules())
    if unknown:
        parser.error(f"argument --op: {', '.join(sorted(unknown))} is unknown; accepted: {', '.join(modules())}")
    unknown = set(_split(options.provider) or ()) - {"torch", "amp_kernels", *peers.PEERS}
    if unknown:
        accepted = ", ".join(("torch", "amp_kernels", *peers.PEERS))
        parser.error(f"argument --provider: {', '.join(sorted(unknown))} is unknown; accepted: {accepted}")
    try:
        options.device = environment.pick_device(options.device)
    except ValueError as error:
        parser.error(str(error))
    return options


def _split(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",")]


def select(options: argparse.Namespace) -> Iterator[Case]:
    for name in _split(options.op) or modules():
        for case in importlib.import_module(modules()[name]).cases(options.device, options.quick):
            if (options.shape or "") in case.shape and (options.dtype or "") in case.dtype:
                yield case


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmarks; 0 if every provider of this package and torch gave right results, else 1."""
    options = parse(argv)
    if options.list:
        for case in select(options):
            print(f"{case.op:18} {case.shape:28} {case.dtype:28} {', '.join(case.providers)}")
        return 0
    device = options.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    out = options.out or environment.results_folder(device)
    effort = Effort.of(device, options.quick)
    machine = environment.describe(device)
    installed = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    print(f"{machine['device']}; {installed}; commit {machine['commit']}")
    versions = {name: peers.version(name) for name in peers.PEERS}
    print("peers: " + ", ".join(f"{name} {found or 'absent'}" for name, found in versions.items()))
    roofline = Roofline(device, 5 * effort.warmup)
    ceilings = roofline.record()
    print("; ".join(f"{name} {value:,.1f}" for name, value in ceilings.items()), flush=True)

    rows = []
    chosen = _split(options.provider)
    for case in select(options):
        print(f"{case.op} {case.shape} {case.dtype} ...", file=sys.stderr, flush=True)
        # A kernel that never returns cannot be interrupted; the line above then names it.
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True, file=sys.__stderr__)
        measured = measure(case, device, effort, chosen and set(chosen))
        faulthandler.cancel_dump_traceback_later()
        for row in measured:
            _complete(row, roofline)
            row["version"] = _version(row["provider"], machine["versions"], versions)
            row["quick"] = options.quick
            row.update({key: machine[key] for key in ("device", "commit", "date", "versions")}, **ceilings)
        rows += measured
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what one case cached must not be what the next one lacks
    if not rows:
        print("error: no case matches --op, --shape, --dtype and --provider (--list names them)", file=sys.stderr)
        return 2
    shown = table(rows)
    print(f"\n{shown}\n")
    merged = record(out / "rows.jsonl", rows)
    (out / "table.txt").write_text(f"{machine['device']}\n{table(merged)}\n")
    drawn = plot(out / "roofline.png", merged, str(machine["device"]))
    print(f"rows.jsonl, table.txt{', roofline.png' if drawn else ''} in {out}")
    if not drawn:
        print("no plot: matplotlib is not installed (pip install matplotlib)")
    bad = [r for r in rows if r["status"] != "ok" and r["provider"].split(":")[0] in ("torch", "amp_kernels")]
    for row in bad:
        print(f"{row['status'].upper()}: {row['op']} {row['shape']} {row['dtype']} {row['provider']}: {row['reason']}")
    return int(bool(bad))


def _version(provider: str, versions: dict, peer_versions: dict) -> str | None:
    name = provider.split(":")[0]
    return versions.get(name) or peer_versions.get(name)


def _complete(row: dict, roofline: Roofline) -> None:
    """Adds rates and the share of the roofline to a timed row."""
    if "p50_us" not in row:
        return
    seconds = row["p50_us"] / 1e6
    row["gb_per_s"] = row["bytes"] / seconds / 1e9
    row["tflops"] = row["flops"] / seconds / 1e12
    row["roofline_share"] = roofline.floor_seconds(row["bytes"], row["flops"], row["dtype"]) / seconds


def record(path: Path, rows: list[dict]) -> list[dict]:
    """Writes the rows as JSON lines. Rows of earlier runs stay, unless the same thing (KEY) was timed again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    merged = {tuple(row[key] for key in KEY): row for row in [*kept, *rows]}
    path.write_text("".join(json.dumps(row) + "\n" for row in merged.values()))
    return list(merged.values())


def table(rows: list[dict]) -> str:
    lines = [COLUMNS]
    for row in rows:
        cells = [row[key] for key in KEY]
        if row.get("backend"):
            cells[3] += f" ({row['backend']})"
        if "p50_us" not in row:
            lines.append((*cells, row["status"], *[""] * 7))
            continue
        times = [f"{row[key]:,.1f}" for key in ("p50_us", "p20_us", "p80_us")]
        share, speedup = f"{100 * row['roofline_share']:.0f} %", f"{row['speedup']:.2f}" if "speedup" in row else ""
        rates = [f"{row['gb_per_s']:,.3g}", f"{row['tflops']:,.3g}"]
        lines.append((*cells, *times, *rates, share, speedup, f"{row['error']:.1e}"))
    return "\n".join([report.align(lines, left=4), "", *_summary(rows)])


def _summary(rows: list[dict]) -> list[str]:
    """Geometric mean of the speed-ups over the cases of an op and kind of result (the dtype), for each provider."""
    groups: dict[tuple, list[float]] = {}
    for row in rows:
        if row.get("speedup") and row["provider"] != row["baseline"]:
            groups.setdefault((row["op"], row["dtype"], row["provider"], row["baseline"]), []).append(row["speedup"])
    return [
        f"{op} {dtype}: {provider} is {statistics.geometric_mean(values):.2f} times as fast as {baseline} "
        f"(geometric mean of {len(values)}; least {min(values):.2f})"
        for (op, dtype, provider, baseline), values in groups.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
