"""The text of docs/predictions.md, whose tables `predict.py` makes."""

from __future__ import annotations

from .plan import CHIPS
from .predict import BASIS, MODEL_BASIS, aligned, epilogues, markdown, products, step_basis, steps, training, unaligned

HEAD = """# Predictions

**Nothing on this page was measured with this package's kernels.** It is what their cost model says, written by
`python -m bench.predict --page`; `make gpu` measures. Times are microseconds of the kernel alone unless a head says otherwise.

The model (`csrc/tuning/gemm_cost.h`) ranks the tiles at run time. A tile takes the larger of its products (2,048 multiply-adds a cycle)
and its loads from L2 (50 bytes a cycle and multiprocessor), and 13 % of the lesser; then 1,000 cycles to turn to the next tile, and the
epilogue's instructions, counted in the machine code, at 0.35 a cycle and warp. A pingpong tile hides that under its neighbour's products.
Tiles go in rounds over the multiprocessors, behind 2,400 cycles of launch and first loads, and the whole is no faster than memory.

Its basis: 19 products timed with a prototype of the kernel on one H200 (`bench/measured.py`), which it meets with an RMS error of 6 %, the
worst by 13 %; `tests/tuning/test_gemm_cost.py` holds it to 10 and 20. The floor is the larger of all bytes at 4.25 TB/s, a measured copy,
and all flops at 815 TFLOP/s, the best that cuBLAS reached there (a product may pass it a little). cuBLAS's times are measured ones, of
the same GPU; "L2": called twice in a row, with operands that stayed there, which the prediction does not assume.

What the model cannot know:

- the power limit: 8192^3 ran at 1.58 GHz when the GPU was hot, and everything large is 15 % slower then, cuBLAS too;
- epilogues: none was timed. Their instructions are counted, how well they overlap is an estimate;
- tiles that take turns (pingpong) and `gemm_sm80`: never timed. Three consumers: timed as cuBLAS's tile, not in this kernel;
- data in L2: operands that the kernel in front has just written are faster, up to the memory's share;
- training steps: torch's families of kernels have one rate each, chosen for three measured steps; this package's norms, losses and
  embedding gradients stand there with their target of 80 % of a copy. "converted" is `ak.convert`, with `ak.linear_cross_entropy`
  and `ak.optim.AdamW`;
- other GPUs: an H100 differs in its memory's rate alone, an A100 in clock, tensor cores and memory, at the H200's shares of the data sheet.
"""


def page() -> str:
    h200 = CHIPS["H200"]
    parts = [HEAD]

    def add(title: str, basis: str, table: list) -> None:
        parts.append(f"\n## {title}\n\n{basis}\n\n" + "\n".join(markdown(table)) + "\n")

    add("Products, H200", BASIS.format(chip="H200"), products(aligned(), h200))
    add("With an epilogue, H200", BASIS.format(chip="H200"), epilogues(h200))
    add("Unaligned products, H200", BASIS.format(chip="H200"), products(unaligned(), h200))
    add("Optimizer steps, H200", step_basis(h200), steps(h200))
    for name in ("gpt2-124m", "gpt2-1.5b"):
        add(f"A training step of {name}, H200", MODEL_BASIS.format(chip="H200"), training(name, h200))
    return "".join(parts)
