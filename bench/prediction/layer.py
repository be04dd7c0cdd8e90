"""A linear layer with an activation, forward and backward: predicted, next to torch's measured time."""

from __future__ import annotations

from ..ops.gemm_shapes import Shape
from .chips import Chip, plan
from .measured import run
from .price import LAUNCH_US

SHAPE = Shape(32768, 3072, 768, "NT")  # GPT-2's first layer of an MLP
ACTIVATIONS = ("gelu", "silu")
RATE = 0.95  # of a copy's, of the kernels that only move memory: a target, which no run has timed

BASIS = f"""PREDICTION for {{chip}}, from the cost model of csrc/gemm/cost.h for the GEMMs and by bytes at {100 * RATE:.0f} % of a
copy's rate for the rest: `ak.linear(x, weight, bias, activation=...)` of {SHAPE.name} in bf16. The forward GEMM also stores
the pre-activation. Backward makes its gradient from the one that comes in and, in the same pass, sums its rows for the bias;
a small kernel adds the sums of the blocks. It multiplies the gradient by the weight and by the input. The goal is 1.15 times
torch's speed for both activations."""


def table(chip: Chip) -> list[tuple[str, ...]]:
    from amp_kernels import _host

    head = ("activation", "forward us", "activation's gradient us", "adding sums us", "two GEMMs us", "total us")
    lines = [(*head, "torch, measured us", "torch / ours")]
    m, n, k = SHAPE.m, SHAPE.n, SHAPE.k
    backward = sum(plan(s, chip)["microseconds"] for s in (Shape(m, k, n, "NN"), Shape(n, k, m, "TN")))
    gradient = 3 * 2 * m * n / (RATE * chip.copy) * 1e6
    for activation in ACTIVATIONS:
        kept = {"activation": activation, "keeps_z": True, "side_bytes": 2}
        forward = _host.plan_gemm(m, n, k, **SHAPE.request | kept, **chip.request)["microseconds"]
        parts = forward, gradient, LAUNCH_US, backward
        row = run().get(("linear", f"{m}x{n}x{k} {activation} forward + backward", "bf16", "torch"))
        torchs = row["p50_us"] if row else None
        torchs_columns = (f"{torchs:,.0f}", f"{torchs / sum(parts):.2f}") if torchs else ("", "")
        lines.append((activation, *(f"{us:,.0f}" for us in (*parts, sum(parts))), *torchs_columns))
    return lines
