"""Reports of the harness's rows: tables for the terminal, for files and for the README.

python -m bench.report bench/results/<gpu>                                            # all tables, as Markdown
python -m bench.report bench/results/<gpu> --page docs/gpu.md --readme README.md      # puts them, and a short form, between
                                                                                      # two marks of these pages
python -m bench.report bench/results/<gpu> --merge a/rows.jsonl b/rows.jsonl          # rows of several runs become one folder's
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from . import goals as gpu_goals
from . import plot, summary
from .harness import sources
from .harness.rows import (
    CASE,
    OURS,
    TRAINING,
    TRITON,
    cases,
    copy_share,
    load,
    load_training,
    read,
    record,
    triton_ratio,
)
from .harness.tables import Table, align, format_bytes

MOST_OPEN = 10  # rows, and columns, of a table that is not folded
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
FIGURES = "<!-- figures: begin -->", "<!-- figures: end -->"


@dataclass
class Section:
    """A table, and how many of its first columns are text."""

    title: str
    table: Table
    left: int


def sections(rows: list[dict]) -> list[Section]:
    """The tables of these rows that are not empty."""
    step = [row for row in rows if row["op"] == "step"]
    gemm = [row for row in rows if row["op"].startswith("gemm")]
    host = [row for row in rows if "host_us" in row and row["op"] != "step"]
    training = [row for row in rows if row["op"] == TRAINING]
    timed = [row for row in rows if row["op"] not in ("step", TRAINING) and "host_us" not in row]
    others = [row for row in timed if not row["op"].startswith("gemm")]
    found = [
        Section("Goals", goals(rows), 4),
        Section("Speed-ups", speedups(timed), 2),
        Section("Whole optimizer step", steps(step), 4),
        Section("Training step", trainings(training), 3),
        Section("Host time of a call", hosts(host), 3),
        Section("Matrix multiplication by shape", products(gemm), 2),
        Section("Other ops", ops(others), 3),
    ]
    return [section for section in found if len(section.table) > 1]


def speedups(rows: list[dict]) -> Table:
    """Geometric mean and minimum of the ratios to torch, by family (by op for cases without one) and dtype."""
    groups: dict[tuple[str, str], list[dict[str, dict]]] = {}
    for (op, _, dtype), providers in cases(rows).items():
        for family in next(iter(providers.values())).get("families", [op]):
            groups.setdefault((family, dtype.split()[0]), []).append(providers)
    table = [("family", "dtype", "cases", "vs torch", "worst", "worst case", "Triton vs torch", "Triton vs CUDA")]
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
                percent(ours, ours["roofline_share"]),
            )
        )
    return table


def steps(rows: list[dict]) -> Table:
    """Every provider's whole step: its times, the bytes a parameter that the layout needs, the provider moves and holds.

    The floor is the time of a copy of the needed bytes, "of copy" the bandwidth of the moved ones on the device.
    """
    head = ("list", "layout", "provider", "passes", "step us", "device us", "host us", "vs torch", "vs CUDA")
    table = [(*head, "B/param needed", "moved", "held", "held in total", "floor us", "of copy")]
    found = cases(rows)
    for row in rows:
        name = (row["shape"], row["dtype"], label(row), row.get("pipeline", ""))
        if "p50_us" not in row:
            table.append((*name, row["status"], *[""] * 10))
            continue
        ratio = triton_ratio(found[tuple(row[key] for key in CASE)]) if row["provider"] == TRITON else None
        table.append(
            (
                *name,
                *(f"{row[key]:,.0f}" if key in row else "" for key in ("p50_us", "device_us", "host_us")),
                f"{row['speedup']:.2f}" if "speedup" in row else "",
                f"{ratio:.2f}" if ratio else "",
                *(
                    f"{row[key] / row['params']:.3g}" if key in row else ""
                    for key in ("bytes", "moved_bytes", "state_bytes")
                ),
                format_bytes(row["state_bytes"]),
                f"{row['floor_us']:,.0f}",
                percent(row, copy_share(row)),
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
    """One line a case: ours against torch, and what share of a copy's bandwidth (or of the arithmetic) ours reached."""
    table = [("op", "case", "dtype", "torch us", "ours us", "Triton us", "vs torch", "of copy", "Triton vs ours")]
    for (op, shape, dtype), providers in cases(rows).items():
        ours, ratio = providers.get(OURS, {}), triton_ratio(providers)
        table.append(
            (
                op,
                shape,
                dtype,
                *(_micros(providers.get(name, {})) for name in ("torch", OURS, TRITON)),
                f"{ours['speedup']:.2f}" if "speedup" in ours else "",
                percent(ours, copy_share(ours)) if "roofline_share" in ours else "",
                f"{ratio:.2f}" if ratio else "",
            )
        )
    return table


