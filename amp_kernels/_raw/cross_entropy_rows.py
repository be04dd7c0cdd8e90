"""The cross-entropy of rows of logits and its gradient, in fp32 from logits that are read once. Raw: the op that
``cross_entropy`` and ``linear_cross_entropy`` are made of.

``loss[i] = sum_j c_j (lse - x_j) + z_loss u lse^2``, where for a target class ``t`` ``c_j = (1 - s) w_t [j = t] + s w_j / V``
and ``u = w_t``, for probabilities ``y`` ``c_j = w_j ((1 - s) y_j + s / V)`` and ``u = 1``: csrc/loss/formula.h.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._checks.lists import KERNEL_DTYPES, within_float32
from .._dispatch.library import Sample, define
from .._dispatch.samples import Normal
from ._norm import check_like


def check(call) -> None:
    op, logits, soft = "cross_entropy_rows_", call.logits, call.target.is_floating_point()
    rows, classes = logits.shape
    for name in ("logits", "grad", *["target"] * soft):
        tensor = getattr(call, name)
        check_like(op, name, tensor, logits.shape)
        if tensor is not None and classes > 1 and tensor.numel() and tensor.stride(1) != 1:
            raise ValueError(f"{op}: {name} has strides {list(tensor.stride())}; accepted: adjacent columns")
    if not soft:
        check_like(op, "target", call.target, (rows,), (torch.int64,))
    for name, size in (("weight", classes), ("factor", rows), ("loss", rows)):
        tensor = getattr(call, name)
        check_like(op, name, tensor, (size,), (torch.float32,))
        if name != "factor" and tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{op}: {name} has strides {list(tensor.stride())}; accepted: contiguous")
    if (call.factor is None) != (call.grad is None):
        raise ValueError(f"{op}: factor and grad go together; accepted: both or neither")


def _reference(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    factor: Tensor | None,
    loss: Tensor,
    grad: Tensor | None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> None:
    label_smoothing, z_loss = map(within_float32, (label_smoothing, z_loss))
    classes = logits.shape[1]
    x = logits.float()
    largest = x.amax(1, keepdim=True)
    e = (x - largest).exp()
    sum_exp = e.sum(1, keepdim=True)
    log_sum = sum_exp.log()
    if target.dtype == torch.int64:
        ignored = target == ignore_index
        outside = ((target < 0) | (target >= classes)) & ~ignored
        at = torch.where(ignored | outside, 0, target)[:, None]
        u = x.new_ones(at.shape) if weight is None else weight[at]
        own = (1 - label_smoothing) * u
        c = torch.zeros_like(x).scatter(1, at, own)
        moved = own * (x.gather(1, at) - largest)  # not c * (x - largest), where 0 * -inf is NaN
        if label_smoothing:
            shared = _weighted(x.new_full((), label_smoothing / classes), weight).expand_as(x)
            c = c + shared
            moved = moved + (shared * (x - largest)).sum(1, keepdim=True)
    else:
        ignored, outside = (torch.zeros_like(loss, dtype=torch.bool) for _ in range(2))
        u = 1.0
        c = _weighted((1 - label_smoothing) * target.float() + label_smoothing / classes, weight)
        moved = (c * (x - largest)).sum(1, keepdim=True)
    total = c.sum(1, keepdim=True)
    lse = largest + log_sum
    rows = total * log_sum - moved
    slope = total
    if z_loss:
        rows = rows + z_loss * u * lse * lse
        slope = slope + 2 * z_loss * u * lse
    loss.copy_(torch.where(ignored, 0.0, torch.where(outside, torch.nan, rows[:, 0])))
    if grad is not None:
        full = factor[:, None] * (slope / sum_exp * e - c)
        grad.copy_(torch.where(ignored[:, None], 0.0, torch.where(outside[:, None], torch.nan, full)))


def _weighted(c: Tensor, weight: Tensor | None) -> Tensor:
    return c if weight is None else c * weight


def samples(device: str) -> Iterator[Sample]:
    normal = Normal(device)

    def call(
        rows: int, classes: int, dtype: torch.dtype, soft=None, weighted=False, wants_grad=True, **options
    ) -> Sample:
        logits = 4 * normal(rows, classes, dtype=dtype)
        if soft is None:
            target = torch.randint(classes, (rows,), generator=normal.generator).to(device)
            target[1:2] = options.get("ignore_index", -100)
        else:
            target = normal(rows, classes).softmax(1).to(soft)
        weight = normal(classes).abs() if weighted else None
        factor = normal(rows) if wants_grad else None
        grad = torch.zeros_like(logits) if wants_grad else None
        return (logits, target, weight, factor, torch.zeros(rows, device=device), grad), options

    yield call(2, 5, torch.bfloat16, soft=torch.float32)
    for dtype in KERNEL_DTYPES:
        yield call(3, 13, dtype)
        yield call(3, 13, dtype, weighted=True, label_smoothing=0.1, z_loss=1e-2, ignore_index=4)
        yield call(2, 9, dtype, soft=dtype, weighted=True, label_smoothing=0.2, z_loss=1e-2)
        yield call(2, 5, dtype, wants_grad=False, label_smoothing=1.0)
    yield call(0, 5, torch.bfloat16)
    (logits, *rest), options = call(4, 7, torch.float32)
    yield (logits[::2, 1:6], torch.tensor([0, 4], device=device), None, torch.ones((), device=device).expand(2),
           torch.zeros(2, device=device), rest[-1][::2, 1:6]), options  # fmt: skip


op = define(
    "cross_entropy_rows_(Tensor logits, Tensor target, Tensor? weight, Tensor? factor, Tensor(a!) loss, "
    "Tensor(b!)? grad, *, int ignore_index=-100, float label_smoothing=0.0, float z_loss=0.0) -> ()",
    _reference,
    samples=samples,
    check=check,
)
#: The op's arguments: ``logits`` [N, V], fp16, bf16 or fp32, adjacent columns; ``target`` int64 [N] or probabilities
#: [N, V]; ``weight`` fp32 [V]; ``loss`` fp32 [N], written; ``grad``, of the logits' dtype, written with ``factor`` (fp32
#: [N], what each row's gradient is multiplied by), and may be the logits themselves. An ignored row has loss and gradient
#: zero whatever it holds. A class out of range: an error on the CPU; NaN where that would cost a synchronisation.
