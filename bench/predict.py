"""Predicts the times of a GPU that is not here: products, optimizer steps, a training step.

python -m bench.predict                                   # the suite of products, and the optimizer steps, on an H200
python -m bench.predict --chip A100 4096x4096x4096:NT 65536x3072x768:NT:gelu
python -m bench.predict --model gpt2-124m                 # a training step, op by op
python -m bench.predict --run bench/results/nvidia-h100   # products, steps and training for the GPU of that run, next to what it measured
python -m bench.predict --page > docs/predictions.md

Every table says PREDICTION and its basis. Measured columns, where there are any, are of one H200: the rows in
`bench/results/nvidia-h200`, or of the run that is named.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from . import predict_page
from .harness.tables import Table
from .ops.gemm_shapes import Shape
from .prediction import measured
from .prediction.chips import CHIPS
from .prediction.tables import (
    BASIS,
    MODEL_BASIS,
    aligned,
    chip_of,
    epilogues,
    products,
    step_basis,
    steps,
    training,
    unaligned,
)
from .training.gpt import GPT2_MODELS


def parse(text: str) -> Shape:
    """A shape from "MxNxK", "MxNxK:NT" or "MxNxK:TN:fp32+"."""
    match = re.fullmatch(
        r"(\d+)x(\d+)x(\d+)(?::([NT][NT]))?(?::(16|fp32\+?|bias|relu|gelu|gelu_tanh|silu|swiglu))?", text
    )
    if not match:
        raise argparse.ArgumentTypeError(
            f"a shape is '{text}'; accepted: MxNxK, then :NT or another layout, then :fp32, :fp32+, :bias or an activation"
        )
    m, n, k = map(int, match.groups()[:3])
    return Shape(m, n, k, match[4] or "NT", match[5] or "16")


def text(table: Table) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def beside_run(folder: Path) -> int:
    """Prints every table for the GPU of a run, next to what was measured there."""
    measured.use(folder)
    chip = chip_of(measured.gpu())
    if chip is None:
        print(f"no predictions: {folder} is of '{measured.gpu()}'; the model knows {', '.join(CHIPS)}")
        return 0
    print(f"Measured: {folder}, {measured.gpu()}.")
    basis = BASIS.format(chip=chip.name)
    for told, table in (
        (basis, products([*aligned(), *unaligned()], chip)),
        (basis, epilogues(chip)),
        (step_basis(chip), steps(chip)),
        *((f"{name}. {MODEL_BASIS.format(chip=chip.name)}", training(name, chip)) for name in GPT2_MODELS),
    ):
        print("", told, *text(table), sep="\n")
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.predict", description=__doc__.split("\n")[0])
    parser.add_argument("shapes", nargs="*", type=parse, metavar="MxNxK[:layout[:result]]")
    parser.add_argument("--chip", choices=CHIPS, default="H200")
    parser.add_argument(
        "--run", type=Path, help="results of `make gpu`: all tables for its GPU, next to what it measured"
    )
    parser.add_argument("--page", action="store_true", help="the page docs/predictions.md")
    parser.add_argument("--model", choices=list(GPT2_MODELS), help="price a training step of it")
    options = parser.parse_args(argv)
    chip = CHIPS[options.chip]
    if options.run:
        return beside_run(options.run)
    if options.page:
        sys.stdout.write(predict_page.page())
        return 0
    if options.model:
        print(MODEL_BASIS.format(chip=chip.name), *text(training(options.model, chip)), sep="\n")
        return 0
    table = products(options.shapes or [*aligned(), *unaligned()], chip)
    print(BASIS.format(chip=chip.name), *text(table), sep="\n")
    if not options.shapes:
        print("", BASIS.format(chip=chip.name), *text(epilogues(chip)), sep="\n")
        print("", step_basis(chip), *text(steps(chip)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