def trainings(rows: list[dict]) -> Table:
    """Whole training steps, which took turns."""
    table = [("model", "dtype", "provider", "ms a step", "thousand tokens/s", "vs torch", "peak GiB")]
    for row in rows:
        peak = f"{row['peak_gib']:.2f}" if "peak_gib" in row else ""
        rates = f"{row['ms']:.1f}", f"{row['ktok_per_s']:.0f}", f"{row['speedup']:.2f}"
        table.append((row["shape"], row["dtype"], row["provider"], *rates, peak))
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
        share, speedup = percent(row, row["roofline_share"]), f"{row['speedup']:.2f}" if "speedup" in row else ""
        rates = [f"{row['gb_per_s']:,.3g}", f"{row['tflops']:,.3g}"]
        table.append((*name, *times, *rates, share, speedup, f"{row['error']:.1e}"))
    return table


def label(row: dict) -> str:
    return row["provider"] + (f" ({row['backend']})" if row.get("backend") else "")


def percent(row: dict, share: float) -> str:
    """A share of a ceiling; the ceiling of memory is none for a set that stays in the cache."""
    return "in cache" if row.get("in_cache") else f"{100 * share:.0f} %"


def _mean(values: Iterable[float]) -> str:
    values = list(values)
    return f"{statistics.geometric_mean(values):.2f}" if values else ""


def _micros(row: dict) -> str:
    return f"{row['p50_us']:,.1f}" if "p50_us" in row else row.get("status", "")


def _kernel(row: dict) -> str:
    return next(iter(row.get("kernels", [])), "")[:60]


def machine(rows: list[dict]) -> str:
    """Machine and versions with which the rows were measured, in one paragraph. Rows of several runs name each."""

    def each(values: Iterable[str]) -> str:
        return ", ".join(dict.fromkeys(values))

    installed = each(f"{name} {version}" for row in rows for name, version in row["versions"].items())
    peers = each(f"{name} {version}" for row in rows for name, version in row["peers"].items())
    copy = each(f"{row['copy_gb_per_s']:,.0f} GB/s" for row in rows)
    two_reads = each(f"{row['two_reads_gb_per_s']:,.0f} GB/s" for row in rows if "two_reads_gb_per_s" in row)
    addition = f", two reads to a write {two_reads}" if two_reads else ""
    peak = each(f"{row['tflops_bf16']:,.3g} TFLOP/s" for row in rows)
    cpu = each(f"; {row['threads']} threads, {row['isa']}" for row in rows if "isa" in row)
    return (
        f"{each(row['device'] for row in rows)}{cpu}; {installed}; commit {each(str(row['commit']) for row in rows)}, "
        f"{each(row['date'][:10] for row in rows)}. Peers: {peers}. Measured in the same run: copy {copy}{addition}, 16-bit "
        f"arithmetic {peak}."
    )


def text(rows: list[dict]) -> str:
    parts = [align(everything(rows), left=4)]
    parts += [f"{section.title}\n{align(section.table, section.left)}" for section in sections(rows)]
    return "\n\n".join(parts)


def write(folder: Path, rows: list[dict]) -> None:
    """Tables and pictures of these rows into their folder."""
    (folder / "table.txt").write_text(f"{machine(rows)}\n\n{text(rows)}\n")
    if not plot.draw(folder, rows, load_training(folder)):
        print("no picture: matplotlib is not installed (pip install matplotlib)")


