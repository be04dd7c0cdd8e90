"""The text of docs/predictions.md; `prediction/tables.py` makes its tables."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Iterator

from .harness.rows import OURS, TRAINING
from .harness.tables import Table
from .ops.gemm_shapes import Shape
from .prediction import grouped, invariance, layer, loss, newton_schulz, price
from .prediction.chips import CHIPS, floor_us, plan
from .prediction.measured import product_us, run
from .prediction.tables import (
    BASIS,
    MODEL_BASIS,
    aligned,
    epilogues,
    issue_slots,
    log_error,
    products,
    ratios,
    short_lists,
    short_of_the_roofline,
    speedups,
    step_basis,
    steps,
    training,
    unaligned,
)
from .training.gpt import GPT2_MODELS

LEAST = 0.95  # of cuBLAS's speed, for each GEMM
GOAL_MS, GOAL_MEMORY = 55.0, 0.55  # of the converted step of gpt2-124m, and of eager's memory

HEAD = """# Predictions

This page compares the predictions of the kernels' cost model for GEMMs, optimizer steps and training steps on an H200 with measurements.
`python -m bench.predict --page` writes it. Times are microseconds of the kernel alone unless a heading says otherwise. `make gpu` writes
the same tables for its own GPU to `predicted.txt`.

{measured}

## The model

The planner ranks tiles with this model (`csrc/gemm/cost.h`) at run time:

- A k step costs a tile the larger of two times: its multiply-adds at 2,048 per cycle, and the bytes loaded into its SM at 64 per cycle,
  the width of the port. Each consumer group that releases a stage adds 27 cycles. Rows that do not start at multiples of 128 bytes lie
  across lines of L2: all SMs together then load what they do not share at 42 bytes per cycle each, or at 30 if the rows split 32-byte
  sectors too.
- Each tile then costs 1,700 cycles to switch to the next tile, 400 until an epilogue's first operand arrives, and the epilogue's cycles:
  those of a lone warp, counted in the machine code with the stalls between dependent instructions, or more if the warps of a scheduler
  together issue above 0.9 instructions per cycle. A pingpong tile hides all this behind the other consumer's main loop,
  during which the counted cycles take 1.7 times as long.
- Tiles run in waves over the SMs, after 2,500 cycles of launch and first loads, at 1.98 GHz. Above 185 billion multiply-adds per
  millisecond the clock falls with the cube root of the excess.
- Memory traffic overlaps with this at the rate of a copy. Operands read by both halves of the chip cost 36 % more; FP32 accumulation into
  C runs at 1.35 TB/s.

It is fitted to some 60 GEMMs, each timed with every tile that supports it on one H200 (`bench/results/nvidia-h200/gemm_tiles.csv`;
`python -m bench.tiles` times them on another GPU). `tests/tuning/test_gemm_cost.py` compares those without an epilogue or with a bias: the
model is off by 9 % (RMS) over all tiles within 1.5 times the fastest and by 4 % over the plans with a bias, and the tile that it chooses is
1.1 % slower than the fastest on average. The tiles have not all been timed again since the kernel changed: the other epilogues were
rewritten, two tiles are new (192x128 that share A, 128x64 pingpong), a separate warp computes the next tile and loads the epilogue's
operands, and a step of the main loop takes 50 instructions instead of 84.

The floor is the larger of all bytes at 4.25 TB/s, the rate of a measured copy, and all flops at 815 TFLOP/s, the best rate of cuBLAS on a
cold GPU. Measured times are for the plan in the same row: from the benchmark if it used that plan, otherwise from the tile timings.
cuBLAS's times are from the benchmark.

The model does not cover:

- **The power limit** of different runs. A GEMM's tiles were timed one after another; large ones took up to 15 % less time on a cooler GPU.
- **Elementwise epilogues** for data that TMA cannot move, at 75 to 170 instructions per element: a residual with one row per matrix or one
  value per row (a single row is a bias), an FP32 residual with a 16-bit result (`ak.addmm`, `ak.baddbmm`), unaligned data; in the raw ops a
  16-bit residual or a derivative with an FP32 result, alpha with bias and pre-activation, and batched swiglu that stores it. No layer of a
  training step uses these.
