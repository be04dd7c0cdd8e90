"""The cross-entropy of logits whose vocabulary is split over ranks, as tensor parallelism leaves them.

Source: Shoeybi et al., "Megatron-LM" (arXiv:1909.08053), section 3: ranks exchange what a row has, never its logits. Here
that is two collectives of a few floats a row: the maximum; then, together, the sum of exponentials, the target's logit and, for
label smoothing, the sum of all logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._checks.lists import KERNEL_DTYPES
from .._checks.operands import check_tensor
from .._raw import cross_entropy_rows
from .._sharding.local import is_dtensor, local
from ..ops.cross_entropy import Options, check_options, denominator, once, reduced, row_factors

_OP = "vocab_parallel_cross_entropy"
_IGNORED = -1  # of the raw op: such rows have loss and gradient zero


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """:func:`amp_kernels.cross_entropy` of logits of which each rank holds some classes of every row.

    As from an output layer under ``ColwiseParallel(use_local_output=...)``: the logits are never gathered. What the ranks
    exchange is three floats a row, with label smoothing four, in two collectives; the gradient is each rank's own. FP32 inside,
    from logits that are read three times in the forward and the backward together, with label smoothing four times.

    Args:
        logits: ``[..., V / T]``, float16, bfloat16 or float32: the classes of this rank, rank after rank, as many on each; or
            a DTensor that is sharded over its last dimension on one dimension of its mesh, evenly or not.
        target: int64, of the shape of ``logits`` without its last dimension, the same on all ranks of ``group``: numbers of
            classes of the whole vocabulary.
        group: the T ranks that hold the vocabulary; ``None`` for all. Of a DTensor its mesh says which.
        ignore_index: rows of this class have loss and gradient zero.
        reduction: ``"mean"`` (over the rows that count), ``"sum"`` or ``"none"``.
        label_smoothing: 0 to 1, the share of the target that all classes of the whole vocabulary get alike. A gradient of
            16 bits is rounded once more for it, but at the target.
        z_loss: coefficient of the square of ``logsumexp`` over the whole vocabulary, as of :func:`amp_kernels.cross_entropy`.

    Returns:
        The loss in float32, a plain tensor, the same on all ranks of the group; of DTensors that are sharded by rows too,
        that of this rank's rows. A row whose class is out of range is NaN. Not differentiable twice.

    Raises:
        TypeError: a dtype is not accepted.
        ValueError: a shape, placement or option is not accepted.

    Examples:
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> logits = torch.zeros(2, 4, requires_grad=True)  # all classes on one rank
        >>> loss = ak.distributed.vocab_parallel_cross_entropy(logits, torch.tensor([0, 3]))
        >>> round(loss.item(), 4)  # log(4)
        1.3863
        >>> loss.backward()
        >>> logits.grad[0]
        tensor([-0.3750,  0.1250,  0.1250,  0.1250])
        >>> torch.distributed.destroy_process_group()
    """
    check_options(_OP, reduction, label_smoothing, z_loss)
    if is_dtensor(logits):
        logits, group, start, classes = _piece(logits)
    else:
        group = group or dist.group.WORLD
        start, classes = group.rank() * logits.shape[-1], group.size() * logits.shape[-1]
    target = local(target)
    check_tensor(_OP, "logits", logits, KERNEL_DTYPES)
    check_tensor(_OP, "target", target, (torch.int64,))
    if logits.ndim == 0 or target.shape != logits.shape[:-1] or logits.shape[-1] == 0:
        raise ValueError(
            f"{_OP}: logits has shape {list(logits.shape)} and target {list(target.shape)}; accepted: [..., V / T], at least "
            "one class on each rank, and [...]"
        )
    rows = logits.flatten(0, -2) if logits.ndim > 1 else logits[None]
    rows = rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()
    options = Options(ignore_index, label_smoothing, z_loss)
    loss = _VocabParallel.apply(rows, target.flatten(), group, start, classes, reduction, options)
    return loss.view(target.shape) if reduction == "none" else loss


def _piece(logits: Tensor) -> tuple[Tensor, dist.ProcessGroup, int, int]:
    """This rank's logits, the ranks that hold the rest of its rows, its first class, and the number of all."""
    last = logits.ndim - 1
    over = [dim for dim, placed in enumerate(logits.placements) if placed.is_shard(last)]
    if len(over) != 1 or any(placed.is_partial() for placed in logits.placements):
        raise ValueError(
            f"{_OP}: logits has the placements {logits.placements}; accepted: one Shard({last}), and none that is Partial"
        )
    mesh, classes = logits.device_mesh, logits.shape[last]
    each = -(-classes // mesh.size(over[0]))  # as torch.chunk cuts them
    if each * (mesh.size(over[0]) - 1) >= classes:
        raise ValueError(
            f"{_OP}: {classes} classes over {mesh.size(over[0])} ranks leave some without; accepted: at least one on each rank"
        )
    return logits.to_local(), mesh.get_group(over[0]), each * mesh.get_coordinate()[over[0]], classes


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits, target, group, start, classes, reduction, options):
        counted = target != options.ignore_index
        here = target - start
        inside = counted & (here >= 0) & (here < logits.shape[1])
        here = torch.where(inside, here, 0)
        largest, top = logits.max(1)
        largest = largest.float()
        # Relative to this rank's largest logit the kernel's loss is the logarithm of the sum of exponentials. Where there is
        # nothing but -inf that sum is 0, and where nothing counts nobody asks.
        top = torch.where(counted & (largest != -torch.inf), top, _IGNORED)
        log_sum = torch.empty_like(largest)
        cross_entropy_rows.op(logits, top, None, None, log_sum, None, ignore_index=_IGNORED)
        shift = largest.clone()
        dist.all_reduce(shift, dist.ReduceOp.MAX, group=group)
        own = (log_sum + (largest - shift)).exp()
        own_target = torch.where(inside, logits.gather(1, here[:, None])[:, 0].float() - shift, 0.0)
        terms = [own, own_target]
        if options.label_smoothing:
            terms.append(logits.sum(1, dtype=torch.float32) - logits.shape[1] * shift)
        sums = torch.stack(terms)
        dist.all_reduce(sums, group=group)
        log_total = sums[0].log()
        lse = shift + log_total
        wanted = sums[1]  # the mean of the logits by the target's probabilities
        if options.label_smoothing:
            wanted = torch.lerp(wanted, sums[2] / classes, options.label_smoothing)
        outside = counted & ((target < 0) | (target >= classes))
        loss = torch.where(outside, torch.nan, log_total - wanted + options.z_loss * lse * lse)
        loss = torch.where(counted, loss, 0.0)
        divisor = denominator(target, None, options) if reduction == "mean" else None
        ctx.options, ctx.reduction, ctx.classes = options, reduction, classes
        # log(softmax) of this rank's classes is the kernel's plus this much:
        share = log_sum + (largest - lse)
        ctx.save_for_backward(logits, top, here, counted, inside, outside, largest, lse, share, divisor)
        return reduced(loss, reduction, divisor)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor):
        once(_OP)
        logits, top, here, counted, inside, outside, largest, lse, share, divisor = ctx.saved_tensors
        smoothing = ctx.options.label_smoothing
        factor = row_factors(logits.shape[0], ctx.reduction, divisor, grad_loss, logits.device)
        slope = factor * (1 + 2 * ctx.options.z_loss * lse)
        each = factor * (smoothing / ctx.classes)  # what every class is to have
        # The kernel's gradient is softmax over this rank's classes, minus 1 at its largest: that is put right afterwards.
        grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
        scratch = torch.empty_like(lse)
        scale = torch.where(outside, torch.nan, slope * share.exp())
        cross_entropy_rows.op(logits, top, None, scale, scratch, grad, ignore_index=_IGNORED)
        if smoothing:
            grad -= torch.where(counted, each, 0.0)[:, None]
        rows = torch.arange(logits.shape[0], device=logits.device)
        column = top.clamp(min=0)
        value = torch.where(outside, torch.nan, slope * (largest - lse).exp() - each)
        grad[rows, column] = torch.where(top == _IGNORED, grad[rows, column], value.to(grad.dtype))
        own = logits[rows, here].float()
        exact = (slope * (own - lse).exp() - (1 - smoothing) * factor - each).to(grad.dtype)
        grad[rows, here] = torch.where(inside, exact, grad[rows, here])
        return grad, None, None, None, None, None, None
