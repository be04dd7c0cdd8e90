"""The tables of predictions: products, optimizer steps and training steps, next to what was measured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ..harness.rows import OURS, TRAINING
from ..harness.tables import Table
from ..ops import lists
from ..ops.gemm_shapes import CUDA, Shape, describe
from ..ops.layouts import LAYOUTS
from ..training.gpt import GPT2_MODELS
from . import measured, price
from .chips import CHIPS, Chip, choice, floor_us, plan
from .measured import LAUNCH_US, STEP_SHARES, STEPS, product, product_us, run, step_us, tiles
from .tile_times import TIMED, Product

CLOCK_MHZ = 1980  # csrc/gemm/cost.h
#: Instructions an element of AdamW's kernel for 8-bit moments, by layout: tests/build/test_update_instructions.py.
INSTRUCTIONS_8BIT = {"bf16 + split24, 8-bit moments": 79, "fp32, 8-bit moments": 70}

PLAIN = ("16", "fp32", "fp32+")  # results without an epilogue
BASIS = "PREDICTION for {chip}, from the cost model of csrc/gemm/cost.h."
STEP_BASIS = "PREDICTION for {chip}: bytes divided by {update:.0%} (update) and {check:.0%} (check and norm) of its copy rate, the "
STEP_BASIS += "shares of a prototype on an H200, plus {launches:.1f} us for four launches with arguments of their size."

# Bytes of arguments of a step's launches, for a list of up to 187 tensors. Short lists have a launch of few bytes where that is enough
# for the lists that models have.
STEP_ARGUMENTS = {"check_and_norm": 4_024, "update_scale": 2_160, "update_prepare": 32_368, "adamw_": 32_360}
FEW_ARGUMENT_BYTES = 4_096
UPDATE_TENSORS = {"update_prepare": 320, "adamw_": 528}  # tensors in those arguments

MODEL_BASIS = "PREDICTION of a training step on {chip}, bf16, 1,024 tokens per sequence. Its ops are traced without values; GEMMs are "
MODEL_BASIS += "priced by the cost model, the others by bytes, at rates fitted to torch's measured steps."


def chip_of(device: str) -> Chip | None:
    """The chip with a device name of CUDA's: "NVIDIA H100 80GB HBM3"."""
    return next((chip for name, chip in CHIPS.items() if name in device.replace("-", " ").split()), None)


def measured_on(chip: Chip) -> bool:
    return chip_of(measured.gpu()) == chip


def aligned() -> list[Shape]:
    """The plain products of the suite that TMA takes, each once."""
    return [s for s in plain() if s.aligned]


def unaligned() -> list[Shape]:
    return [s for s in plain() if not s.aligned]


def plain() -> list[Shape]:
    """The products without an epilogue."""
    return list(dict.fromkeys(replace(s, control=False) for s in CUDA if s.result in PLAIN))


def products(shapes: Iterable[Shape], chip: Chip) -> Table:
    """Microseconds: predicted, the roofline's, ours and cuBLAS's where they were measured (on such a chip)."""
    head = ("GEMM", "plan", "predicted us", "measured us", "measured / predicted", "floor us", "cuBLAS, measured us")
    table = [head]
    for shape in shapes:
        bias = shape.result == "bias"
        shape = replace(shape, result="16") if bias else shape
        made, floor = plan(shape, chip, bias), floor_us(shape, chip)
        if made["kernel"] == "none":
            continue
        timed = measured_on(chip) and not bias
        ours, cublas = (planned_us(shape, made), product_us(shape, "torch")) if timed else (None, None)
        row = *compared(made["microseconds"], ours), f"{floor:,.1f}", f"{cublas:,.1f}" if cublas else ""
        table.append((shape.name + " bias" * bias, describe(made), *row))
    return table


def compared(predicted: float, measured: float | None, digits: int = 1) -> tuple[str, str, str]:
    """A prediction, its measurement and their ratio; empty where nothing was measured."""
    if measured is None:
        return f"{predicted:,.{digits}f}", "", ""
    return f"{predicted:,.{digits}f}", f"{measured:,.{digits}f}", f"{measured / predicted:.2f}"


def planned_us(shape: Shape, made: dict[str, Any]) -> float | None:
    """Microseconds measured on an H200 with that plan, in the benchmark or in the sweep over tiles. None if the code has changed since."""
    if shape.result not in (*PLAIN, *TIMED):
        return None
    row = product(shape)
    if row and row["plan"] == describe(made):
        return row["p50_us"]
    if made["kernel"] != "sm90" or made["repacked"] or made["in_phases"]:
        return None
    alone = Product(shape) if shape.result in PLAIN else Product(replace(shape, result="16"), shape.result)
    return tiles().get(alone, {}).get(choice(made))