- **Waiting in epilogues** after the first operand: instructions and their stalls are counted, but not barriers and loads. This is little
  for a residual or a pre-activation, and more for swiglu's backward, whose loads are not hidden and which was never timed.
- **`gemm_repack` and `gemm_sm80`**, which are not in the fitted data. "repack" first copies operands that TMA cannot read, at the rate of
  a copy and with their size in memory; the GEMM then reads the copy from memory. "in phases" copies nothing: for a long k, the rows are
  read as two to eight interleaved sets that TMA can address, and the small results are added. One took 200 us, predicted 105.
- **Host work**: in a CUDA graph, a memset node zeroes the counters of a split-k GEMM and keeps its launch from overlapping with the
  preceding kernel. Outside graphs neither happens. No time here includes it.
- **Data in L2**: operands just written by the preceding kernel are faster, up to the share of memory in the time.
- **Training steps**: each family of torch's kernels has one rate, fitted to three measured steps. This package's norms have the rates of
  the run above, at 768 columns. Its loss and embedding gradients have their target, 80 % of a copy (the loss reached 72 %). "converted" is
  `ak.convert` with `ak.linear_cross_entropy` and `ak.optim.AdamW(shadow_dtype=torch.bfloat16)`{shadows}.
  "fuse_residuals" is `ak.convert(model, fuse_residuals=True)`, priced at the rate of the norms alone. It runs the ops of an edited forward
  with `norm(branch, residual=stream)` and `ak.linear(split=)`, which was measured while it concatenated the gradients of attention.
  "compiled" is `torch.compile(ak.convert(model))` by the rule of torch.compile's column: everything between products, attention and the
  update reads and writes each value once.
- **Other GPUs**: an H100 differs only in memory bandwidth; an A100 in clock, Tensor Cores and memory, at the H200's shares of their data
  sheets.
"""

LOSS_BASIS = """PREDICTION for H200, from the cost model of csrc/gemm/cost.h for the GEMMs and by bytes at 80 % of a copy's rate for the
rest: bf16, mean reduction, default `chunk_size`. The goal, 1.02 times the three GEMMs, is **missed**. A loss that is a separate pass
cannot reach it: the last column assumes GEMMs of all rows at once, and one read and one write of the logits at the full rate of a copy.
The remaining cost is that of the chunks, each of which reads and writes the weight's fp32 gradient. A larger `chunk_size` needs fewer
chunks and more memory: by the model, half of the rows instead of a quarter saves 1 to 2 % for twice the memory, and an eighth (at least
1,024) costs 2 to 8 % more. `reduction="none"` computes the first GEMM twice."""


def measured() -> str:
    """A summary of the measurements and the model's error: the RMS relative deviation from 1 and from its mean."""
    found = ratios()
    if not found:
        return "Nothing was measured yet."
    values = found.values()
    mean, worst = statistics.geometric_mean(values), max(found, key=found.__getitem__)
    rms, about_mean = (math.sqrt(statistics.fmean((ratio / by - 1) ** 2 for ratio in values)) for by in (1, mean))
    dates = " and ".join(sorted({row["date"][:10] for row in run().values()}))
    text = (
        f"**Measured** on one H200, {dates}, with this package's kernels ([all results](gpu.md)): {len(found)} of these GEMMs. "
        f"They took {mean:.2f} times the prediction in geometric mean, from {min(values):.2f} to {found[worst]:.2f} ({worst}). The "
        f"model is off by {rms:.0%} (RMS), and by {about_mean:.0%} relative to that mean. "
    )
    (even, evens), (odd, odds) = log_error(aligned()), log_error(unaligned())
    text += (
        f"The RMS of the logarithm is {even:.3f} over {evens} aligned GEMMs and {odd:.2f} over {odds} unaligned ones, whose copy is priced "
        "by its bytes alone; only the aligned ones meet the goal of 0.10. "
    )
    text += "The tables also compare optimizer steps (device time) and the training step of GPT-2 124M."
    return textwrap.fill(text, 140)


