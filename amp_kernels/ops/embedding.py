"""``embedding``: torch's lookup, with a gradient summed in fp32 over the uses of each row.

torch adds the gradients of a row in the dtype of the weight: 4,096 additions of 0.01 in bf16 end at 4, and on a GPU their
order, so their result, changes from run to run. Here the indices are sorted in backward, and ``embedding_accumulate_`` adds
each run in fp32, in one order, and rounds once: into a new gradient, or into the weight's fp32 ``main_grad``.

float64 weights, sparse gradients, torch.func transforms and forward-mode AD take torch's own operation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _functional as F
from .._checks.lists import FLOATS, KERNEL_DTYPES
from .._checks.operands import check_same_device, check_tensor, check_tensors
from .._dispatch import autocast
from .._dispatch.batch_invariant import is_batch_invariant
from .._dispatch.library import decompose_batches, define
from .._raw import embedding_accumulate
from .._sharding.dtensor import by_rows, is_dtensor
from . import _main_grad
from ._autograd import under_transform
from ._linear import gradient_dtype
from ._tensors import is_strided

INDEX_DTYPES = (torch.int64, torch.int32)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, indices, padding_idx, scale_grad_by_freq):
        _main_grad.refuse_data_parallel(weight)
        ctx.options = {"padding_idx": padding_idx, "scale_by_frequency": scale_grad_by_freq}
        ctx.shape, ctx.dtype = weight.shape, gradient_dtype(weight)
        ctx.in_order = is_batch_invariant() and not scale_grad_by_freq
        ctx.save_for_backward(indices)
        return F.embedding(indices, weight)

    @staticmethod
    def backward(ctx, grad):
        (indices,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            wide = torch.ops.aten.embedding_dense_backward(grad.float(), indices, ctx.shape[0], *ctx.options.values())
            return wide.to(ctx.dtype), None, None, None
        ordered, order = indices.flatten().long().sort(stable=True)
        rows = grad.reshape(indices.numel(), ctx.shape[1]).contiguous()
        options = {**ctx.options, "in_order": True} if ctx.in_order else ctx.options

        def add_to(out: Tensor, fresh: bool) -> None:
            whole = (out.zero_() if fresh else out).contiguous()
            embedding_accumulate.op(whole, rows, ordered, order, **options)
            if whole is not out:
                out.copy_(whole)

        rest = _main_grad.into(ctx, 0, add_to) if indices.numel() else None
        if rest is None:
            rest = torch.zeros(ctx.shape, dtype=torch.float32 if ctx.in_order else ctx.dtype, device=grad.device)
            embedding_accumulate.op(rest, rows, ordered, order, **options)
            rest = rest.to(ctx.dtype)
        return rest, None, None, None


def _embedding(weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False) -> Tensor:
    check_tensor("embedding", "weight", weight, FLOATS)
    check_tensor("embedding", "input", indices, INDEX_DTYPES)
    check_same_device("embedding", input=indices, weight=weight)
    _check_matrix(weight)
    if not weight.requires_grad or weight.dtype not in KERNEL_DTYPES or under_transform():
        return F.embedding_op(weight, indices, padding_idx, scale_grad_by_freq)
    return _Embedding.apply(weight, indices, padding_idx, scale_grad_by_freq)


def _check_matrix(weight: Tensor) -> None:
    if weight.ndim != 2:
        raise ValueError(f"embedding: weight has shape {list(weight.shape)}; accepted: [num_embeddings, embedding_dim]")


op = define(
    "embedding(Tensor weight, Tensor indices, int padding_idx=-1, bool scale_grad_by_freq=False) -> Tensor",
    _embedding,
    composite=True,
)
decompose_batches(op)


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """torch.nn.functional.embedding whose gradient is summed in fp32, deterministically, and rounded once.

    Args:
        input: int64 or int32 indices of any shape.
        weight: ``[num_embeddings, embedding_dim]``. float64 runs torch's own operation.
        padding_idx: the row that gets no gradient; negative numbers count from the end.
        max_norm: rows that are used and longer are scaled down in place to this norm, as in torch.
        norm_type: the p of that norm.
        scale_grad_by_freq: the gradient of a row is divided by the number of its uses.
        sparse: torch's own operation, with a sparse gradient.

    Returns:
        ``[*input.shape, embedding_dim]`` in the dtype of ``weight``, also inside torch.autocast. Saved for backward: the
        indices.

    The gradient of a weight with a ``main_grad`` (:func:`amp_kernels.nn.accumulate_fp32`) is added to it in fp32.

    Raises:
        TypeError: a dtype is not accepted.
        ValueError: shapes or devices do not fit, or ``padding_idx`` is out of range.
        IndexError: an index is out of range (CPU; on a GPU torch's assertion of the device).

    Examples:
        >>> weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
        >>> rows = ak.embedding(torch.zeros(4096, dtype=torch.int64), weight)
        >>> rows.backward(torch.full_like(rows, 0.01))
        >>> weight.grad.T  # 4096 * 0.01; sums of bf16 numbers stop at 4
        tensor([[41.,  0.]], dtype=torch.bfloat16)
    """
    check_tensors("embedding", input=input, weight=weight)
    _check_matrix(weight)
    rows = weight.shape[0]
    if padding_idx is not None and not -rows <= padding_idx < rows:
        raise ValueError(f"embedding: padding_idx is {padding_idx}; accepted: None, {-rows} to {rows - 1}")
    if sparse or not is_strided(weight) or not is_strided(input):
        return F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    if is_dtensor(input):
        cut = is_dtensor(weight) and not all(placed.is_replicate() for placed in weight.placements)
        if (
            cut or max_norm is not None or scale_grad_by_freq
        ):  # the table is spread over several ranks, or all rows matter
            return F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq)
        return by_rows("embedding", lambda x, w: embedding(x, w, padding_idx), [], [input], [weight])
    padding = -1 if padding_idx is None else padding_idx % rows
    if max_norm is not None:
        with torch.no_grad():
            torch.embedding_renorm_(weight, input.contiguous(), max_norm, norm_type)
    call = _embedding if autocast.eager(weight, input) else op
    return call(weight, input, padding, scale_grad_by_freq)
