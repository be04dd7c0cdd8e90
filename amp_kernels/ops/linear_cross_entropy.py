"""``linear_cross_entropy``: the last layer of a classifier or language model and its loss, without the logits of all rows.

The rows are taken in chunks: a chunk's logits are computed, their loss and gradient take their place
(``cross_entropy_rows_``), and the gradients of input, weight and bias are formed from them, so that three GEMMs and one
chunk of logits are all there is. The weight's gradient is summed over chunks in fp32 (by ``gemm_accumulate_``, inside the
GEMM), so its error does not grow with their number, and rounded once.

As in ``cross_entropy`` gradients are made in the forward and multiplied in backward by the gradient of the loss. In fp16,
whose range ends where gradients of the logits of a mean begin, the forward makes those of the sum, at most 1 in magnitude
(33 with a z-loss), 2^10 times as large; what a mean divides by and the loss scale come to the gradients of input and
weight, which are fp32 until then. If that would not do, for ``reduction="none"`` and for fp16 without such a bound,
backward computes the logits once more: a fourth GEMM, and nothing kept but the inputs.

float64, targets that require a gradient, and torch.func transforms take torch's own operations.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .. import _functional as F
from .._checks.lists import FLOATS, HALF_DTYPES, check_count
from .._checks.operands import check_bias, check_same_device, check_tensors, readable_bias
from .._dispatch import autocast
from .._dispatch.batch_invariant import k_blocks
from .._dispatch.library import Sample, define
from .._dispatch.samples import Normal
from .._raw import cross_entropy_rows
from .._raw.column_sums import column_sums
from .._raw.gemm import gemm_accumulate_op
from .._raw.unit_sums import UNIT
from .._sharding.dtensor import refuse_dtensors
from . import _loss, _main_grad
from ._autograd import needs_gradient, under_transform
from ._linear import gradient_dtype
from ._products import check_blocks, gemm, gemm_options, working_dtype
from ._shadows import fresh_shadow, with_shadow
from ._tensors import cast, flat, reshaped
from .linear import check_shadow


class _Head:
    """The layer on rows of the working dtype, 16 bits or fp32, by chunks."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, chunk: int, batch_invariant: int):
        self.x, self.weight, self.chunk, self.batch_invariant = x, weight, chunk, batch_invariant
        self.half = x.dtype in HALF_DTYPES
        self.bias = readable_bias(bias, x.dtype) if self.half else bias

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Rows, and their logits."""
        for begin in range(0, self.x.shape[0], self.chunk):
            rows = slice(begin, begin + self.chunk)
            if self.half:
                options = gemm_options(self.x, batch_invariant=self.batch_invariant)
                yield rows, gemm(self.x[rows], self.weight.t(), self.bias, **options)[0]
            else:
                yield rows, F.linear(self.x[rows], self.weight, self.bias)

    def input_gradient(self, dz: Tensor, dtype: torch.dtype) -> Tensor:
        if not self.half:
            return dz @ self.weight
        return gemm(dz, self.weight, **gemm_options(dz, dtype, batch_invariant=self.batch_invariant))[0]

    def add_weight_gradient(self, total: Tensor, dz: Tensor, rows: slice) -> None:
        """``total``, fp32, is written by the first chunk and added to by the others."""
        beta = float(rows.start != 0)
        if self.half:
            gemm_accumulate_op(total, dz.t(), self.x[rows], beta=beta)
        else:
            F.addmm(total, dz.t(), self.x[rows], beta=beta, out=total)


def default_chunk(rows: int, dtype: torch.dtype, device_type: str) -> int:
    """Rows of a chunk. Tensor Cores take twice the memory for it: there the fp32 gradient of the weight, which each chunk
    reads and writes, is what chunks cost."""
    least, chunks = (2048, 4) if dtype in HALF_DTYPES and device_type != "cpu" else (1024, 8)
    return max(least, -(-rows // chunks))


FP16_SCALE = 2.0**10  # of gradients of at most 1: 33 times as much, which a z-loss may make of them, is in range
MOST_Z_LOSS = 2.0**-12


def forward_scale(
    dtype: torch.dtype, reduction: str, target: Tensor, class_weight: Tensor | None, options: _loss.Options
) -> float | None:
    """The factor of gradients that the forward makes; ``None`` if the backward has to make them."""
    if _loss.made_in_forward(reduction, dtype):
        return 1.0
    # |p - y| <= 1 for a class that has no weight, and the z-loss adds 2 z |lse| p, where |lse| < 65,536: at most 32.
    bounded = not target.is_floating_point() and class_weight is None and options.z_loss <= MOST_Z_LOSS
    return FP16_SCALE if reduction != "none" and bounded else None


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, target, class_weight, shadow, reduction, options, dtype, chunk, batch_invariant):
        _main_grad.refuse_data_parallel(weight)
        w = cast(weight, dtype) if shadow is None else shadow
        head = _Head(cast(x, dtype), w, bias, chunk, batch_invariant)
        divisor = _loss.denominator(target, class_weight, reduction, options)
        loss = x.new_empty(x.shape[0], dtype=torch.float32)
        # The factor of a gradient that the forward made would come after its sum over the rows.
        ctx.scale = None if batch_invariant else forward_scale(dtype, reduction, target, class_weight, options)
        ctx.chunk, ctx.batch_invariant = chunk, batch_invariant
        if batch_invariant:
            _main_grad.prepare(bias)
        ctx.options = options
        ctx.dtypes = x.dtype, gradient_dtype(weight), None if bias is None else gradient_dtype(bias)
        if ctx.scale == 1.0:
            factor = _loss.row_factors(x.shape[0], divisor, None, x.device)
            ctx.save_for_backward(*_gradients(ctx, head, target, class_weight, factor, loss, x.dtype), None)
        elif ctx.scale is not None:
            factor = torch.full((), ctx.scale, dtype=torch.float32, device=x.device).expand(x.shape[0])
            ctx.save_for_backward(*_gradients(ctx, head, target, class_weight, factor, loss, torch.float32), divisor)
        else:
            for rows, logits in head.chunks():
                cross_entropy_rows.op(logits, target[rows], class_weight, None, loss[rows], None, **options._asdict())
                del logits
            ctx.save_for_backward(head.x, w, bias, target, class_weight, divisor)
        return _loss.reduced(loss, reduction, divisor)

    @staticmethod
    def backward(ctx, grad_loss):
        _loss.once("linear_cross_entropy")
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        if ctx.scale is not None:
            dx, dw, db, divisor = ctx.saved_tensors
            factor = grad_loss.float()
            if ctx.scale != 1.0:
                factor = factor / ctx.scale
            if divisor is not None:  # 0 where no row counts, whose gradients are 0
                factor = factor / divisor.clamp(min=1.0)
            rest = None if dw is None else _main_grad.add(ctx, 1, dw, factor)
            own = None if rest is not None else dw
            dx, dw, db = _loss.scaled(factor, (dx, x_dtype), (own, weight_dtype), (db, bias_dtype))
            dw = dw if rest is None else rest
        else:
            x, w, bias, target, class_weight, divisor = ctx.saved_tensors
            factor = _loss.row_factors(x.shape[0], divisor, grad_loss, x.device)
            head = _Head(x, w, bias, ctx.chunk, ctx.batch_invariant)
            loss = torch.empty_like(factor)
            if ctx.batch_invariant:
                dx, dw, db = _chained_gradients(ctx, head, target, class_weight, factor, loss)
                return dx, dw, db, *(None,) * 8
            dx, dw, db = _gradients(ctx, head, target, class_weight, factor, loss, x_dtype)
            if dw is not None:
                rest = _main_grad.add(ctx, 1, dw, dw.new_ones(()))
                dw = cast(dw, weight_dtype) if rest is None else rest
            db = None if db is None else cast(db, bias_dtype)
        return dx, dw, db, *(None,) * 8


def _gradients(ctx, head: _Head, target, class_weight, factor, loss, x_dtype) -> tuple[Tensor | None, ...]:
    """Writes ``loss``; the gradients of input (``x_dtype``), weight and bias (fp32), those that are needed."""
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    dx = torch.empty(head.x.shape, dtype=x_dtype, device=head.x.device) if needs_x else None
    make = torch.empty_like if head.x.shape[0] else torch.zeros_like
    dw = make(head.weight, dtype=torch.float32, memory_format=torch.contiguous_format) if needs_weight else None
    db = torch.zeros(head.weight.shape[0], dtype=torch.float32, device=head.x.device) if needs_bias else None
    for rows, logits in head.chunks():
        dz = logits  # the gradient takes their place
        cross_entropy_rows.op(logits, target[rows], class_weight, factor[rows], loss[rows], dz, **ctx.options._asdict())
        if needs_x:
            dx[rows] = head.input_gradient(dz, dx.dtype)
        if needs_weight:
            head.add_weight_gradient(dw, dz, rows)
        if needs_bias:
            db += column_sums(dz)
        del logits, dz  # before the next chunk's logits are made
    return dx, dw, db


def _chained_gradients(ctx, head: _Head, target, class_weight, factor, loss) -> tuple[Tensor | None, ...]:
    """The same with sums over the rows whose order no split changes, and which continue from a ``main_grad``."""
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    x_dtype, weight_dtype, bias_dtype = ctx.dtypes
    dx = torch.empty(head.x.shape, dtype=x_dtype, device=head.x.device) if needs_x else None
    dw = _main_grad.Total(ctx, 1, head.weight.shape, head.x.device) if needs_weight else None
    db = _main_grad.Total(ctx, 2, head.weight.shape[:1], head.x.device) if needs_bias else None
    for rows, dz in head.chunks():
        cross_entropy_rows.op(dz, target[rows], class_weight, factor[rows], loss[rows], dz, **ctx.options._asdict())
        if dx is not None:
            dx[rows] = head.input_gradient(dz, dx.dtype)
        if dw is not None:
            dw.add_product(dz, head.x[rows])
        if db is not None:
            db.add_rows(dz)
        del dz  # before the next chunk's logits are made
    return dx, dw and dw.gradient(weight_dtype), db and db.gradient(bias_dtype)


def _linear_cross_entropy(
    input,
    linear_weight,
    target,
    linear_bias=None,
    weight=None,
    shadow=None,
    *,
    ignore_index=-100,
    reduction="mean",
    label_smoothing=0.0,
    z_loss=0.0,
    chunk_size=None,
    compute_dtype=None,
    batch_invariant=0,
):
    op = "linear_cross_entropy"
    dtype = working_dtype(op, compute_dtype, input=input, linear_weight=linear_weight)
    _loss.check_options(op, reduction, label_smoothing, z_loss)
    mixed = compute_dtype is not None
    _check(input, linear_weight, target, linear_bias, weight, shadow, dtype, mixed, ignore_index, chunk_size)
    options = _loss.Options(ignore_index, label_smoothing, z_loss)
    out_dtype = dtype if compute_dtype is None or dtype == torch.float64 else torch.float32
    x = flat(input)
    soft = target.is_floating_point()
    y = target.reshape(-1, target.shape[-1]) if soft else target.reshape(-1).to(torch.int64)
    with _loss.names_class(op, target, linear_weight.shape[0], ignore_index):
        if dtype == torch.float64 or y.dtype == torch.float64 or target.requires_grad or under_transform():
            bias = None if linear_bias is None else linear_bias.to(dtype)
            loss = _loss.composed(F.linear(x.to(dtype), linear_weight.to(dtype), bias), y, weight, reduction, options)
        else:
            y = y if not soft or y.stride(1) == 1 or y.shape[1] == 1 else y.contiguous()
            weight = None if weight is None else weight.float().contiguous()
            blocks = batch_invariant if dtype in HALF_DTYPES else 0
            classes = {"classes": linear_weight.shape[0]} if needs_gradient(x) else {}
            check_blocks(op, blocks, in_features=x.shape[1], **classes)
            chunk = default_chunk(x.shape[0], dtype, x.device.type) if chunk_size is None else chunk_size
            if blocks and chunk_size is None:
                chunk = -(-chunk // UNIT) * UNIT
            inputs = (x, linear_weight, linear_bias)
            if needs_gradient(*inputs):
                arguments = *inputs, y, weight, shadow, reduction, options, dtype, chunk, blocks
                loss = autocast.apply(_LinearCrossEntropy, *arguments)
            else:
                w = cast(linear_weight, dtype) if shadow is None else shadow
                each = x.new_empty(x.shape[0], dtype=torch.float32)
                for rows, logits in _Head(cast(x, dtype), w, linear_bias, chunk, blocks).chunks():
                    cross_entropy_rows.op(logits, y[rows], weight, None, each[rows], None, **options._asdict())
                    del logits
                loss = _loss.reduced(each, reduction, _loss.denominator(y, weight, reduction, options))
    return (reshaped(loss, input.shape[:-1]) if reduction == "none" else loss).to(out_dtype)


def _check(
    input, linear_weight, target, linear_bias, weight, shadow, dtype, autocast, ignore_index, chunk_size
) -> None:
    op = "linear_cross_entropy"
    if input.ndim == 0 or linear_weight.ndim != 2 or input.shape[-1] != linear_weight.shape[1]:
        raise ValueError(
            f"{op}: input has shape {list(input.shape)} and linear_weight {list(linear_weight.shape)}; accepted: "
            "[..., in_features] and [classes, in_features]"
        )
    _loss.check_target(op, target, (*input.shape[:-1], linear_weight.shape[0]), input.ndim - 1, weight, ignore_index)
    check_bias(op, linear_bias, linear_weight.shape[0], dtype, autocast, "linear_bias")
    check_shadow(op, "shadow", shadow, linear_weight, dtype)
    if chunk_size is not None:
        check_count(op, "chunk_size", chunk_size, 1)
    check_same_device(
        op,
        input=input,
        linear_weight=linear_weight,
        target=target,
        linear_bias=linear_bias,
        weight=weight,
        shadow=shadow,
    )


def samples(device: str) -> Iterator[Sample]:
    normal = Normal(device, grad=True)
    soft = normal(3, 5, dtype=torch.float32, grad=False).softmax(1)
    yield (normal(3, 4, dtype=torch.bfloat16), normal(5, 4, dtype=torch.bfloat16), soft), {}
    for dtype in FLOATS:
        target = torch.randint(5, (2, 3), generator=normal.generator).to(device)
        target[0, 1] = -100
        weight = torch.ones(5, device=device)
        yield (normal(2, 3, 4, dtype=dtype), normal(5, 4, dtype=dtype), target), {"chunk_size": 4}
        args = normal(2, 3, 4, dtype=dtype), normal(5, 4, dtype=dtype), target, normal(5, dtype=dtype), weight
        yield args, {"chunk_size": 2, "label_smoothing": 0.1, "z_loss": 0.01}
        yield args, {"chunk_size": 5, "reduction": "none"}
    for dtype in HALF_DTYPES:
        x, w = normal(6, 4, dtype=torch.float32), normal(5, 4, dtype=torch.float32)
        soft = normal(6, 5, dtype=torch.float32, grad=False).softmax(1)
        yield (x, w, soft), {"compute_dtype": dtype, "reduction": "sum"}
        yield (x.detach(), w.detach(), target.view(-1), None, None, w.detach().to(dtype)), {"compute_dtype": dtype}
    for dtype in HALF_DTYPES:
        args = normal(6, 4, dtype=dtype), normal(5, 4, dtype=dtype), target.view(-1), normal(5, dtype=dtype)
        yield args, {"chunk_size": 4, "reduction": "sum", "batch_invariant": 1}


op = define(
    "linear_cross_entropy(Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias=None, "
    "Tensor? weight=None, Tensor? shadow=None, *, int ignore_index=-100, "
    'str reduction="mean", float label_smoothing=0.0, float z_loss=0.0, int? chunk_size=None, '
    "ScalarType? compute_dtype=None, int batch_invariant=0) -> Tensor",
    _linear_cross_entropy,
    samples=samples,
    composite=True,
)

autocast.lower_precision(op, with_shadow(5))


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_size: int | None = None,
) -> Tensor:
    """``cross_entropy(linear(input, linear_weight, linear_bias), target)`` without the logits of all rows in memory.

    Args:
        input: ``[..., in_features]``.
        linear_weight: ``[classes, in_features]``.
        target: classes of shape ``[...]`` (int64 or uint8), or probabilities ``[..., classes]``.
        linear_bias: ``[classes]``; for 16-bit work in the working dtype or fp32, in autocast in any of the three, otherwise in
            the dtype of ``input``.
        weight, reduction, ignore_index, label_smoothing, z_loss: as in :func:`amp_kernels.cross_entropy`;
            ``ignore_index=None`` means -100.
        chunk_size: rows whose logits exist at a time; by default an eighth of the rows, at least 1,024, for 16-bit work on
            a GPU a fourth, at least 2,048. Chunks cost a read and a write of the fp32 gradient of ``linear_weight`` each;
            memory is that gradient and the input's, made in the forward (in fp16 both in fp32), and one chunk of logits.

    Returns:
        The loss, in the working dtype, inside torch.autocast in fp32. The working dtype is that of
        :func:`amp_kernels.linear`: inside torch.autocast its dtype, whatever mix of dtypes comes in, and every argument
        gets its gradient in its own dtype. The logits are rounded to the working dtype, the loss is computed in fp32.

    The weight's gradient is summed over chunks in fp32 and rounded once, or goes to ``main_grad``
    (:func:`amp_kernels.nn.accumulate_fp32`). ``reduction="none"`` takes a fourth GEMM, as do class weights, probabilities
    and a ``z_loss`` above 2^-12 in fp16. If the incoming gradient of the loss is no power of two, the input's gradient is
    rounded twice, as in :func:`amp_kernels.cross_entropy`; in fp16 once. Not differentiable twice, but in float64.

    Raises:
        TypeError: a dtype or layout is not accepted, or a tensor is a DTensor; outside autocast dtypes are not mixed.
        ValueError: a shape, device or option is not accepted, or a class is out of range (CPU; RuntimeError in a compiled program).

    Examples:
        >>> hidden, words = torch.randn(6, 8), torch.zeros(1000, 8, requires_grad=True)
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     loss = ak.linear_cross_entropy(hidden, words, torch.arange(6), chunk_size=2)
        >>> round(loss.item(), 4)  # log(1000)
        6.9078
    """
    options = {
        "ignore_index": -100 if ignore_index is None else ignore_index,
        "reduction": reduction,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "chunk_size": chunk_size,
        "batch_invariant": k_blocks(),
    }
    check_tensors("linear_cross_entropy", input=input, linear_weight=linear_weight, target=target)
    check_tensors("linear_cross_entropy", optional=True, linear_bias=linear_bias, weight=weight)
    args = input, linear_weight, target, linear_bias, weight
    if autocast.eager(input, linear_weight, target):
        dtype = autocast.dtype_on(input.device.type)
        shadow = fresh_shadow(linear_weight, dtype)
        return _linear_cross_entropy(*args, shadow, compute_dtype=dtype, **options)
    refuse_dtensors(
        "linear_cross_entropy",
        "plain tensors, or amp_kernels.linear, and amp_kernels.distributed.vocab_parallel_cross_entropy of its logits",
        input=input,
        linear_weight=linear_weight,
    )
    return op(*args, **options)