def ratios() -> dict[str, float]:
    """Measured over predicted, by name, of each product of the suite without an epilogue."""
    plans = {shape: plan(shape, CHIPS["H200"]) for shape in plain()}
    timed = {shape: planned_us(shape, made) for shape, made in plans.items()}
    return {s.name: us / plans[s]["microseconds"] for s, us in timed.items() if us is not None}


def log_error(shapes: Iterable[Shape]) -> tuple[float, int]:
    """RMS of the logarithm of measured over predicted, over those of the shapes that were measured, and how many these are."""
    found = ratios()
    logs = [math.log(found[shape.name]) for shape in shapes if shape.name in found]
    return math.sqrt(sum(x * x for x in logs) / max(1, len(logs))), len(logs)


def short_of_the_roofline(chip: Chip, least: float = 0.9) -> tuple[int, dict[str, tuple[float, float | None, float]]]:
    """The number of aligned products that cuBLAS brought to this share of the run's own roofline, and those that we do not: our share as
    predicted, as measured, and cuBLAS's."""
    count, short = 0, {}
    for shape in aligned():
        row = product(shape, "torch")
        if row is None or row["floor_us"] / row["p50_us"] < least:
            continue
        count += 1
        made, floor = plan(shape, chip), row["floor_us"]
        ours = planned_us(shape, made)
        shares = floor / made["microseconds"], None if ours is None else floor / ours
        if min(share for share in shares if share is not None) < least:
            short[shape.name] = *shares, floor / row["p50_us"]
    return count, short


def speedups(chip: Chip) -> dict[str, float]:
    """cuBLAS's time over ours, by name, of each aligned product that one run timed with both: 20th percentiles, since the power limit makes
    some launches of a large product up to a third slower. Where the planner has another plan now, our time is multiplied by the model's
    ratio of the two plans. A product whose plan has a tile that no longer exists is left out."""
    found = {}
    for shape in aligned():
        ours, cublas = product(shape), product(shape, "torch")
        if ours is None or cublas is None or ours["commit"] != cublas["commit"]:
            continue
        made = plan(shape, chip)
        before = made["microseconds"] if ours["plan"] == describe(made) else model_us(shape, chip, ours["plan"])
        if before is not None:
            found[shape.name] = cublas["p20_us"] / (ours["p20_us"] * made["microseconds"] / before)
    return found


def model_us(shape: Shape, chip: Chip, described: str) -> float | None:
    """The model's microseconds of a plan of gemm_sm90, given as `describe` writes it. None if its tile is not compiled."""
    from amp_kernels import _host

    plain = {"kernel": "sm90", "repacked": False, "in_phases": False}
    for number, tile in enumerate(_host.gemm_candidates()["sm90"]):
        for splits, swapped in itertools.product(range(1, 17), (False, True)):
            if describe(plain | {"tile": number, "splits": splits, "swapped": swapped}) == described:
                request = shape.request | chip.request
                return _host.gemm_sm90_microseconds(tile, splits, swapped, shape.m, shape.n, shape.k, **request)
    return None


def epilogues(chip: Chip) -> Table:
    """The plain products into 16 bits, then with a bias, then with a bias and GELU."""
    table = [("GEMM", "plain us", "+ bias", "+ bias + GELU", "measured", "plan with GELU")]
    for shape in aligned():
        if shape.result != "16" or shape.batch > 1:
            continue
        made = [plan(shape, chip), plan(shape, chip, True), plan(replace(shape, result="gelu"), chip)]
        plain, bias, gelu = (m["microseconds"] for m in made)
        timed = [planned_us(shape, made[0]), planned_us(replace(shape, result="gelu"), made[2])]
        taken = f"{timed[1] / timed[0]:.2f} x" if all(timed) and measured_on(chip) else ""
        row = f"{plain:,.1f}", f"{bias / plain:.2f} x", f"{gelu / plain:.2f} x", taken
        table.append((shape.name, *row, describe(made[2])))
    return table


def launches_us() -> float:
    """Time of a step's launches, on the line through the two that were measured."""
    (few, least), (many, most) = LAUNCH_US.items()
    return sum(least + (most - least) * (size - few) / (many - few) for size in STEP_ARGUMENTS.values())


def steps(chip: Chip) -> Table:
    """Whole optimizer steps on the device: check, norm and update."""
    head = ("list", "layout", "bytes per parameter", "predicted ms", "measured ms", "measured / predicted", "floor ms")
    table = [head]
    for name in ("llama-1b", "resnet-50"):
        shapes = lists.LISTS[name]()
        count = lists.numel(shapes)
        for layout in LAYOUTS:
            check = count * layout.param.itemsize / STEP_SHARES["check"]
            moved = check + count * layout.update_bytes / STEP_SHARES["update"]
            seconds = moved / chip.copy + launches_us() / 1e6
            floor = count * layout.step_bytes / chip.copy
            micros = step_us(name, layout.name) if measured_on(chip) else None
            times = compared(seconds * 1e3, None if micros is None else micros / 1e3, 3)
            table.append((name, layout.name, f"{layout.step_bytes:g}", *times, f"{floor * 1e3:.3f}"))
    return table