def shadows() -> str:
    """A note if the measured training step had no shadow copies."""
    row = run().get((TRAINING, "gpt2-124m", "bf16", OURS))
    return "; the measured\n  step had no shadow copies" if row and not row.get("shadows") else ""


def beside_cublas() -> str:
    """The predicted speedups over cuBLAS of the aligned GEMMs, and those that miss their goal."""
    found, timed = speedups(CHIPS["H200"]), ratios()
    low = [
        f"{name} ({ratio:.2f}" + (f"; its tile took {timed[name]:.2f} of the prediction)" if name in timed else ")")
        for name, ratio in sorted(found.items(), key=lambda pair: pair[1])
        if ratio < LEAST
    ]
    text = (
        f"cuBLAS's time is predicted to be {statistics.geometric_mean(found.values()):.2f} times ours in geometric mean over "
        f"{len(found)} of these GEMMs: the times of one run, ours multiplied by the model's ratio of today's plan to the plan of that run. "
        f"The goals are 1.03 and at least {LEAST} each. Below that are: {', '.join(low) or 'none'}."
    )
    return textwrap.fill(text, 140)


def missed_products() -> str:
    """The GEMMs that miss their goals."""
    count, short = short_of_the_roofline(CHIPS["H200"])
    told = [
        f"{name} ({ours:.2f} predicted, {f'{timed:.2f} measured' if timed else 'not measured'}, cuBLAS {cublas:.2f})"
        for name, (ours, timed, cublas) in short.items()
    ]
    head, tall, other = (
        Shape(16384, 50257, 768, "NT"),
        Shape(64, 147, 802816, "TN", "fp32+"),
        Shape(777, 13, 500001, "NN"),
    )
    (us, floor), (head_us, _), (tall_us, tall_floor) = (
        (plan(s, CHIPS["H200"])["microseconds"], floor_us(s, CHIPS["H200"])) for s in (other, head, tall)
    )
    text = (
        f"cuBLAS reaches 0.9 of the roofline of that run for {count} aligned GEMMs. Ours misses it, predicted or measured, for: "
        f"{', '.join(told) or 'none'}. GPT-2's head, {head.name}: goal 2,100 us, {head_us:,.0f} predicted, "
        f"{product_us(head) or math.nan:,.0f} measured. A long k, {tall.name}: the goal is near its floor of {tall_floor:.0f} us, "
        f"{tall_us:.0f} predicted; {product_us(tall) or math.nan:.0f} were measured, "
        f"cuBLAS {product_us(tall, 'torch') or math.nan:.0f}. "
        f"{other.name}, not measured: {us:.0f} us predicted, floor {floor:.0f}."
    )
    return textwrap.fill(text, 140)


SKINNY = """Tiles of 64x16 and 64x32 load an n-major B in TMA boxes of 32 and 64 bytes. They take 134.8 us in place of 143.8 in 64x64 for
512x16x500000 NN, 10.8 in place of 12.9 for 4096x16x4096 NN, 11.4 in place of 12.9 for 4096x32x4096 NN and 17.0 in place of 19.2 for
768x16x32768 TN, by the model, which charges a box by its bytes. None has been timed. From 16,384 rows on they gain 2 % at most."""