def markdown(folder: Path, page: Path) -> str:
    """The tables of a results folder for a page that lies at `page`, with links that hold there: ten rows and a picture, the goals, the
    other tables, and where the rows come from. Rows whose kernels have not changed since come first."""
    rows, training = published(folder)
    unchanged = sources.stands(folder)
    rows, training = (sorted(part, key=lambda row: not unchanged(row)) for part in (rows, training))
    where = Path(os.path.relpath(folder, page.parent)).as_posix()
    pictures = [f"![{name}]({where}/{name}.png)" for name in plot.pictures(folder)]
    parts = [
        standing(rows, training, unchanged),
        markdown_table(Section("", summary.table(rows, training, unchanged), 1)),
    ]
    parts += pictures[:1]
    goals_of_gpu = gpu_goals.table([*rows, *training])
    if len(goals_of_gpu) > 1 and not any("isa" in row for row in rows):
        parts.append(f"## Goals\n\n{markdown_table(Section('', goals_of_gpu, 2))}")
    parts += [f"## {section.title}\n\n{_folded(section)}" for section in sections([*rows, *training])]
    if pictures[1:]:
        parts.append("\n\n".join(["## Pictures", *pictures[1:]]))
    if bad := [row for row in rows if row["status"] != "ok"]:
        listed = "; ".join(f"{' '.join(row[key] for key in CASE)}, {row['provider']}: {row['reason']}" for row in bad)
        parts.append(f"Wrong or not run: {listed}.")
    commits = dict.fromkeys(str(row["commit"]) for row in rows)
    parts.append(
        f"## Provenance\n\n{machine(rows)} {sources.told(folder, commits)} Rows, table and pictures: `{where}`."
    )
    return "\n\n".join(parts)


def standing(rows: list[dict], training: list[dict], unchanged: Callable[[dict], bool]) -> str:
    """Machine and dates, and how many cases were timed with the kernels of today."""
    found = cases([*rows, *training])
    still = sum(all(map(unchanged, providers.values())) for providers in found.values())
    dates = " and ".join(sorted({row["date"][:10] for row in [*rows, *training]}))
    ran = (
        f"{still} of them ran today's kernels, the others earlier ones"
        if still
        else "All ran earlier kernels than today's"
    )
    return (
        f"{rows[0]['device']}, torch {rows[0]['versions']['torch']}, {dates}, {len(found)} cases. {ran} ([provenance](#provenance)). "
        "Ratios below 1: torch is faster."
    )


def published(folder: Path) -> tuple[list[dict], list[dict]]:
    """The rows of a folder and those of its training steps.

    Raises ValueError if the folder has no rows, or only those of --quick, which are a look and not a record.
    """
    rows = load(folder)
    kept = [row for row in rows if not row.get("quick")]
    if not kept:
        raise ValueError(f"{folder} has no rows" + " but those of --quick" * bool(rows))
    return kept, load_training(folder)


def _folded(section: Section) -> str:
    """The table, folded below a line to click on if it is long or wide."""
    count, table = len(section.table) - 1, markdown_table(section)
    if max(count, len(section.table[0])) <= MOST_OPEN:
        return table
    return f'<details markdown="1"><summary>{count} rows</summary>\n\n{table}\n\n</details>'


def markdown_table(section: Section) -> str:
    head, *body = section.table
    rule = ["---" if i < section.left else "--:" for i in range(len(head))]
    lines = [head, rule, *([cell.replace("|", "\\|") for cell in row] for row in body)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def fill(page: Path, shown: str, marks: tuple[str, str] = (BEGIN, END)) -> None:
    """Replaces what stands between the page's marks. Raises ValueError if it has not exactly one pair of them."""
    before, (begin, end) = page.read_text(), marks
    if before.count(begin) != 1 or before.count(end) != 1 or before.index(begin) > before.index(end):
        raise ValueError(f"{page} needs one line {begin} and, below it, one line {end}")
    head, rest = before.split(begin)
    page.write_text(f"{head}{begin}\n{shown}\n{end}{rest.split(end)[1]}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a folder of results, such as bench/results/<gpu>")
    parser.add_argument(
        "--merge", nargs="+", default=[], type=Path, metavar="ROWS", help="files of rows that join it first"
    )
    parser.add_argument("--page", type=Path, help="a page that gets all tables; without it they are printed")
    parser.add_argument("--readme", type=Path, help="a page that gets the short form")
    options = parser.parse_args(argv)
    try:
        for path in options.merge:
            if not path.exists():
                raise ValueError(f"--merge: {path} does not exist")
            record(options.folder / "rows.jsonl", read(path))
        if rows := load(options.folder):
            write(options.folder, rows)
        shown = markdown(options.folder, options.page or Path("README.md"))
        if options.page:
            fill(options.page, shown)
        if options.readme:
            fill(options.readme, summary.text(*published(options.folder)))
            if figures := summary.figures(*published(options.folder)):
                fill(options.readme, figures, FIGURES)
        if not options.page and not options.readme:
            print(shown)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
