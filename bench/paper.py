"""The paper's table, scaled down: `make paper`, or `python -m bench.paper`.

Micikevicius et al., "Mixed Precision Training" (ICLR 2018), trained classifiers, detectors, speech and language models, translation
and GANs in FP32 and in mixed precision with equal results, and showed what fails without loss scaling and without FP32 master
weights. Here each kind of task is trained small (bench/training/tasks.py, bench/training/language.py) in seven formats with three seeds.

python -m bench.paper                                   # everything that the results do not hold yet, in two processes
python -m bench.paper --task transformer --column "fp16 unscaled" --seed 0
python -m bench.paper --size large --device cuda        # wider, larger batches, more steps: for a GPU
python -m bench.paper --report                          # the table of what is there
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import amp_kernels as ak

from . import options as common
from .harness import environment
from .harness.memory import cpu_peak, held_bytes
from .harness.rows import read
from .training import paper_table
from .training.language import LstmLanguage, TransformerLanguage, Translation
from .training.progress import Progress
from .training.tasks import SIZES, Adversarial, Classifier, ConvolutionalClassifier, Detection, Regression

IMAGES, LANGUAGE = (Classifier, ConvolutionalClassifier, Detection), (TransformerLanguage, LstmLanguage, Translation)
TASKS = {task.name: task for task in (*IMAGES, *LANGUAGE, Adversarial, Regression)}
SEEDS = (0, 1, 2)
WATCHED = 5  # steps, spread over the run, in whose first batch gradients are counted


@dataclass(frozen=True)
class Column:
    """The format of parameters, activations and gradients, and which of the paper's techniques are used with it."""

    dtype: torch.dtype
    scaled: bool = False
    master_weights: str = "fp32"


COLUMNS = {
    "fp32": Column(torch.float32),
    "fp16": Column(torch.float16, scaled=True),
    "fp16 unscaled": Column(torch.float16),
    "fp16 no master": Column(torch.float16, scaled=True, master_weights="none_rne"),
    "bf16": Column(torch.bfloat16),
    "bf16 no master": Column(torch.bfloat16, master_weights="none_rne"),
    "bf16 stochastic": Column(torch.bfloat16, master_weights="none"),
}


@dataclass(frozen=True)
class Cell:
    """Everything that decides a run: a row of the results has the same keys."""

    task: str
    column: str
    seed: int
    size: str
    steps: int
    device: str

    def key(self) -> tuple[object, ...]:
        return self.task, self.column, self.seed, self.size, self.steps, self.device.split(":")[0]


