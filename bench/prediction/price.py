"""Predicts the time of a traced training step, by family of kernels.

The rates of torch's own kernels are chosen to fit steps measured on one H200 (`measured.STEPS`). This package's norms
have the rate that was measured there, the other kernels their target. Products are priced by the planner's model, cuBLAS's at a share
of it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..training.gpt import GPT2Config
from .chips import Chip
from .measured import STEP_SHARES, norm_shares
from .step import parameters, step
from .trace import Op, Trace, trace

GEMMS = {"mm", "addmm", "bmm", "ak::gemm", "ak::gemm_dact", "ak::gemm_accumulate_", "ak::segmented_gemm"}
COPIES = {"_to_copy", "copy_", "clone", "stack", "cat"}
FAMILIES = {
    "attention": {"bench::attention", "bench::attention_backward"},
    "copy, cast": COPIES | {"zeros", "zero_", "fill_", "nll_loss_backward"},
    "norm, loss": {
        "native_layer_norm",
        "native_layer_norm_backward",
        "_log_softmax",
        "_log_softmax_backward_data",
        "nll_loss_forward",
        "ak::norm_forward",
        "ak::norm_backward",
        "ak::cross_entropy_rows_",
    },
    "optimizer": {"_fused_adamw_", "_foreach_norm", "_foreach_mul_"},
}
# Shares of the copy rate. The first four fit the measured steps; ours is the target of the kernels that were not timed.
SHARES = {"copy, cast": 0.52, "norm, loss": 0.62, "element-wise": 0.50, "optimizer": 0.80, "ours": 0.80}
ATTENTION_FLOPS_PER_S = 240e12  # heads of 64, forward and backward, counted without the masked half
CUBLAS = 0.91  # of the model's time for the same product: 32.7 ms of the measured step of gpt2-124m
LAUNCH_US = 3.0  # least time of a kernel
HOST_US = 35.0  # of an op in eager mode, at most: gpt2-124m with 4 sequences took 25 ms, the host's part included


@dataclass(frozen=True)
class Step:
    """Device seconds by family, the host's seconds, and the most memory that tensors take."""

    seconds: dict[str, float]
    host: float
    peak_bytes: float
    cast_bytes: float  # read and written by copies into another dtype
    copied_bytes: float  # by all copies

    @property
    def total(self) -> float:
        return max(sum(self.seconds.values()), self.host)


def family(name: str) -> str:
    if name in GEMMS:
        return "gemm"
    return next((family for family, names in FAMILIES.items() if name in names), "element-wise")


def moved_bytes(op: Op) -> int:
    """Bytes that the kernels of an op read and write: not all of its arguments."""
    if op.name in ("nll_loss_forward", "ak::nll_loss"):  # a number of each row
        return 8 * op.shapes[1][0]
    if op.name == "nll_loss_backward":  # fills its result, and sets a number of each row
        return op.writes[0][1]
    if op.name == "_fused_adamw_":  # gradients are arguments that it may write, and does not
        return op.bytes * 28 // 32
    if op.name == "ak::unscale_":  # of the loss's gradients, by 1
        return 0
    if op.name == "embedding":
        return 2 * op.writes[0][1]
    return op.bytes


def cast_bytes(op: Op) -> int:
    """Bytes that a copy into another dtype reads and writes."""
    return op.bytes if len(set(op.dtypes)) > 1 else 0


def copied_bytes(ops: list[Op], of: Callable[[Op], int] = moved_bytes) -> int:
    return sum(of(op) for op in ops if op.name in COPIES)


def concatenated(op: Op) -> Op:
    """The product of the concatenation, which takes the same time."""
    *parts, b = op.shapes
    dim, size = op.options["dim"], sum(part[op.options["dim"]] for part in op.shapes[:-1])
    lines = parts[0][1 - dim]
    shape, strides = ((lines, size), (size, 1)) if dim else ((size, lines), (1, size))
    dtypes = op.dtypes[len(parts) - 1 :]
    return replace(op, name="ak::gemm", shapes=[shape, b], strides=[strides, op.strides[-1]], dtypes=dtypes)


def gemm_us(op: Op, chip: Chip) -> float:
    from amp_kernels import _host

    if op.name == "ak::segmented_gemm":
        op = concatenated(op)
    at = {"addmm": 1, "ak::gemm_accumulate_": 1}.get(op.name, 0)
    (*batch, m, k), (*_, n) = op.shapes[at], op.shapes[at + 1]
    activation = op.options.get("activation", "none")
    out = op.results[0] if op.results else op.shapes[0]
    others = [shape for shape in (*op.shapes[at + 2 :], *op.results[1:]) if len(shape) == len(out) and shape[-1] > 1]
    out_bytes = 8 if op.name == "ak::gemm_accumulate_" else op.dtypes[len(op.shapes)].itemsize
    request = {
        "batch": batch[0] if batch else 1,
        "m_major_a": op.strides[at][-1] != 1,
        "n_major_b": op.strides[at + 1][-1] == 1,
        "out_bytes": out_bytes,
        "side_bytes": 2 * len([shape for shape in others if shape[-2:] == out[-2:]]),
        "activation": activation,
        "backward": op.name == "ak::gemm_dact",
        "column_sums": bool(op.options.get("bias_grad")),
        "plain": op.name in ("mm", "bmm") or not any(len(shape) == 1 for shape in op.shapes[at + 2 :]),
    }
    return _host.plan_gemm(m, n, k, **request, **chip.request)["microseconds"]


