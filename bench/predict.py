"""What GPUs that are not here are predicted to take, from no run: products, optimizer steps, a training step.

python -m bench.predict                                   # the suite of products, and the optimizer steps, on an H200
python -m bench.predict --chip A100 4096x4096x4096:NT 65536x3072x768:NT:gelu
python -m bench.predict --model gpt2-124m                 # a training step, op by op
python -m bench.predict --page > docs/predictions.md

Every table says PREDICTION and its basis. Measured columns, where there are any, are of one H200 (`measured.py`).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace

from . import lists
from .gemm_shapes import CUDA, Shape
from .layouts import LAYOUTS
from .measured import H200, STEP_SHARES, STEPS
from .plan import CHIPS, Chip, describe, floor_us, plan

CUBLAS = {timed.shape: timed for timed in H200}
BASIS = "PREDICTION for {chip}, from the cost model of csrc/tuning/gemm_cost.h: nothing here was run."
STEP_BASIS = (
    "PREDICTION for {chip}: bytes over {update:.0%} (update) and {check:.0%} (check and norm) of its copy rate, "
)
STEP_BASIS += "the shares that a prototype reached on an H200, and {launch} us a launch: nothing here was run."

MODEL_BASIS = "PREDICTION of a training step on {chip}, bf16, 1,024 tokens a sequence: the ops of one, traced without values and priced by "
MODEL_BASIS += (
    "the cost model (products) and by bytes (the rest), at rates that fit torch's measured steps: nothing here was run."
)

Table = list[tuple[str, ...]]


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


def aligned() -> list[Shape]:
    """The plain products of the suite that TMA takes, and those that were timed beside them; each once."""
    plain = [replace(s, control=False) for s in CUDA if s.aligned and s.result in ("16", "fp32", "fp32+")]
    timed = [timed.shape for timed in H200 if timed.shape.aligned and timed.shape.result == "16"]
    return list(dict.fromkeys([*plain, *timed]))


def unaligned() -> list[Shape]:
    plain = [replace(s, control=False) for s in CUDA if not s.aligned and s.result in ("16", "fp32+")]
    return list(dict.fromkeys([*plain, *(timed.shape for timed in H200 if not timed.shape.aligned)]))


def products(shapes: Iterable[Shape], chip: Chip) -> Table:
    """Microseconds: predicted, the roofline's, cuBLAS's where it was measured (on an H200)."""
    table = [("product", "plan", "predicted us", "floor us", "floor / predicted", "cuBLAS, measured us")]
    for shape in shapes:
        bias = shape.result == "bias"
        shape = replace(shape, result="16") if bias else shape
        made, floor = plan(shape, chip, bias), floor_us(shape, chip)
        if made["kernel"] == "none":
            continue
        measured = CUBLAS.get(shape) if chip.name == "H200" and not bias else None
        cublas = f"{measured.cublas:,.0f}" + ", L2" * measured.in_l2 if measured else ""
        row = f"{made['microseconds']:,.1f}", f"{floor:,.1f}", f"{floor / made['microseconds']:.2f}", cublas
        table.append((shape.name + " bias" * bias, describe(made), *row))
    return table


def epilogues(chip: Chip) -> Table:
    """The plain products into 16 bits, then with a bias, then with a bias and GELU."""
    table = [("product", "plain us", "+ bias", "+ bias + GELU", "plan with GELU")]
    for shape in aligned():
        if shape.result != "16" or shape.batch > 1:
            continue
        made = [plan(shape, chip), plan(shape, chip, True), plan(replace(shape, result="gelu"), chip)]
        plain, bias, gelu = (m["microseconds"] for m in made)
        row = f"{plain:,.1f}", f"{bias / plain:.2f} x", f"{gelu / plain:.2f} x"
        table.append((shape.name, *row, describe(made[2])))
    return table


def steps(chip: Chip) -> Table:
    """Whole optimizer steps on the device: check, norm and update."""
    table = [("list", "layout", "bytes a parameter", "predicted ms", "floor ms")]
    for name in ("llama-1b", "resnet-50"):
        shapes = lists.LISTS[name]()
        count = lists.numel(shapes)
        for layout in LAYOUTS:
            check = count * layout.param.itemsize / STEP_SHARES["check"]
            moved = check + count * layout.update_bytes / STEP_SHARES["update"]
            seconds = moved / chip.copy + STEP_SHARES["launches"] * STEP_SHARES["launch_us"] / 1e6
            floor = count * layout.step_bytes / chip.copy
            row = f"{layout.step_bytes}", f"{seconds * 1e3:.3f}", f"{floor * 1e3:.3f}"
            table.append((name, layout.name, *row))
    return table


def training(name: str, chip: Chip) -> Table:
    """A training step by family of kernels, in milliseconds."""
    from .step_models import MODELS
    from .step_price import FAMILIES, steps

    config = MODELS[name]
    found = steps(config, chip)
    table = [("ms", *found)]
    for family in ("gemm", *FAMILIES, "element-wise"):
        table.append((family, *(f"{step.seconds.get(family, 0) * 1e3:.1f}" for step in found.values())))
    table.append(("host, beside it", *(f"{step.host * 1e3:.0f}" if step.host else "" for step in found.values())))
    table.append(("step", *(f"{step.total * 1e3:.1f}" for step in found.values())))
    measured = [STEPS.get((name, way)) if chip.name == "H200" else None for way in found]
    table.append(("step, measured", *(f"{m[0] * 1e3:.1f}" if m else "" for m in measured)))
    peaks = [f"{step.peak_bytes / 2**30:.1f}" if way != "torch.compile" else "" for way, step in found.items()]
    table.append(("peak GiB", *peaks))
    table.append(("peak GiB, measured", *(f"{m[1]}" if m else "" for m in measured)))
    return table


def text(table: Table) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def markdown(table: Table) -> Iterator[str]:
    head, *rows = table
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    yield from (f"| {' | '.join(row)} |" for row in rows)


def step_basis(chip: Chip) -> str:
    return STEP_BASIS.format(
        chip=chip.name, update=STEP_SHARES["update"], check=STEP_SHARES["check"], launch=STEP_SHARES["launch_us"]
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.predict", description=__doc__.split("\n")[0])
    parser.add_argument("shapes", nargs="*", type=parse, metavar="MxNxK[:layout[:result]]")
    parser.add_argument("--chip", choices=CHIPS, default="H200")
    parser.add_argument("--page", action="store_true", help="the page docs/predictions.md")
    parser.add_argument("--model", choices=["gpt2-124m", "gpt2-1.5b"], help="price a training step of it")
    options = parser.parse_args(argv)
    chip = CHIPS[options.chip]
    if options.page:
        from .predict_page import page

        sys.stdout.write(page())
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
