"""``linear_cross_entropy``: the last layer of a classifier or language model and its loss, without the logits of all rows: a chunk's
loss and gradient take the place of its logits (``_head.py``, ``cross_entropy_rows_``).

As in ``cross_entropy`` gradients are made in the forward and multiplied in backward by the gradient of the loss. In fp16,
whose range ends where gradients of the logits of a mean begin, the forward makes those of the sum, at most 1 in magnitude
(33 with a z-loss), 2^10 times as large; what a mean divides by and the loss scale come to the gradients of input and
weight, which are fp32 until then. If that would not do, for ``reduction="none"`` and for fp16 without such a bound,
backward computes the logits once more: a fourth GEMM, and nothing kept but the inputs. In fp16 it chooses the factor by the gradient
that comes in.

float64, targets that require a gradient, and torch.func transforms take torch's own operations.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._checks.lists import FLOATS, HALF_DTYPES
from .._checks.operands import check_same_device, check_tensors
from .._dispatch import autocast
from .._dispatch.batch_invariant import k_blocks
from .._dispatch.library import Sample, define
from .._dispatch.samples import Normal
from .._raw import cross_entropy_rows
from .._sharding.dtensor import refuse_dtensors
from . import _loss, _main_grad
from ._autograd import needs_gradient, under_transform
from ._head import Gradients, Head, check_head, chunk_and_blocks, finished, fp16_scale, ignored_rows, plain_logits
from ._linear import gradient_dtype
from ._products import working_dtype
from ._shadows import fresh_shadow, with_shadow
from ._tensors import cast, flat, reshaped

FP16_SCALE = 2.0**10  # of gradients of at most 1: 33 times as much, which a z-loss may make of them, is in range
MOST_Z_LOSS = 2.0**-12


def forward_scale(
    dtype: torch.dtype,
    reduction: str,
    target: Tensor,
    class_weight: Tensor | None,
    options: _loss.Options,
    logits_dtype: torch.dtype | None = None,
) -> float | None:
    """The factor of gradients that the forward makes; ``None`` if the backward has to make them."""
    if _loss.made_in_forward(reduction, dtype):
        return 1.0
    # |p - y| <= 1 for a class that has no weight, and the z-loss adds 2 z |lse| p, where |lse| < 65,536: at most 32.
    most = MOST_Z_LOSS if logits_dtype is None else 0.0
    bounded = not target.is_floating_point() and class_weight is None and options.z_loss <= most
    return FP16_SCALE if reduction != "none" and bounded else None


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, weight, bias, target, class_weight, shadow, reduction, options, dtype, logits_dtype, chunk, blocks
    ):
        _main_grad.refuse_data_parallel(weight)
        w = cast(weight, dtype) if shadow is None else shadow
        head = Head(cast(x, dtype), w, bias, chunk, blocks, logits_dtype)
        divisor = _loss.denominator(target, class_weight, reduction, options)
        loss = x.new_empty(x.shape[0], dtype=torch.float32)
        # The factor of a gradient that the forward made would come after its sum over the rows.
        ctx.scale = None if blocks else forward_scale(dtype, reduction, target, class_weight, options, logits_dtype)
        ctx.head = chunk, blocks, logits_dtype
        if blocks:
            _main_grad.prepare(bias)
        ctx.options = options
        ctx.dtypes = x.dtype, gradient_dtype(weight), None if bias is None else gradient_dtype(bias)
        if ctx.scale is None:
            _losses(head, target, class_weight, loss, options)
            ctx.save_for_backward(head.x, w, bias, target, class_weight, divisor)
        else:
            if ctx.scale == 1.0:
                factor, x_dtype = _loss.row_factors(x.shape[0], divisor, None, x.device), x.dtype
            else:
                factor = torch.full((), ctx.scale, dtype=torch.float32, device=x.device).expand(x.shape[0])
                x_dtype = torch.float32
            ctx.save_for_backward(
                *_gradients(ctx, head, target, class_weight, factor, loss, x_dtype),
                None if ctx.scale == 1.0 else divisor,
            )
        return _loss.reduced(loss, reduction, divisor)

    @staticmethod
    def backward(ctx, grad_loss):
        _loss.once("linear_cross_entropy")
        if ctx.scale is not None:
            *gradients, divisor = ctx.saved_tensors
            factor = grad_loss.float()
            if ctx.scale != 1.0:
                factor = factor / ctx.scale
            if divisor is not None:  # 0 where no row counts, whose gradients are 0
                factor = factor / divisor.clamp(min=1.0)
            return *finished(ctx, gradients, factor), *(None,) * 9
        x, w, bias, target, class_weight, divisor = ctx.saved_tensors
        factor = _loss.row_factors(x.shape[0], divisor, grad_loss, x.device)
        head = Head(x, w, bias, *ctx.head)
        x_dtype, unscale = ctx.dtypes[0], factor.new_ones(())
        if x.dtype == torch.float16 and not head.batch_invariant and x.shape[0]:
            size = factor.abs() * (1 + 64 * ctx.options.z_loss)  # |p (1 + 2 z lse) - y| at most, for |lse| <= 32
            size = size if class_weight is None else size * class_weight.abs().amax()
            scale, unscale = fp16_scale(size, ignored_rows(target, ctx.options.ignore_index))
            factor, x_dtype = factor * scale, torch.float32
        gradients = _gradients(ctx, head, target, class_weight, factor, torch.empty_like(factor), x_dtype)
        return *(gradients if head.batch_invariant else finished(ctx, gradients, unscale)), *(None,) * 9


def _losses(head: Head, target, class_weight, loss, options) -> None:
    for rows, logits in head.chunks():
        cross_entropy_rows.op(logits, target[rows], class_weight, None, loss[rows], None, **options._asdict())
        del logits


def _gradients(ctx, head: Head, target, class_weight, factor, loss, x_dtype) -> Gradients:
    """Writes ``loss``; the gradients of each row's loss times ``factor``."""

    def make(rows, logits, dz):
        options = ctx.options._asdict()
        cross_entropy_rows.op(logits, target[rows], class_weight, factor[rows], loss[rows], dz, **options)

    return head.gradients(ctx, ignored_rows(target, ctx.options.ignore_index), x_dtype, make)


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
    logits_dtype=None,
    compute_dtype=None,
    batch_invariant=0,
):
    op = "linear_cross_entropy"
    if logits_dtype not in (None, torch.float32):
        raise TypeError(f"{op}: logits_dtype is {logits_dtype}; accepted: None, torch.float32")
    dtype = working_dtype(op, compute_dtype, input=input, linear_weight=linear_weight)
    _loss.check_options(op, reduction, label_smoothing, z_loss)
    mixed = compute_dtype is not None
    _check(input, linear_weight, target, linear_bias, weight, shadow, dtype, mixed, ignore_index, chunk_size)
    options = _loss.Options(ignore_index, label_smoothing, z_loss)
    logits_dtype = None if dtype not in HALF_DTYPES else logits_dtype
    out_dtype = dtype if (compute_dtype is None and logits_dtype is None) or dtype == torch.float64 else torch.float32
    x = flat(input)
    soft = target.is_floating_point()
    y = target.reshape(-1, target.shape[-1]) if soft else target.reshape(-1).to(torch.int64)
    with _loss.names_class(op, target, linear_weight.shape[0], ignore_index):
        if dtype == torch.float64 or y.dtype == torch.float64 or target.requires_grad or under_transform():
            logits = plain_logits(x, linear_weight, linear_bias, dtype, logits_dtype or dtype)
            loss = _loss.composed(logits, y, weight, reduction, options)
        else:
            y = y if not soft or y.stride(1) == 1 or y.shape[1] == 1 else y.contiguous()
            weight = None if weight is None else weight.float().contiguous()
            chunk, blocks = chunk_and_blocks(op, x, linear_weight, dtype, batch_invariant, chunk_size, logits_dtype)
            inputs = (x, linear_weight, linear_bias)
            if needs_gradient(*inputs):
                arguments = *inputs, y, weight, shadow, reduction, options, dtype, logits_dtype, chunk, blocks
                loss = autocast.apply(_LinearCrossEntropy, *arguments)
            else:
                w = cast(linear_weight, dtype) if shadow is None else shadow
                each = x.new_empty(x.shape[0], dtype=torch.float32)
                _losses(Head(cast(x, dtype), w, linear_bias, chunk, blocks, logits_dtype), y, weight, each, options)
                loss = _loss.reduced(each, reduction, _loss.denominator(y, weight, reduction, options))
    return (reshaped(loss, input.shape[:-1]) if reduction == "none" else loss).to(out_dtype)