def attention_flops(op: Op) -> float:
    batch, heads, context, size = op.shapes[0]
    return 4 * batch * heads * context**2 * size / 2 * (2.5 if op.name.endswith("backward") else 1)


def seconds(op: Op, chip: Chip) -> float:
    kind = family(op.name)
    if kind == "gemm":
        return (1 if op.name.startswith("ak::") else CUBLAS) * gemm_us(op, chip) / 1e6
    if kind == "attention":
        return attention_flops(op) / (ATTENTION_FLOPS_PER_S * chip.flops / 815e12)
    share = norm_shares().get(op.name) or SHARES["ours" if op.name.startswith("ak::") else kind]
    return max(LAUNCH_US / 1e6, moved_bytes(op) / (share * chip.copy))


def price(ops: list[Op], chip: Chip) -> Counter:
    total: Counter = Counter()
    for op in ops:
        total[family(op.name)] += seconds(op, chip)
    return total


def update_seconds(count: int, chip: Chip) -> float:
    """Our check, norm and update of fp32 parameters with 16-bit shadows."""
    return count * (4 / STEP_SHARES["check"] + 30 / STEP_SHARES["update"]) / chip.copy


def fused(ops: list[Op]) -> list[Op]:
    """The ops of a compiler that fuses everything between products, attention and updates: such a group reads only
    values from outside and writes only values that are used outside."""
    groups: list[list[int]] = [[]]
    for i, op in enumerate(ops):
        if family(op.name) in ("gemm", "attention", "optimizer") or op.name == "embedding_dense_backward":
            groups += [[i], []]
        else:
            groups[-1].append(i)
    group_of = {i: g for g, members in enumerate(groups) for i in members}
    last_use: dict[int, int] = {}
    for i, op in enumerate(ops):
        for storage, _ in op.reads:
            last_use[storage] = group_of[i]
    kept = []
    for g, members in enumerate(groups):
        if len(members) == 1 and family(ops[members[0]].name) != "element-wise":
            kept.append(ops[members[0]])
            continue
        made: dict[int, int] = {}
        read: dict[int, int] = {}
        for i in members:
            for storage, size in ops[i].reads:
                if storage not in made:
                    read[storage] = max(read.get(storage, 0), min(size, moved_bytes(ops[i])))
            made |= dict(ops[i].writes)
        written = {s: size for s, size in made.items() if last_use.get(s, -1) > g}
        if members:
            kept.append(Op("fused", [], [], list(read.items()), list(written.items()), [], [], {}))
    return kept


@functools.cache
def traces(config: GPT2Config, converted: bool, **options: bool) -> list[Trace]:
    """Steps of the model with one layer and with two: layers are alike."""
    return [trace(step(config, layers, converted, **options)) for layers in (1, 2)]


def whole(of: Callable[[Trace], Counter], config: GPT2Config, traced: list[Trace]) -> Counter:
    """The total of all layers."""
    one, two = map(of, traced)
    return Counter({key: one[key] + (config.layers - 1) * (two[key] - one[key]) for key in two})


def facts(traced: Trace) -> Counter:
    casts, copies = copied_bytes(traced.ops, cast_bytes), copied_bytes(traced.ops)
    return Counter(peak=traced.peak, first_peak=traced.first_peak, ops=len(traced.ops), casts=casts, copies=copies)


def steps(config: GPT2Config, chip: Chip) -> dict[str, Step]:
    """A training step by torch, by torch.compile, converted, converted with ``fuse_residuals``, and converted and compiled."""

    def made(traced: list[Trace], ops_of: Callable[[list[Op]], list[Op]], host_us: float) -> Step:
        found = whole(facts, config, traced)
        seconds = whole(lambda t: price(ops_of(t.ops), chip), config, traced)
        # The moments of our optimizer are not in the trace, and are there from the second step on.
        peak = found["peak"] if traced is torchs else found["first_peak"] + 8 * parameters(config)
        return Step(dict(seconds), found["ops"] * host_us / 1e6, peak, found["casts"], found["copies"])

    torchs = traces(config, False)
    found = {"torch eager": made(torchs, list, HOST_US), "torch.compile": made(torchs, fused, 0.0)}
    ours = {
        "converted": made(traces(config, True), list, HOST_US),
        "fuse_residuals": made(traces(config, True, fused=True), list, HOST_US),
        "compiled": made(traces(config, True, shadowed=False), fused, 0.0),  # a compiled forward casts the weights
    }
    for each in ours.values():
        each.seconds["optimizer"] = update_seconds(parameters(config), chip)
    return found | ours
