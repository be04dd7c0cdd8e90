"""The text of docs/predictions.md, whose tables `prediction/tables.py` makes."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Iterator

from .harness.rows import OURS, TRAINING
from .harness.tables import Table
from .ops.gemm_shapes import Shape
from .prediction import loss, price
from .prediction.chips import CHIPS, floor_us, plan
from .prediction.measured import product_us, run
from .prediction.tables import (
    BASIS,
    MODEL_BASIS,
    aligned,
    epilogues,
    log_error,
    products,
    ratios,
    short_lists,
    short_of_the_roofline,
    step_basis,
    steps,
    training,
    unaligned,
)
from .training.gpt import GPT2_MODELS

GOAL_MS, GOAL_MEMORY = 55.0, 0.55  # of the converted step of gpt2-124m, and of eager's memory

HEAD = """# Predictions

What the kernels' cost model says of products, optimizer steps and training steps on an H200, written by `python -m bench.predict --page`
before and beside what was measured there. Times are microseconds of the kernel alone unless a head says otherwise. `make gpu`
writes the tables of products, steps and training for its own GPU, `predicted.txt`.

{measured}

The model (`csrc/gemm/cost.h`) ranks the tiles at run time. A step of k costs a tile the larger of its products (2,048
multiply-adds a cycle) and of the bytes that come into its multiprocessor (64 a cycle, the width of the port), and 27 cycles for each
group of consumers that hands a stage over. Then come 1,700 cycles to turn to the next tile, and the epilogue's instructions, counted in
the machine code, at 0.325 a cycle and warp; a pingpong tile hides both under its neighbour's products. Tiles go in rounds over the
multiprocessors, behind 2,500 cycles of launch and first loads, at 1.98 GHz or, where more than 185 billion
multiply-adds a millisecond are asked for, at a clock that falls with the cube root of the excess. Memory works beside them at a copy's
rate; operands that both halves of the chip read cost 36 % more, and fp32 is added to C at 1.35 TB/s.

Its basis: some 60 products timed with every tile that takes them on one H200 (`bench/results/nvidia-h200/gemm_tiles.csv`, taken by
`python -m bench.tiles`, which does the same on another GPU).
`tests/tuning/test_gemm_cost.py` reads those without an epilogue or with a bias: the model is off by 9 % (RMS) over all tiles within half
as much again of the fastest, by 4 % over the plans with a bias, and the tile that it picks takes 1.1 % longer than the fastest on average.
The other epilogues were written anew after that run, and have not been timed. Since then, too, another warp works out which tile comes
next and loads what the epilogue reads, and a step of the main loop takes 50 instructions where it took 84: the model prices a tile as it
was timed. The floor is the larger of all bytes at 4.25 TB/s, a measured copy, and all flops at 815 TFLOP/s, the best that cuBLAS reached
there when cold.

Measured times are those of the plan in the same row: of a benchmark where it took that plan, else of the times of every tile. cuBLAS's
are of the benchmark.

What the model cannot know:

- the power limit from one run to the next: a product's tiles were timed one after the other, and large ones took up to 15 % less where
  the GPU had cooled before;
- what TMA cannot move goes element by element, 75 to 170 instructions each: a residual with a row for each matrix or a value for each row
  (one row for all goes as a bias), or in FP32 beside a 16-bit result (`ak.addmm`, `ak.baddbmm`), what is not aligned, and of the raw ops a
  16-bit residual or a derivative beside an FP32 result, alpha with bias and pre-activation, and batches of swiglu that keep it:
  no layer of a training step asks for these;
- epilogues other than a bias: their instructions are counted; what they wait for, barriers and operands on their way, is not in the
  times: little where a tile's operand is residual or pre-activation, more in swiglu's backward, whose loads nothing hides. It was
  never timed;
- `gemm_repack` and `gemm_sm80`: not in its basis. "repack": operands that TMA cannot read are copied first, at the rate of a copy; the
  copy takes memory of their size, and the product then reads it as from memory. "in phases": nothing is copied; the lines, one for
  each of a long k, are read in two to eight interleaved sets, of which TMA can address each, and as many small results added up. No GPU
  has run that;
- what the host adds: a product in splits that is captured in a CUDA graph has its counters zeroed by a memset of the graph's, which also
  keeps its launch from overlapping with the end of the kernel in front; outside of graphs neither happens. No time here has it;
- data in L2: operands that the kernel in front has just written are faster, up to the memory's share;
- training steps: torch's families of kernels have one rate each, chosen for three measured steps. This package's norms have the rates
  that they reached in the run above, at 768 columns; its loss and embedding gradients, which it did not time, their target of 80 % of a
  copy. "converted" is `ak.convert`, with `ak.linear_cross_entropy` and `ak.optim.AdamW(shadow_dtype=torch.bfloat16)`{shadows};
  "fused norms" is the same with `norm(branch, residual=stream)`, for which no rate was measured: it has that of the norms alone;