def training(name: str, chip: Chip) -> Table:
    """A training step by family of kernels, in milliseconds."""
    found = price.steps(GPT2_MODELS[name], chip)
    table = [("ms", *found)]
    for family in ("gemm", *price.FAMILIES, "element-wise"):
        table.append((family, *(f"{step.seconds.get(family, 0) * 1e3:.1f}" for step in found.values())))
    table.append(("host, in parallel", *(f"{step.host * 1e3:.0f}" if step.host else "" for step in found.values())))
    table.append(("step", *(f"{step.total * 1e3:.1f}" for step in found.values())))
    timed = [trained(name, way) if measured_on(chip) else None for way in found]
    table.append(("step, measured", *(f"{m[0] * 1e3:.1f}" if m else "" for m in timed)))
    peaks = [f"{step.peak_bytes / 2**30:.1f}" if step.host else "" for step in found.values()]
    table.append(("peak GiB", *peaks))
    table.append(("peak GiB, measured", *(f"{m[1]:.1f}" if m else "" for m in timed)))
    for label, each in (("casts, GB", "cast_bytes"), ("casts and copies, GB", "copied_bytes")):
        moved = [f"{getattr(step, each) / 1e9:.1f}" if step.host else "" for step in found.values()]
        table.append((label, *moved))
    return table


def trained(name: str, way: str) -> tuple[float, float] | None:
    """Seconds and peak GiB of a training step: of the latest run, else of the one that the rates fit."""
    # An edited forward ran the ops of fuse_residuals.
    ours = {"converted": OURS, "compiled": f"{OURS} compile", "fuse_residuals": f"{OURS} fused norms"}
    provider = {"torch eager": "torch", **ours}.get(way, way)
    row = run().get((TRAINING, name, "bf16", f"{OURS} {way}")) or run().get((TRAINING, name, "bf16", provider))
    return (row["ms"] / 1e3, row["peak_gib"]) if row else STEPS.get((name, way)) if measured_on(CHIPS["H200"]) else None


def step_basis(chip: Chip) -> str:
    return STEP_BASIS.format(
        chip=chip.name, update=STEP_SHARES["update"], check=STEP_SHARES["check"], launches=launches_us()
    )


def issue_slots(chip: Chip) -> str:
    """The update of 8-bit moments by instructions, which its bytes do not show."""
    count = lists.numel(lists.LISTS["llama-1b"]())
    slots = 4 * 32 * chip.request["sm_count"] * CLOCK_MHZ * 1e6  # instructions of threads a second

    def of(layout: str) -> tuple[float, float]:
        moved = next(each for each in LAYOUTS if each.name == layout).update_bytes
        return count * INSTRUCTIONS_8BIT[layout] / slots * 1e3, count * moved / STEP_SHARES["update"] / chip.copy * 1e3

    (narrow, narrow_bytes), (wide, wide_bytes) = map(of, INSTRUCTIONS_8BIT)
    few, many = INSTRUCTIONS_8BIT.values()
    return (
        f"AdamW's kernel for moments in 8 bits executes {few} instructions an element with split24 masters and {many} with FP32 weights "
        f"(`tests/build/test_update_instructions.py`). With every issue slot in use at {CLOCK_MHZ} MHz, llama-1b's update takes "
        f"{narrow:.1f} and {wide:.1f} ms, with four fifths {narrow / 0.8:.1f} and {wide / 0.8:.1f}; its bytes take {narrow_bytes:.1f} and "
        f"{wide_bytes:.1f}. That is the plain form, for steps without options whose new moments are normal numbers; a weight average, "
        "AMSGrad, coupled decay or a cautious update takes the general one, which has 97 to 122."
    )


def short_lists() -> str:
    """Why the update has no launch of few bytes, which the check of gradients has."""
    each = {name: STEP_ARGUMENTS[name] / count for name, count in UPDATE_TENSORS.items()}
    fit = {name: int((FEW_ARGUMENT_BYTES - 128) / size) for name, size in each.items()}
    count = len(lists.LISTS["resnet-50"]())
    least, most = LAUNCH_US.values()
    return (
        f"The check has a small launch with 4 KB of arguments for lists of up to 187 tensors. The update has none: AdamW takes "
        f"{each['adamw_']:.0f} bytes per tensor and the kernel before it, which derives its scalars, {each['update_prepare']:.0f}, so only "
        f"{fit['adamw_']} and {fit['update_prepare']} tensors would fit; ResNet-50 has {count}. A small launch would save at most "
        f"{most - least:.1f} us per launch and need a second copy of every rule's kernels."
    )