def missed() -> str:
    """The converted step of gpt2-124m compared with its goal, and where its time goes."""
    found = price.steps(GPT2_MODELS["gpt2-124m"], CHIPS["H200"])
    ours, fused, torchs = found["converted"], found["fuse_residuals"], found["torch eager"]

    def less(kind: str, step: price.Step) -> str:
        return f"{1 - getattr(step, kind) / getattr(torchs, kind):.0%}"

    ms = {family: seconds * 1e3 for family, seconds in ours.seconds.items()}
    total, bound = ours.total * 1e3, ms["gemm"] + ms["attention"] + ms["optimizer"]
    verdict = "missed" if total > GOAL_MS else "met"
    text = (
        f"The goal of the converted step is {GOAL_MS:.0f} ms and {GOAL_MEMORY:.2f} of eager's memory. Time is **{verdict}**: "
        f"{total:.1f} ms are predicted. Memory is {ours.peak_bytes / torchs.peak_bytes:.2f}. GEMMs, attention and the update "
        f"take {bound:.1f} ms, which a conversion does not reduce. Our GEMMs are priced by the model at {ms['gemm']:.1f} "
        f"ms, torch's at {price.CUBLAS:.2f} of that, which fits its measured step. This leaves {GOAL_MS - bound:.1f} ms "
        f"for the rest, which takes {total - bound:.1f}: "
        f"{ms['element-wise']:.1f} for element-wise kernels, mostly torch additions to the fp32 residual stream and its gradient; "
        f"{ms['norm, loss']:.1f} for norms and loss; {ms['copy, cast']:.1f} for copies, mostly the concatenation of attention's three "
        "gradients, otherwise casts of the stream's gradient to 16 bits. With `fuse_residuals=True` the conversion lets norms make the "
        "additions in front of them, whose backward writes both gradients in their dtypes, and layers read attention's gradients in "
        f"place: {fused.total * 1e3:.1f} ms. torch.compile fuses the additions, too: {found['compiled'].total * 1e3:.1f} ms. "
        f"Bytes of casts fall by {less('cast_bytes', ours)}, with `fuse_residuals` by {less('cast_bytes', fused)}; bytes of casts and "
        f"copies by {less('copied_bytes', ours)} and {less('copied_bytes', fused)}."
    )
    return textwrap.fill(text, 140)


def markdown(table: Table) -> Iterator[str]:
    head, *rows = table
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    yield from (f"| {' | '.join(row)} |" for row in rows)


def page() -> str:
    h200 = CHIPS["H200"]
    parts = [HEAD.format(measured=measured(), shadows=shadows())]

    def add(title: str, basis: str, table: Table) -> None:
        parts.append(f"\n## {title}\n\n{basis}\n\n" + "\n".join(markdown(table)) + "\n")

    add("GEMMs, H200", BASIS.format(chip="H200"), products(aligned(), h200))
    parts.append(f"\n{beside_cublas()}\n\n{missed_products()}\n")
    parts.append("\n" + textwrap.fill(SKINNY, 140) + "\n")
    add("With an epilogue, H200", BASIS.format(chip="H200"), epilogues(h200))
    add("A linear layer with an activation, H200", layer.BASIS.format(chip="H200"), layer.table(h200))
    add("Unaligned GEMMs, H200", BASIS.format(chip="H200"), products(unaligned(), h200))
    add("Batch-invariant GEMMs, H200", invariance.BASIS.format(chip="H200"), invariance.table(h200))
    add("Grouped products, H200", grouped.BASIS.format(chip="H200"), grouped.table(h200))
    parts.append("\n" + textwrap.fill(grouped.MISSED, 140) + "\n")
    add("Optimizer steps, H200", step_basis(h200), steps(h200))
    parts.append("\n" + textwrap.fill(short_lists(), 140) + "\n")
    parts.append("\n" + textwrap.fill(issue_slots(h200), 140) + "\n")
    add("Symmetric products, H200", newton_schulz.BASIS.format(chip="H200"), newton_schulz.symmetric(h200))
    parts.append("\n" + textwrap.fill(newton_schulz.LONE, 140) + "\n")
    add("Newton-Schulz iterations, H200", newton_schulz.BASIS.format(chip="H200"), newton_schulz.iterations(h200))
    add("linear_cross_entropy and its three GEMMs, H200", LOSS_BASIS, loss.table(h200))
    for name in GPT2_MODELS:
        add(f"A training step of {name}, H200", MODEL_BASIS.format(chip="H200"), training(name, h200))
        if name == "gpt2-124m":
            parts.append(f"\n{missed()}\n")
    return "".join(parts)