def train(cell: Cell) -> dict:
    """One run, as a row of the results."""
    task, column = TASKS[cell.task](SIZES[cell.size]), COLUMNS[cell.column]
    device = torch.device(cell.device)
    torch.manual_seed(cell.seed)
    model = ak.convert(task.model()).to(device)
    if column.dtype != torch.float32:
        ak.nn.to_half(model, column.dtype)
    optimizer = getattr(ak.optim, task.optimizer)(
        model.parameters(), lr=task.lr, master_weights=column.master_weights, seed=cell.seed, **task.options
    )
    scaler = ak.GradScaler(device.type, enabled=column.scaled)
    histogram = ak.numerics.GradientHistogram(model, scaler)
    draw = torch.Generator().manual_seed(1000 + cell.seed)
    watched = {cell.steps * (i + 1) // WATCHED - 1 for i in range(WATCHED)}
    begin, begin_cpu = time.perf_counter(), time.process_time()
    peak = 0
    for step in range(cell.steps):
        # The second step is the first that finds the optimizer's state: its memory is every later step's.
        counted = step == min(1, cell.steps - 1) and device.type == "cpu"
        held = held_bytes(list(model.parameters()), optimizer) if counted else 0
        with cpu_peak() if counted else contextlib.nullcontext([0]) as on_top:
            for batch in range(task.accumulate):
                with histogram if step in watched and batch == 0 else contextlib.nullcontext():
                    scaler.scale(task.loss(model, draw) / task.accumulate).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        peak = max(peak, held + on_top[0])
    counts = histogram.counts("activations")
    metric = task.metric(model)
    return {
        **vars(cell),
        "metric": metric if math.isfinite(metric) else None,  # JSON has no NaN
        "zero_share": counts[0].item() / max(int(counts.sum()), 1),
        "skipped": int(scaler.skipped_steps) if column.scaled else 0,
        "state_bytes": held_bytes(list(model.parameters()), optimizer),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak,
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": time.process_time() - begin_cpu,
    }


def _train_alone(cell: Cell) -> dict:
    """With one thread: models this small gain nothing from two."""
    torch.set_num_threads(1)
    if cell.device != "cpu":
        torch.cuda.reset_peak_memory_stats(cell.device)
    return train(cell)


def append(path: Path, row: dict) -> None:
    """Appends a line of JSON, behind an incomplete one that a killed run may have left."""
    torn = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
    with path.open("a") as file:
        file.write(("\n" if torn else "") + json.dumps(row) + "\n")


def of(row: dict) -> Cell:
    return Cell(**{name: row[name] for name in Cell.__dataclass_fields__})


def missing(cells: list[Cell], rows: list[dict]) -> list[Cell]:
    """The cells that have no row yet."""
    done = {of(row).key() for row in rows}
    return [cell for cell in cells if cell.key() not in done]


def run(cells: list[Cell], results: Path, processes: int) -> None:
    """Trains all of ``cells``, and writes a row as each is done."""
    progress = Progress("paper", len(cells))
    with contextlib.ExitStack() as stack:
        spawn = multiprocessing.get_context("spawn")
        pool = stack.enter_context(spawn.Pool(processes)) if processes > 1 else None
        rows = map(_train_alone, cells) if pool is None else pool.imap_unordered(_train_alone, cells)
        for done, row in enumerate(rows, 1):
            append(results, row)
            progress.update(done, cell=f"{row['task']}, {row['column']}, seed {row['seed']}: {row['metric']}")
    progress.close()


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.paper", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--task", action="append", choices=TASKS, help="only this one; may be given several times")
    parser.add_argument("--column", action="append", choices=COLUMNS, help="only this one; may be given several times")
    parser.add_argument("--seed", action="append", type=int, help="only this one; may be given several times")
    parser.add_argument("--size", choices=SIZES, default="small", help="large: for a GPU")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda or cuda:<index>")
    parser.add_argument("--steps", type=common.positive, help="instead of the task's own, for a quick look")
    parser.add_argument("--processes", type=common.positive, help="side by side (default: 2 on the CPU, 1 on a GPU)")
    parser.add_argument("--factor", type=float, default=5.0, help="standard errors that a failure exceeds (default 5)")
    parser.add_argument("--out", type=Path, help="folder of the results (default bench/results/<device>)")
    parser.add_argument("--report", action="store_true", help="train nothing")
    options = parser.parse_args(argv)
    options.device = str(common.device(parser, options.device))
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    out = options.out or environment.results_folder(torch.device(options.device))
    out.mkdir(parents=True, exist_ok=True)
    name = "paper" if options.size == "small" else f"paper-{options.size}"
    results = out / f"{name}.jsonl"
    size = SIZES[options.size]
    cells = [
        Cell(task, column, seed, options.size, options.steps or TASKS[task](size).steps, options.device)
        for seed in options.seed or SEEDS
        for task in options.task or TASKS
        for column in options.column or COLUMNS
    ]
    todo = [] if options.report else missing(cells, read(results))
    if todo:
        machine = environment.describe(torch.device(options.device))
        (out / f"{name}.json").write_text(json.dumps(machine, indent=1) + "\n")
        run(todo, results, options.processes or (2 if options.device == "cpu" else 1))
    wanted = {cell.key() for cell in cells}
    rows = [row for row in read(results) if of(row).key() in wanted]
    if not rows:
        print(f"error: no results in {results}", file=sys.stderr)
        return 1
    table = paper_table.Table(rows, {task: TASKS[task].metric_name for task in TASKS}, list(COLUMNS), options.factor)
    page = table.page(json.loads((out / f"{name}.json").read_text()))
    (out / f"{name}.md").write_text(page + "\n")
    drawn = paper_table.plot(out / f"{name}.png", table)
    print(page)
    print(f"\n{f'{name}.png, ' if drawn else ''}{name}.md, {name}.jsonl in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