- other GPUs: an H100 differs in its memory's rate alone, an A100 in clock, tensor cores and memory, at the H200's shares of the data sheet.
"""

LOSS_BASIS = """PREDICTION for H200, from the cost model of csrc/gemm/cost.h and, beside the products, by bytes at 80 % of a copy's
rate: bf16, the reduction a mean, `chunk_size` by default. The goal, 1.02 of the three products, is **missed**, and is out of reach of
a loss that is a pass of its own: at a copy's whole rate, with products of all rows at once, one read and one write of the logits alone
make the last column. Chunks cost the rest: each reads and writes the weight's fp32 gradient, which a larger `chunk_size` makes rarer for
more memory: by the model half of the rows in place of a fourth saves 1 to 2 % for twice the memory, an eighth, at least 1,024, costs 2
to 8 % more. `reduction="none"` takes the first product once more."""


def measured() -> str:
    """What was measured, when, and how far off the model is: RMS of the relative deviation, as it is and about its mean."""
    found = ratios()
    if not found:
        return "Nothing was measured yet."
    values = found.values()
    mean, worst = statistics.geometric_mean(values), max(found, key=found.__getitem__)
    rms, about_mean = (math.sqrt(statistics.fmean((ratio / by - 1) ** 2 for ratio in values)) for by in (1, mean))
    dates = " and ".join(sorted({row["date"][:10] for row in run().values()}))
    text = (
        f"**Measured** on one H200, {dates}, with this package's kernels ([all figures](gpu.md)): {len(found)} of these products. "
        f"They took {mean:.2f} times the prediction in geometric mean, from {min(values):.2f} to {found[worst]:.2f} ({worst}). The "
        f"model is off by {rms:.0%} (RMS), and by {about_mean:.0%} about that mean. "
    )
    (even, evens), (odd, odds) = log_error(aligned()), log_error(unaligned())
    text += (
        f"Of the logarithm the RMS is {even:.3f} over {evens} aligned products, and {odd:.2f} over {odds} unaligned ones, whose copy the "
        "model has from its bytes alone: the goal of 0.10 over all is reached by the aligned ones. "
    )
    text += "The optimizer's steps, on the device, and the training step of GPT-2 124M stand beside their predictions."
    return textwrap.fill(text, 140)


def shadows() -> str:
    """What sets the measured training step apart from the predicted one: its file says whether it had shadows."""
    row = run().get((TRAINING, "gpt2-124m", "bf16", OURS))
    return "; the measured\n  step beside it had no shadows" if row and not row.get("shadows") else ""


def missed_products() -> str:
    """Single products that do not reach their goal."""
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
        f"Of {count} aligned products that cuBLAS brings to 0.9 of the roofline of that run, those that we do not, by the prediction or by "
        f"what was measured: {', '.join(told) or 'none'}. GPT-2's head, {head.name}: goal 2,100 us, {head_us:,.0f} predicted, "
        f"{product_us(head) or math.nan:,.0f} measured. A tall k, {tall.name}: the goal is near its floor of {tall_floor:.0f} us, "
        f"{tall_us:.0f} predicted; with a copy of its operand in front {product_us(tall) or math.nan:.0f} were measured, "
        f"cuBLAS {product_us(tall, 'torch') or math.nan:.0f}. "
        f"{other.name}, which no run has: {us:.0f} us predicted, floor {floor:.0f}."
    )
    return textwrap.fill(text, 140)


def missed() -> str:
    """Where the converted step of gpt2-124m stands to its goal, and why."""
    found = price.steps(GPT2_MODELS["gpt2-124m"], CHIPS["H200"])
    ours, fused, torchs = found["converted"], found["fused norms"], found["torch eager"]

    def less(kind: str, step: price.Step) -> str:
        return f"{1 - getattr(step, kind) / getattr(torchs, kind):.0%}"

    ms = {family: seconds * 1e3 for family, seconds in ours.seconds.items()}
    total, bound = ours.total * 1e3, ms["gemm"] + ms["attention"] + ms["optimizer"]
    verdict = "missed" if total > GOAL_MS else "met"
    text = (
        f"The goal of the converted step is {GOAL_MS:.0f} ms and {GOAL_MEMORY:.2f} of eager's memory. Time is **{verdict}**, "
        f"{total:.1f} ms are predicted; memory is {ours.peak_bytes / torchs.peak_bytes:.2f}. Products, attention and the update, "
        f"which a conversion does not shorten, take {bound:.1f} ms: our products stand with the model's time, {ms['gemm']:.1f} "
        f"ms, torch's with {price.CUBLAS:.2f} of it, which fits its measured step. {GOAL_MS - bound:.1f} ms "
        f"were left for the rest, which takes {total - bound:.1f}: "
        f"{ms['element-wise']:.1f} of element-wise kernels, most of it the additions to the fp32 residual stream and its gradient, which "
        f"the model writes as operations of torch's; {ms['norm, loss']:.1f} of norms and loss; {ms['copy, cast']:.1f} of copies, most of "
        "them of attention's three gradients, put side by side, the rest casts of the stream's gradient to 16 bits. A conversion does not "
        "rewrite a model's forward; the last column is the same model when its forward does: `norm(branch, residual=stream)` adds what "
        "comes before a norm in the norm's kernel, whose backward gives both gradients, each in its dtype, and `split` in place of a view "
        f"leaves one copy of attention's gradients. That is {fused.total * 1e3:.1f} ms. Bytes of casts fall by {less('cast_bytes', ours)}, "
        f"with the norms by {less('cast_bytes', fused)}; of casts and copies together by {less('copied_bytes', ours)} and "
        f"{less('copied_bytes', fused)}."
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

    add("Products, H200", BASIS.format(chip="H200"), products(aligned(), h200))
    parts.append(f"\n{missed_products()}\n")
    add("With an epilogue, H200", BASIS.format(chip="H200"), epilogues(h200))
    add("Unaligned products, H200", BASIS.format(chip="H200"), products(unaligned(), h200))
    add("Optimizer steps, H200", step_basis(h200), steps(h200))
    parts.append("\n" + textwrap.fill(short_lists(), 140) + "\n")
    add("linear_cross_entropy beside its three products, H200", LOSS_BASIS, loss.table(h200))
    for name in GPT2_MODELS:
        add(f"A training step of {name}, H200", MODEL_BASIS.format(chip="H200"), training(name, h200))
        if name == "gpt2-124m":
            parts.append(f"\n{missed()}\n")
    return "".join(parts)
