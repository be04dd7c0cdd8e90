"""What the rows of the harness say: tables for the terminal, for files and for the README.

python -m bench.report bench/results/<gpu>                       # the Markdown that the README shows
python -m bench.report bench/results/<gpu> --readme README.md    # puts it between the README's two marks
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
OURS, TRITON = "amp_kernels", "amp_kernels:triton"
CASE = ("op", "shape", "dtype")
Table = list[tuple[str, ...]]  # the first row is the head


@dataclass
class Section:
    """A table, how many of its first columns are text, and whether a page shows it folded."""

    title: str
    table: Table
    left: int
    folded: bool = False


def sections(rows: list[dict]) -> list[Section]:
    """The tables of these rows that are not empty."""
    step = [row for row in rows if row["op"] == "step"]
    gemm = [row for row in rows if row["op"].startswith("gemm")]
    host = [row for row in rows if "host_us" in row and row["op"] != "step"]
    others = [row for row in rows if not (row["op"].startswith("gemm") or row["op"] == "step" or "host_us" in row)]
    found = [
        Section("Goals", goals(rows), 4),
        Section("Speed-ups", speedups([row for row in rows if row["op"] != "step" and "host_us" not in row]), 2),
        Section("Whole optimizer step", steps(step), 4),
        Section("Host time of a call", hosts(host), 3),
        Section("Matrix products by shape", products(gemm), 2, folded=True),
        Section("Other ops", ops(others), 3, folded=True),
    ]
    return [section for section in found if len(section.table) > 1]


def cases(rows: Iterable[dict]) -> dict[tuple[str, ...], dict[str, dict]]:
    """Rows by case, then by provider."""
    found: dict[tuple[str, ...], dict[str, dict]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in CASE), {})[row["provider"]] = row
    return found


def speedups(rows: list[dict]) -> Table:
    """Geometric mean and least of the ratios to torch: by family where a case has one, else by op; and 16-bit format."""
    groups: dict[tuple[str, str], list[dict[str, dict]]] = {}
    for (op, _, dtype), providers in cases(rows).items():
        for family in next(iter(providers.values())).get("families", [op]):
            groups.setdefault((family, dtype.split()[0]), []).append(providers)
    table = [("family", "dtype", "cases", "vs torch", "least", "least at", "Triton vs torch", "Triton vs CUDA")]
    for (family, dtype), members in groups.items():
        ours = [p[OURS] for p in members if p.get(OURS, {}).get("speedup")]
        least = min(ours, key=lambda row: row["speedup"], default=None)
        triton = [p[TRITON]["speedup"] for p in members if p.get(TRITON, {}).get("speedup")]
        table.append(
            (
                family,
                dtype,
                f"{len(ours)}" + f" of {len(members)}" * (len(ours) < len(members)),
                _mean(row["speedup"] for row in ours),
                f"{least['speedup']:.2f}" if least else "",
                least["shape"] if least else "",
                _mean(triton),
                _mean(ratio for p in members if (ratio := triton_ratio(p))),
            )
        )
    return table


def goals(rows: list[dict]) -> Table:
    """Cases with a goal: ratio to torch with its 20th and 80th percentile over the rounds."""
    table = [("op", "case", "dtype", "", "torch us", "ours us", "vs torch", "p20", "p80", "goal", "of roofline")]
    for (op, shape, dtype), providers in cases(row for row in rows if "goal" in row).items():
        torch, ours = providers.get("torch", {}), providers.get(OURS, {})
        if "speedup" not in ours:
            continue
        table.append(
            (
                op,
                shape,
                dtype,
                "met" if ours["speedup"] >= ours["goal"] else "missed",
                *(f"{row['p50_us']:,.1f}" for row in (torch, ours)),
                *(f"{ours[key]:.2f}" for key in ("speedup", "speedup_p20", "speedup_p80", "goal")),
                f"{100 * ours['roofline_share']:.0f} %",
            )
        )
    return table


def triton_ratio(providers: dict[str, dict]) -> float | None:
    """How many times as fast as our CUDA kernel the Triton kernel of the same op is, on the device where that was timed
    alone; None unless both were timed."""
    ours, triton = providers.get(OURS, {}), providers.get(TRITON, {})
    for key in ("device_us", "p50_us"):
        if key in ours and key in triton:
            return ours[key] / triton[key]
    return None


def steps(rows: list[dict]) -> Table:
    """Every provider's whole step: its times, the bytes a parameter that the layout needs, the provider moves and holds.

    The floor is the time of a copy of the needed bytes, "of copy" the bandwidth of the moved ones on the device.
    """
    head = ("list", "layout", "provider", "passes", "step us", "device us", "host us", "vs torch", "vs CUDA")
    table = [(*head, "B/param needed", "moved", "held", "held in all", "floor us", "of copy")]
    found = cases(rows)
    for row in rows:
        name = (row["shape"], row["dtype"], label(row), row.get("pipeline", ""))
        if "p50_us" not in row:
            table.append((*name, row["status"], *[""] * 10))
            continue
        share = row.get("device_share", row["roofline_share"]) * row["moved_bytes"] / row["bytes"]
        ratio = triton_ratio(found[tuple(row[key] for key in CASE)]) if row["provider"] == TRITON else None
        table.append(
            (
                *name,
                *(f"{row[key]:,.0f}" if key in row else "" for key in ("p50_us", "device_us", "host_us")),
                f"{row['speedup']:.2f}" if "speedup" in row else "",
                f"{ratio:.2f}" if ratio else "",
                *(f"{row[key] / row['params']:.3g}" for key in ("bytes", "moved_bytes", "state_bytes")),
                format_bytes(row["state_bytes"]),
                f"{row['floor_us']:,.0f}",
                f"{100 * share:.0f} %",
            )
        )
    return table


def hosts(rows: list[dict]) -> Table:
    table = [("op", "case", "provider", "host us", "call us", "vs torch")]
    for row in rows:
        cells = [f"{row[key]:,.1f}" if key in row else row["status"] for key in ("host_us", "p50_us")]
        table.append((row["op"], row["shape"], label(row), *cells, f"{row['speedup']:.2f}" if "speedup" in row else ""))
    return table


def products(rows: list[dict]) -> Table:
    """One line a shape: rates, ratios, and what runs underneath."""
    table = [
        ("shape", "dtype", "torch TFLOP/s", "ours", "ours vs torch", "Triton vs ours", "torch's kernel", "our plan")
    ]
    for (_, shape, dtype), providers in cases(rows).items():
        torch, ours = providers.get("torch", {}), providers.get(OURS, {})
        ratio = triton_ratio(providers)
        table.append(
            (
                shape,
                dtype,
                *(f"{row['tflops']:,.3g}" if "tflops" in row else row.get("status", "") for row in (torch, ours)),
                f"{ours['speedup']:.2f}" if "speedup" in ours else "",
                f"{ratio:.2f}" if ratio else "",
                _kernel(torch),
                ours.get("plan") or _kernel(ours),
            )
        )
    return table


def ops(rows: list[dict]) -> Table:
    """One line a case: ours against torch."""
    head = ("op", "case", "dtype", "torch us", "ours us", "GB/s", "of roofline", "vs torch", "Triton vs ours")
    table = [head]
    for (op, shape, dtype), providers in cases(rows).items():
        torch, ours = providers.get("torch", {}), providers.get(OURS, {})
        ratio = triton_ratio(providers)
        table.append(
            (
                op,
                shape,
                dtype,
                *(f"{row['p50_us']:,.1f}" if "p50_us" in row else row.get("status", "") for row in (torch, ours)),
                f"{ours['gb_per_s']:,.3g}" if "gb_per_s" in ours else "",
                f"{100 * ours['roofline_share']:.0f} %" if "roofline_share" in ours else "",
                f"{ours['speedup']:.2f}" if "speedup" in ours else "",
                f"{ratio:.2f}" if ratio else "",
            )
        )
    return table


def everything(rows: list[dict]) -> Table:
    """One line a row, with the spread of its times and its error."""
    head = (*CASE, "provider", "p50 us", "p20", "p80", "GB/s", "TFLOP/s", "roofline", "speed-up", "error")
    table = [head]
    for row in rows:
        name = (*(row[key] for key in CASE), label(row))
        if "p50_us" not in row:
            table.append((*name, row["status"], *[""] * 7))
            continue
        times = [f"{row[key]:,.1f}" for key in ("p50_us", "p20_us", "p80_us")]
        share, speedup = f"{100 * row['roofline_share']:.0f} %", f"{row['speedup']:.2f}" if "speedup" in row else ""
        rates = [f"{row['gb_per_s']:,.3g}", f"{row['tflops']:,.3g}"]
        table.append((*name, *times, *rates, share, speedup, f"{row['error']:.1e}"))
    return table


def label(row: dict) -> str:
    return row["provider"] + (f" ({row['backend']})" if row.get("backend") else "")


def _mean(values: Iterable[float]) -> str:
    values = list(values)
    return f"{statistics.geometric_mean(values):.2f}" if values else ""


def _kernel(row: dict) -> str:
    return next(iter(row.get("kernels", [])), "")[:60]


def machine(rows: list[dict]) -> str:
    """Where and with what the rows were measured, in one paragraph. Rows of several runs name each."""

    def each(values: Iterable[str]) -> str:
        return ", ".join(dict.fromkeys(values))

    installed = each(f"{name} {version}" for row in rows for name, version in row["versions"].items())
    peers = each(f"{name} {version}" for row in rows for name, version in row["peers"].items())
    copy = each(f"{row['copy_gb_per_s']:,.0f} GB/s" for row in rows)
    peak = each(f"{row['tflops_bf16']:,.3g} TFLOP/s" for row in rows)
    cpu = each(f"; {row['threads']} threads, {row['isa']}" for row in rows if "isa" in row)
    return (
        f"{each(row['device'] for row in rows)}{cpu}; {installed}; commit {each(str(row['commit']) for row in rows)}, "
        f"{each(row['date'][:10] for row in rows)}. Peers: {peers}. Measured in the same run: copy {copy}, 16-bit "
        f"arithmetic {peak}."
    )


def text(rows: list[dict]) -> str:
    parts = [align(everything(rows), left=4)]
    parts += [f"{section.title}\n{align(section.table, section.left)}" for section in sections(rows)]
    return "\n\n".join(parts)


def write(folder: Path, rows: list[dict]) -> None:
    """Tables and plots of these rows into their folder."""
    from .plot import plot_products, plot_roofline

    name = str(rows[0]["device"])
    (folder / "table.txt").write_text(f"{machine(rows)}\n\n{text(rows)}\n")
    if not plot_roofline(folder / "roofline.png", rows, name):
        print("no plot: matplotlib is not installed (pip install matplotlib)")
    plot_products(folder / "gemm.png", rows, name)


def markdown(folder: Path, page: Path) -> str:
    """The tables of a results folder for a page that lies at `page`, with links that hold there.

    Raises ValueError if the folder has no rows, or only those of --quick, which are a look and not a record.
    """
    rows = load(folder)
    quick = [row for row in rows if row.get("quick")]
    rows = [row for row in rows if not row.get("quick")]
    if not rows:
        raise ValueError(f"{folder} has no rows" + " but those of --quick" * bool(quick))
    bad = [row for row in rows if row["status"] != "ok"]
    where = Path(os.path.relpath(folder, page.parent)).as_posix()
    parts = [f"{machine(rows)} [Rows]({where}/rows.jsonl), [table]({where}/table.txt)."]
    for section in sections(rows):
        shown = _markdown_table(section)
        if section.folded:
            shown = f"<details><summary>{section.title}</summary>\n\n{shown}\n\n</details>"
        else:
            shown = f"**{section.title}**\n\n{shown}"
        parts.append(shown)
    if (folder / "gemm.png").exists():
        parts.append(f"![TFLOP/s by shape and provider]({where}/gemm.png)")
    if bad:
        listed = "; ".join(f"{' '.join(row[key] for key in CASE)}, {row['provider']}: {row['reason']}" for row in bad)
        parts.append(f"Wrong or not run: {listed}.")
    return "\n\n".join(parts)


def _markdown_table(section: Section) -> str:
    head, *body = section.table
    rule = ["---" if i < section.left else "--:" for i in range(len(head))]
    lines = [head, rule, *([cell.replace("|", "\\|") for cell in row] for row in body)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def fill(page: Path, shown: str) -> None:
    """Replaces what stands between the page's marks. Raises ValueError if it has not exactly one pair of them."""
    before = page.read_text()
    if before.count(BEGIN) != 1 or before.count(END) != 1 or before.index(BEGIN) > before.index(END):
        raise ValueError(f"{page} needs one line {BEGIN} and, below it, one line {END}")
    head, rest = before.split(BEGIN)
    page.write_text(f"{head}{BEGIN}\n{shown}\n{END}{rest.split(END)[1]}")


def load(folder: Path) -> list[dict]:
    path = folder / "rows.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def align(rows: Table, left: int = 2) -> str:
    """Rows of text as a table: the first row is the head, the first `left` columns are aligned left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def format_bytes(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, help="folders of results, such as bench/results/<gpu>")
    parser.add_argument("--readme", type=Path, help="a page to fill; without it the Markdown is printed")
    options = parser.parse_args(argv)
    page = options.readme or Path("README.md")
    try:
        for folder in options.folders:
            if rows := load(folder):
                write(folder, rows)
        shown = "\n\n".join(markdown(folder, page) for folder in options.folders)
        if options.readme:
            fill(options.readme, shown)
        else:
            print(shown)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
