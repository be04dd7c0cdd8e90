"""The cross-entropy of logits whose vocabulary is sharded over ranks by tensor parallelism.

Source: Shoeybi et al., "Megatron-LM" (arXiv:1909.08053), section 3: ranks exchange a few floats per row instead of its logits.
Here these are two collectives: the maximum; then the sum of exponentials, the target's logit and, for label smoothing, the sum
of all logits.
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
from ..ops._loss import Options, check_options, denominator, once, reduced, row_factors

_OP = "vocab_parallel_cross_entropy"
_IGNORED = -1  # ignore_index of the raw op: such rows have zero loss and gradient


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

    Use it after an output layer under ``ColwiseParallel(use_local_output=...)``. Logits are never gathered: ranks exchange three
    floats per row (four with label smoothing) in two collectives, and each computes the gradient of its own classes. The
    computation is in FP32; forward and backward together read the logits three times (four with label smoothing).

    Args:
        logits: ``[..., V / T]``, float16, bfloat16 or float32: the classes of this rank, in rank order and equally many on each
            rank; or a DTensor sharded over its last dimension on one dimension of its mesh, evenly or not.
        target: int64, of the shape of ``logits`` without its last dimension, the same on all ranks of ``group``: class indices
            in the whole vocabulary.
        group: the T ranks that hold the vocabulary; ``None`` for all. Ignored for a DTensor, whose mesh determines them.
        ignore_index: rows with this target have zero loss and gradient.
        reduction: ``"mean"`` (over the rows that are not ignored), ``"sum"`` or ``"none"``.
        label_smoothing: 0 to 1, the share of the target distribution that is uniform over the whole vocabulary. A 16-bit
            gradient is then rounded twice, except at the target.
        z_loss: coefficient of the squared ``logsumexp`` over the whole vocabulary, as in :func:`amp_kernels.cross_entropy`.

    Returns:
        The loss in float32, a plain tensor, the same on all ranks of the group. For DTensors that are also sharded by rows, the
        loss of this rank's rows. A row whose target is out of range is NaN. Not differentiable twice.

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
    logits, group, start, classes = piece_of(_OP, "logits", logits, logits.ndim - 1, group)
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


def piece_of(
    op: str, name: str, tensor: Any, dim: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, dist.ProcessGroup, int, int]:
    """This rank's piece of a tensor whose dimension ``dim`` has the classes, the ranks with the others, this rank's first class, and the
    number of classes. A plain tensor is the piece, one of equal ones over the ``group``."""
    if not is_dtensor(tensor):
        group = group or dist.group.WORLD
        if group is None:
            raise ValueError(
                f"{op}: group is None without an initialised process group; accepted: a process group, or None after "
                "torch.distributed.init_process_group"
            )
        each = tensor.shape[dim] if tensor.ndim else 0
        return tensor, group, group.rank() * each, group.size() * each
    over = [place for place, placed in enumerate(tensor.placements) if placed.is_shard(dim)]
    if len(over) != 1 or any(placed.is_partial() for placed in tensor.placements):
        raise ValueError(
            f"{op}: {name} has the placements {tensor.placements}; accepted: one Shard({dim}), and none that is Partial"
        )
    mesh, classes = tensor.device_mesh, tensor.shape[dim]
    each = -(-classes // mesh.size(over[0]))  # as torch.chunk cuts them
    if each * (mesh.size(over[0]) - 1) >= classes:
        raise ValueError(
            f"{op}: {classes} classes over {mesh.size(over[0])} ranks leave some without; accepted: at least one on each rank"
        )
    return tensor.to_local(), mesh.get_group(over[0]), each * mesh.get_coordinate()[over[0]], classes


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits, target, group, start, classes, reduction, options):
        counted = target != options.ignore_index
        here = target - start
        inside = counted & (here >= 0) & (here < logits.shape[1])
        here = torch.where(inside, here, 0)
        largest, top = logits.max(1)
        largest = largest.float()
        # With this rank's largest logit as the target, the kernel's loss is the log of the sum of exponentials relative to it.
        # Skip ignored rows, and rows of -inf, whose sum is 0.
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
        wanted = sums[1]  # the mean of the logits under the target distribution
        if options.label_smoothing:
            wanted = torch.lerp(wanted, sums[2] / classes, options.label_smoothing)
        outside = counted & ((target < 0) | (target >= classes))
        loss = torch.where(outside, torch.nan, log_total - wanted + options.z_loss * lse * lse)
        loss = torch.where(counted, loss, 0.0)
        divisor = denominator(target, None, reduction, options)
        ctx.options, ctx.classes = options, classes
        # log_softmax over all classes is the kernel's, over this rank's classes, plus this:
        share = log_sum + (largest - lse)
        ctx.save_for_backward(logits, top, here, counted, inside, outside, largest, lse, share, divisor)
        return reduced(loss, reduction, divisor)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor):
        once(_OP)
        logits, top, here, counted, inside, outside, largest, lse, share, divisor = ctx.saved_tensors
        smoothing = ctx.options.label_smoothing
        factor = row_factors(logits.shape[0], divisor, grad_loss, logits.device)
        slope = factor * (1 + 2 * ctx.options.z_loss * lse)
        each = factor * (smoothing / ctx.classes)  # the uniform part
        # The kernel's gradient is softmax over this rank's classes, minus 1 at the largest; that element is corrected below.
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
