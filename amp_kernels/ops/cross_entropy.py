"""``cross_entropy``: torch's loss with 16-bit logits read once and written once, everything between in fp32.

The op is composite, over the raw ``cross_entropy_rows_``. torch's eager autocast makes an fp32 copy of the logits, an fp32
log-softmax and an fp32 gradient; here nothing of their size exists but the logits and their gradient.

The gradient is made in the forward, from the same read, as if the loss were what is differentiated, and multiplied in
backward by the gradient of the loss: exact where that is a power of two, as 1, a micro-batch's share of 1/2^k and a loss
scale are. Any other factor costs a second rounding: to avoid it, backward would read the logits once more, and a plain
``loss.backward()`` would move three times their bytes instead of twice. It is made in backward, from a second read, where that
would not do: for ``reduction="none"``, whose rows have gradients of their own, and for fp16 logits, whose small gradients only
the loss scale brings into fp16's range.

float64 logits, targets that require a gradient, and torch.func transforms take torch's own operations, in fp32 or fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._checks.lists import FLOATS, KERNEL_DTYPES, names
from .._checks.operands import check_no_internal_overlap, check_same_device, check_tensor, check_tensors
from .._dispatch import autocast, nodes
from .._dispatch.batch_invariant import is_batch_invariant
from .._dispatch.library import define
from .._raw import cross_entropy_rows
from .._sharding.dtensor import refuse_dtensors
from . import _loss
from ._autograd import needs_gradient, under_transform
from ._tensors import aligned, reshaped


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, weight, reduction, options, inplace):
        rows, now = logits.shape[0], _loss.made_in_forward(reduction, logits.dtype)
        divisor = _loss.denominator(target, weight, reduction, options)
        loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
        factor = grad = None
        if now:
            factor = _loss.row_factors(rows, divisor, None, logits.device)
            grad = logits if inplace else torch.empty_like(logits, memory_format=torch.contiguous_format)
        cross_entropy_rows.op(logits, target, weight, factor, loss, grad, **options._asdict())
        ctx.now, ctx.options, ctx.inplace = now, options, inplace
        ctx.save_for_backward(*((grad,) if now else (logits, target, weight, divisor)))
        return _loss.reduced(loss, reduction, divisor)

    @staticmethod
    def backward(ctx, grad_loss):
        _loss.once("cross_entropy")
        if ctx.now:
            (grad,) = ctx.saved_tensors
            return *_loss.scaled(grad_loss, (grad, grad.dtype)), None, None, None, None, None
        grad = _made_in_backward(*ctx.saved_tensors, grad_loss, ctx.options, ctx.inplace)
        return grad, None, None, None, None, None


def _made_in_backward(logits, target, weight, divisor, grad_loss, options, inplace) -> Tensor:
    factor = _loss.row_factors(logits.shape[0], divisor, grad_loss, logits.device)
    grad = logits if inplace else torch.empty_like(logits, memory_format=torch.contiguous_format)
    cross_entropy_rows.op(logits, target, weight, factor, torch.empty_like(factor), grad, **options._asdict())
    return grad


def _backward_of_node(grads, saved, needs_input_grad, ignore_index, is_mean, label_smoothing, z_loss):
    """The backward of :class:`_CrossEntropy` for a node in C++, whose target holds classes: ``saved`` are the gradient
    made in the forward, or logits and target."""
    _loss.once("cross_entropy")
    of, target = saved
    if target is None:
        return tuple(_loss.scaled(grads[0], (of, of.dtype)))
    options = _loss.Options(ignore_index, label_smoothing, z_loss)
    divisor = _loss.denominator(target, None, "mean" if is_mean else "sum", options)
    return (_made_in_backward(of, target, None, divisor, grads[0], options, False),)


nodes.FORMULAS["cross_entropy"] = _backward_of_node


def by_rows(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Logits with the classes in dimension 1 (or the only one), and their target, as rows."""
    soft = target.is_floating_point()
    if logits.ndim == 1:
        logits, target = logits[None], target[None]
    elif logits.ndim > 2:
        logits = logits.movedim(1, -1).flatten(0, -2)
        target = target.movedim(1, -1).flatten(0, -2) if soft else target.flatten()
    return logits, target if soft or target.dtype == torch.int64 else target.to(torch.int64)


def _cross_entropy(
    logits,
    target,
    weight=None,
    *,
    ignore_index=-100,
    reduction="mean",
    label_smoothing=0.0,
    z_loss=0.0,
    inplace=False,
    out_dtype=None,
):
    _check(logits, target, weight, ignore_index, reduction, label_smoothing, z_loss, inplace)
    out_dtype = logits.dtype if out_dtype is None or logits.dtype == torch.float64 else out_dtype
    options = _loss.Options(ignore_index, label_smoothing, z_loss)
    shape = target.shape if not target.is_floating_point() else logits.shape[:1] * (logits.ndim > 1) + logits.shape[2:]
    x, y = by_rows(logits, target)
    with _loss.names_class("cross_entropy", target, logits.shape[logits.ndim > 1], ignore_index):
        if x.dtype == torch.float64 or y.dtype == torch.float64 or target.requires_grad or under_transform():
            loss = _loss.composed(x, y, weight, reduction, options)
        else:
            x = x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
            x = aligned(x) if is_batch_invariant() and not inplace else x
            y = y if y.ndim == 1 or y.stride(1) == 1 or y.shape[1] == 1 else y.contiguous()
            weight = None if weight is None else weight.float().contiguous()
            if needs_gradient(x):
                loss = autocast.apply(_CrossEntropy, x, y, weight, reduction, options, inplace)
            else:
                rows = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
                cross_entropy_rows.op(x, y, weight, None, rows, None, **options._asdict())
                loss = _loss.reduced(rows, reduction, _loss.denominator(y, weight, reduction, options))
    return (reshaped(loss, shape) if reduction == "none" else loss).to(out_dtype)