def _check(
    input, linear_weight, target, linear_bias, weight, shadow, dtype, autocast, ignore_index, chunk_size
) -> None:
    op = "linear_cross_entropy"
    check_head(op, input, linear_weight, linear_bias, shadow, dtype, autocast, chunk_size)
    _loss.check_target(op, target, (*input.shape[:-1], linear_weight.shape[0]), input.ndim - 1, weight, ignore_index)
    tensors = {"linear_weight": linear_weight, "target": target, "linear_bias": linear_bias}
    check_same_device(op, input=input, **tensors, weight=weight, shadow=shadow)


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
        yield args, {"chunk_size": 5, "label_smoothing": 0.1, "logits_dtype": torch.float32}
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
    "ScalarType? logits_dtype=None, ScalarType? compute_dtype=None, int batch_invariant=0) -> Tensor",
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
    logits_dtype: torch.dtype | None = None,
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
        logits_dtype: ``torch.float32`` keeps the logits of 16-bit operands as the product has summed them, and the loss is fp32; fp16
            logits beyond 65,504 are then finite. It takes two and a half times the memory for a chunk. ``None`` rounds them to the
            working dtype.

    Returns:
        The loss, in the working dtype, inside torch.autocast in fp32. The working dtype is that of
        :func:`amp_kernels.linear`: inside torch.autocast its dtype, whatever mix of dtypes comes in, and every argument
        gets its gradient in its own dtype. The loss is computed in fp32.

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
        "logits_dtype": logits_dtype,
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
