"""The page of the other libraries, from the records of ``python -m amp_kernels bench --peers``.

python -m bench.peers_page bench/results/<device>/peers --page docs/peers.md      # several folders make a section each
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from . import report
from .harness.rows import OURS, load, load_training
from .harness.tables import Table, pyplot
from .ops.peers import PEERS

PICTURE = "peers.png"
MOST_BARS = 14


def tables(rows: list[dict], training: list[dict]) -> list[report.Section]:
    """Whole steps, functions, and training steps: one line for each provider."""
    steps = [row for row in rows if row["op"] == "step"]
    others = [row for row in rows if row["op"] != "step"]
    found = [
        report.Section("Optimizer step", _steps(steps), 3),
        report.Section("Norms, losses, linear layers", _functions(others), 3),
        report.Section("GPT-2", _trainings(training), 3),
    ]
    return [section for section in found if len(section.table) > 1]


def _steps(rows: list[dict]) -> Table:
    table = [("parameters", "provider", "passes", "ms", "vs torch", "bytes held a parameter", "error")]
    for row in timed(rows):
        held = f"{row['state_bytes'] / row['params']:.3g}" if row.get("params") else ""
        table.append(
            (
                f"{row['shape']}, {row['dtype']}",
                label(row),
                row["pipeline"],
                *_numbers(row),
                held,
                f"{row['error']:.0e}",
            )
        )
    return table


def _functions(rows: list[dict]) -> Table:
    table = [("op", "case", "provider", "ms", "vs torch", "error")]
    for row in timed(rows):
        table.append((row["op"], f"{row['shape']}, {row['dtype']}", label(row), *_numbers(row), f"{row['error']:.0e}"))
    return table


def _trainings(rows: list[dict]) -> Table:
    table = [("model", "dtype", "provider", "ms a step", "vs torch", "peak GiB", "error of the first loss")]
    for row in rows:
        peak = f"{row['peak_gib']:.2f}" if "peak_gib" in row else ""
        shape = f"{row['shape']}, {row['layers']} layers"
        table.append(
            (
                shape,
                row["dtype"],
                row["provider"],
                f"{row['ms']:.1f}",
                f"{row['speedup']:.2f}",
                peak,
                f"{row['error']:.0e}",
            )
        )
    return table


def timed(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["status"] == "ok"]


def label(row: dict) -> str:
    version = row.get("version")
    shown = version and version != "unknown" and not row["provider"].startswith(("torch:", "torch.compile"))
    return f"{row['provider']} {version}" if shown else row["provider"]


def _numbers(row: dict) -> tuple[str, str]:
    return f"{row['p50_us'] / 1e3:,.3g}", f"{row['speedup']:.2f}" if "speedup" in row else ""


def left_out(rows: list[dict]) -> Table:
    """The libraries without a time, with the reason and the command that installs them; then what was wrong."""
    table = [("not timed", "reason", "install")]
    skipped = {name: why for row in rows for name, why in row["skipped"].items()}
    table += [(name, why, f"`{PEERS[name].install}`") for name, why in skipped.items()]
    bad = [row for row in rows if row["status"] != "ok"]
    table += [(row["provider"], f"{row['op']} {row['shape']}, {row['dtype']}: {row['reason']}", "") for row in bad]
    return table


def machine(rows: list[dict]) -> str:
    """The record's machine, date, versions and load."""

    def each(key: str) -> str:
        return ", ".join(dict.fromkeys(str(row[key]) for row in rows if key in row))

    versions = dict.fromkeys(f"{name} {found}" for row in rows for name, found in row["versions"].items())
    loads = [row["load"] for row in rows if "load" in row]
    said = f"{each('device')}, {rows[0]['threads']} thread{'s' * (rows[0]['threads'] > 1)}; {', '.join(versions)}; "
    said += f"commit {each('commit')}, {', '.join(dict.fromkeys(row['date'][:10] for row in rows))}."
    if loads:
        said += f" Load average {min(loads):g} to {max(loads):g} on {os.cpu_count()} cores: providers took turns, so read the ratios."
    return said


def bars(rows: list[dict]) -> list[tuple[str, float, bool]]:
    """Torch's time over each provider's whole step, over the list with the most providers: name, ratio, and if it is ours."""
    steps = [row for row in timed(rows) if row["op"] == "step" and "speedup" in row and row["provider"] != "torch"]
    lists = [row["shape"].partition(",")[0] for row in steps]
    chosen = max(dict.fromkeys(lists), key=lists.count, default=None)
    found = [
        (
            f"{row['provider']}, {row['dtype']}{', Muon' * row['shape'].endswith('Muon')}",
            row["speedup"],
            row["provider"] == OURS,
        )
        for row, name in zip(steps, lists, strict=True)
        if name == chosen
    ]
    return sorted(found, key=lambda bar: -bar[1])[:MOST_BARS]


def draw(folder: Path, rows: list[dict]) -> bool:
    """The picture of the whole steps, sorted. False if matplotlib is not installed or nothing was timed."""
    plt, shown = pyplot(), bars(rows)
    if plt is None or not shown:
        return False
    names, values, ours = zip(*shown, strict=True)
    figure, axis = plt.subplots(figsize=(8, 1.2 + 0.3 * len(names)))
    drawn = axis.barh(range(len(names)), values, color=["tab:blue" if own else "tab:gray" for own in ours])
    axis.bar_label(drawn, fmt="%.2f", padding=3, fontsize=9)
    axis.set_yticks(range(len(names)), names, fontsize=9)
    axis.invert_yaxis()
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_xscale("log")
    axis.margins(x=0.15)
    axis.set_xlabel("torch's time of a step over the provider's", fontsize=9)
    date, load = rows[0]["date"][:10], rows[0].get("load")
    busy = "" if load is None else f", load average {load:g}"
    axis.set_title(f"{machine(rows).split(';')[0]}, {date}{busy}", fontsize=10)
    figure.tight_layout()
    figure.savefig(folder / PICTURE, dpi=150)
    plt.close(figure)
    return True


def markdown(folder: Path, page: Path) -> str:
    """A section of the page for a folder of records. Raises ValueError if it has none."""
    rows, training = load(folder), load_training(folder)
    if not rows:
        raise ValueError(f"{folder} has no rows.jsonl")
    where = Path(os.path.relpath(folder, page.parent)).as_posix()
    parts = [f"## {rows[0]['device']}", machine(rows)]
    if (folder / PICTURE).exists():
        parts.append(f"![Optimizer steps of every library]({where}/{PICTURE})")
    for section in tables(rows, training):
        parts += [f"### {section.title}", report.markdown_table(section)]
    missing = left_out(rows)
    if len(missing) > 1:
        parts += ["### Not timed", report.markdown_table(report.Section("", missing, 3))]
    return "\n\n".join(parts)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.peers_page", description=__doc__.splitlines()[0])
    parser.add_argument(
        "folders", type=Path, nargs="+", help="folders of records, such as bench/results/<device>/peers"
    )
    parser.add_argument("--page", type=Path, help="a page that gets the sections; without it they are printed")
    options = parser.parse_args(argv)
    try:
        for folder in options.folders:
            if not draw(folder, load(folder)):
                print(f"no picture of {folder}: matplotlib is not installed, or nothing was timed", file=sys.stderr)
        shown = "\n\n".join(markdown(folder, options.page or Path("README.md")) for folder in options.folders)
        if options.page:
            report.fill(options.page, shown)
        else:
            print(shown)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