def _check(logits, target, weight, ignore_index, reduction, label_smoothing, z_loss, inplace) -> None:
    op = "cross_entropy"
    _loss.check_options(op, reduction, label_smoothing, z_loss)
    check_tensor(op, "logits", logits, FLOATS)
    if logits.ndim == 0:
        raise ValueError(f"{op}: logits has no dimension; accepted: [C], [N, C] or [N, C, d1, ...]")
    _loss.check_target(op, target, tuple(logits.shape), 0 if logits.ndim == 1 else 1, weight, ignore_index)
    if weight is not None and weight.dtype not in {logits.dtype, torch.float32}:
        raise TypeError(
            f"{op}: weight has dtype {names([weight.dtype])}; accepted: {names({logits.dtype, torch.float32})}"
        )
    check_same_device(op, logits=logits, target=target, weight=weight)
    if inplace:
        if logits.dtype not in KERNEL_DTYPES or logits.ndim != 2 or (logits.shape[1] > 1 and logits.stride(1) != 1):
            raise ValueError(
                f"{op}: inplace=True, but logits of shape {list(logits.shape)}, strides {list(logits.stride())} and dtype "
                f"{names([logits.dtype])} cannot take the gradient; accepted: [N, C] with adjacent classes, "
                f"{names(KERNEL_DTYPES)}"
            )
        check_no_internal_overlap(op, "logits", logits)


op = define(
    "cross_entropy(Tensor logits, Tensor target, Tensor? weight=None, *, int ignore_index=-100, "
    'str reduction="mean", float label_smoothing=0.0, float z_loss=0.0, bool inplace=False, '
    "ScalarType? out_dtype=None) -> Tensor",
    _cross_entropy,
    composite=True,
)
autocast.fp32_result(op)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    inplace: bool = False,
) -> Tensor:
    """torch.nn.functional.cross_entropy, computed in fp32 from logits that are read in the dtype they have.

    Args:
        logits: ``[C]``, ``[N, C]`` or ``[N, C, d1, ...]``, any float dtype and strides; best ``[N, C]`` with adjacent
            classes, others are copied.
        target: classes (int64 or uint8) of the shape of ``logits`` without ``C``, or probabilities (any float dtype) of
            the shape of ``logits``.
        weight: ``[C]``, the weight of each class, in the dtype of ``logits`` or fp32.
        ignore_index: rows of this class have loss and gradient zero whatever they hold, NaN included.
        reduction: ``"mean"`` (over the weights of the rows that count), ``"sum"`` or ``"none"``.
        label_smoothing: 0 to 1, the share of the target that all classes get alike.
        z_loss: coefficient of the square of ``logsumexp(logits)``, added to each row's loss before its weight and the
            reduction (PaLM; Chowdhery et al., arXiv:2204.02311).
        inplace: the gradient takes the place of the ``logits``, which saves as much memory as they hold: ``[N, C]`` with
            adjacent classes only. Their version counter tells autograd, so that whoever needs their values in backward
            raises. They are overwritten in the forward; for fp16 logits and ``reduction="none"`` in backward.

    Returns:
        The loss, in the dtype of ``logits``; inside torch.autocast in fp32 (fp64 logits: fp64). It is computed in fp32
        either way, relative to the largest logit of a row, so a number added to all logits changes nothing. A mean over
        nothing is NaN, as in torch, with gradients of zero.

    The gradient is rounded to the dtype of ``logits`` in the forward, and once more in backward if the incoming gradient of the
    loss is no power of two. The two roundings leave a relative error of at most 2 u + u^2 instead of u, which is 2^-8 in bf16.
    fp16 logits and ``reduction="none"`` are rounded once, at the price of a second read of the logits.

    Not differentiable twice, but in float64. A class that is out of range is an error on the CPU; on a GPU, where that
    would cost a synchronisation, the row's loss and gradient are NaN. Reruns give the same bits, and so do equal rows
    of one call, wherever they begin.

    Raises:
        TypeError: a dtype or layout is not accepted.
        ValueError: a shape, device or option is not accepted, or a class is out of range (CPU; RuntimeError in a compiled program).

    Examples:
        >>> logits = torch.zeros(2, 4, dtype=torch.bfloat16, requires_grad=True)
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     loss = ak.cross_entropy(logits, torch.tensor([0, 3]))
        >>> loss.dtype, round(loss.item(), 4)  # log(4)
        (torch.float32, 1.3863)
        >>> loss.backward()
        >>> logits.grad
        tensor([[-0.3750,  0.1250,  0.1250,  0.1250],
                [ 0.1250,  0.1250,  0.1250, -0.3750]], dtype=torch.bfloat16)
    """
    if weight is None and not inplace and nodes.may_serve():
        loss = nodes.cross_entropy(logits, target, ignore_index, reduction, label_smoothing, z_loss)
        if loss is not None:
            return loss
    check_tensors("cross_entropy", logits=logits, target=target)
    check_tensors("cross_entropy", optional=True, weight=weight)
    options = {
        "ignore_index": ignore_index,
        "reduction": reduction,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "inplace": inplace,
    }
    if autocast.eager(logits, target):
        on = autocast.dtype_on(logits.device.type) is not None
        return _cross_entropy(logits, target, weight, out_dtype=torch.float32 if on else None, **options)
    refuse_dtensors(
        "cross_entropy",
        "each rank's rows, logits.to_local(), or amp_kernels.distributed.vocab_parallel_cross_entropy where classes are spread "
        "over several ranks",
        logits=logits,
    )
    return op(logits, target, weight, **options)
