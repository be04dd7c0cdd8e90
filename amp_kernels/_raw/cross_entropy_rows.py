"""The cross-entropy of rows of logits and its gradient, in fp32 from logits that are read once. Raw: the op that
``cross_entropy``, ``linear_cross_entropy`` and ``linear_log_probs`` are made of.

``loss[i] = sum_j c_j (lse - x_j) + z_loss u lse^2``, where for a target class ``t`` ``c_j = (1 - s) w_t [j = t] + s w_j / V``
and ``u = w_t``, for probabilities ``y`` ``c_j = w_j ((1 - s) y_j + s / V)`` and ``u = 1``: csrc/loss/formula.h.

Logits in fp32 may be divided by a temperature ``T`` of their row, and their gradient may be 16 bits. Each row has statistics:
the largest logit ``m`` of ``x = z / T``, ``S = sum_j exp(x_j - m)`` and ``U = sum_j (x_j - m) exp(x_j - m)``. The log-sum-exp is
``m + log S``, the entropy ``H = log S - U / S`` and its gradient ``dH/dx_j = -p_j (x_j - m - U / S)``. A term of ``exp(-inf) = 0`` is 0.
With the statistics of a forward the gradient of both takes one read.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._checks.lists import HALF_DTYPES, KERNEL_DTYPES, names, within_float32
from .._dispatch.library import Sample, define
from .._dispatch.samples import Normal
from ._norm import check_like


def check(call) -> None:
    op, logits, soft = "cross_entropy_rows_", call.logits, call.target.is_floating_point()
    rows, classes = logits.shape
    for name in ("logits", "grad", *["target"] * soft):
        tensor = getattr(call, name)
        narrow = name == "grad" and logits.dtype in HALF_DTYPES
        check_like(op, name, tensor, logits.shape, (logits.dtype,) if narrow else KERNEL_DTYPES)
        if tensor is not None and classes > 1 and tensor.numel() and tensor.stride(1) != 1:
            raise ValueError(f"{op}: {name} has strides {list(tensor.stride())}; accepted: adjacent columns")
    if not soft:
        check_like(op, "target", call.target, (rows,), (torch.int64,))
    per_row = dict.fromkeys(("factor", "temperature", "entropy_factor", "loss"), rows)
    for name, size in {"weight": classes, **per_row}.items():
        tensor = getattr(call, name)
        check_like(op, name, tensor, (size,), (torch.float32,))
        if name in ("weight", "loss") and tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{op}: {name} has strides {list(tensor.stride())}; accepted: contiguous")
    if (call.factor is None) != (call.grad is None):
        raise ValueError(f"{op}: factor and grad go together; accepted: both or neither")
    if (call.loss is None) != (call.known is not None):
        raise ValueError(f"{op}: loss and known exclude each other; accepted: one of them")
    for name in ("known", "statistics"):
        tensor = getattr(call, name)
        check_like(op, name, tensor, (2 if tensor is not None and len(tensor) == 2 else 3, rows), (torch.float32,))
        if tensor is not None and rows > 1 and (tensor.stride(1) != 1 or tensor.stride(0) < rows):
            raise ValueError(f"{op}: {name} has strides {list(tensor.stride())}; accepted: adjacent rows")
    more = call.temperature, call.known, call.entropy_factor, call.statistics
    if logits.dtype != torch.float32 and any(tensor is not None for tensor in more):
        raise TypeError(
            f"{op}: logits has dtype {names([logits.dtype])}; accepted with a temperature or statistics: float32"
        )
    plain = call.weight is None and not soft and call.label_smoothing == call.z_loss == 0
    if call.known is not None and (call.grad is None or call.statistics is not None or not plain):
        raise ValueError(
            f"{op}: known is given; accepted with it: the gradient alone, of classes without other options"
        )
    if call.entropy_factor is not None and (call.known is None or len(call.known) != 3):
        raise ValueError(f"{op}: entropy_factor is given; accepted with it: known of three statistics")


def _reference(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    factor: Tensor | None,
    loss: Tensor | None,
    grad: Tensor | None,
    *,
    temperature: Tensor | None = None,
    known: Tensor | None = None,
    entropy_factor: Tensor | None = None,
    statistics: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> None:
    label_smoothing, z_loss = map(within_float32, (label_smoothing, z_loss))
    classes = logits.shape[1]
    x = logits.float() if temperature is None else logits / temperature[:, None]
    if known is not None:
        grad.copy_(_known_gradient(x, target, factor, known, entropy_factor, ignore_index))
        return
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
    if statistics is not None:
        moment = (e * _finite(x - largest)).sum(1)
        fill = torch.where(outside, torch.nan, 0.0)
        for to, value, of_ignored in zip(statistics, (largest[:, 0], sum_exp[:, 0], moment), (0, 1, 0), strict=False):
            to.copy_(torch.where(ignored, of_ignored, value + fill))
    loss.copy_(torch.where(ignored, 0.0, torch.where(outside, torch.nan, rows[:, 0])))
    if grad is not None:
        full = factor[:, None] * (slope / sum_exp * e - c)
        grad.copy_(torch.where(ignored[:, None], 0.0, torch.where(outside[:, None], torch.nan, full)))


def _known_gradient(x, target, factor, known, entropy_factor, ignore_index) -> Tensor:
    above = _finite(x - known[0][:, None])
    p = above.exp() / known[1][:, None]
    column = torch.arange(x.shape[1], device=x.device)
    full = factor[:, None] * (p - (column == target[:, None]).float())
    if entropy_factor is not None:
        full = full - entropy_factor[:, None] * p * (above - (known[2] / known[1])[:, None])
    return torch.where((target == ignore_index)[:, None], 0.0, full)


def _finite(above: Tensor) -> Tensor:
    """A logit of -inf has probability 0; 0 * -inf would be NaN."""
    return torch.where(above == -torch.inf, torch.finfo(torch.float32).min, above)


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

    def more(rows: int, classes: int, dtype: torch.dtype, count: int, masked: int = 0) -> Iterator[Sample]:
        """The statistics of rows, and from them a gradient of losses and entropies."""
        (logits, target, _, factor, loss, _), options = call(rows, classes, torch.float32)
        logits[:, :masked] = -torch.inf
        options["temperature"] = normal(rows).abs() + 0.5
        statistics = torch.zeros(count, rows, device=device)
        yield (logits, target, None, None, loss, None), options | {"statistics": statistics}
        of_loss, known = torch.zeros_like(loss), torch.ones_like(statistics)
        _reference(logits, target, None, None, of_loss, None, **options, statistics=known)
        grad = torch.zeros(rows, classes, dtype=dtype, device=device)
        options |= {"known": known} | ({"entropy_factor": normal(rows)} if count == 3 else {})
        yield (logits, target, None, factor, None, grad), options

    yield call(2, 5, torch.bfloat16, soft=torch.float32)
    for dtype in KERNEL_DTYPES:
        yield from more(5, 13, dtype, 3, masked=4)
        yield from more(3, 16, dtype, 2)
        (*args, _), options = call(3, 13, torch.float32, weighted=True, label_smoothing=0.1, z_loss=1e-2)
        yield (*args, torch.zeros(3, 13, dtype=dtype, device=device)), options
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
    "cross_entropy_rows_(Tensor logits, Tensor target, Tensor? weight, Tensor? factor, Tensor(a!)? loss, "
    "Tensor(b!)? grad, *, Tensor? temperature=None, Tensor? known=None, Tensor? entropy_factor=None, "
    "Tensor(c!)? statistics=None, int ignore_index=-100, float label_smoothing=0.0, float z_loss=0.0) -> ()",
    _reference,
    samples=samples,
    check=check,
)
#: The op's arguments: ``logits`` [N, V], fp16, bf16 or fp32, adjacent columns; ``target`` int64 [N] or probabilities
#: [N, V]; ``weight`` fp32 [V]; ``loss`` fp32 [N], written; ``grad``, of the logits' dtype or, of fp32 logits, of any of the three,
#: written with ``factor`` (fp32 [N], what each row's gradient is multiplied by), and may be the logits themselves. An ignored row has
#: loss and gradient zero whatever it holds. A class out of range: an error on the CPU; NaN where that would cost a synchronisation.
#:
#: Of fp32 logits also: ``temperature`` fp32 [N]; ``statistics`` fp32 [2 or 3, N], written: m, S and perhaps U, 0, 1 and 0 for an ignored
#: row; in place of ``loss``, ``known``: such statistics, for a gradient with respect to x from one read, where a class out of range is no
#: column's; ``entropy_factor`` fp32 [N], with which the gradient of the entropies is added. Nothing is multiplied by 1 / T.
