"""Sums over tensor-parallel ranks whose bits do not depend on the number of ranks.

Source: Zhang et al., "Deterministic inference across tensor parallel sizes" (arXiv:2511.17826): a tree over blocks of K that goes
on over the ranks. Leaves and nodes are fp32 here, and :func:`amp_kernels.batch_invariant` makes the blocks, in backward too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._checks.operands import check_tensor
from .._raw._product import pairwise


def tree_sum(summands: Sequence[Tensor]) -> Tensor:
    """The sum of fp32 tensors, added pairwise, neighbours first: ``((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))``.

    Args:
        summands: a power of two of float32 tensors of one shape, in the order of the blocks of K.

    Returns:
        A new float32 tensor of their shape. Differentiable.

    Raises:
        TypeError: a summand is not a float32 tensor.
        ValueError: their number is not a power of two, or their shapes differ.

    Examples:
        >>> ak.distributed.tree_sum([torch.ones(2), torch.ones(2)])
        tensor([2., 2.])
    """
    count = len(summands)
    if count < 1 or count & (count - 1):
        raise ValueError(f"tree_sum: there are {count} summands; accepted: a power of two (1, 2, 4, ...)")
    for i, summand in enumerate(summands):
        check_tensor("tree_sum", f"summands[{i}]", summand, (torch.float32,))
        if summand.shape != summands[0].shape:
            raise ValueError(
                f"tree_sum: summands[{i}] has shape {list(summand.shape)}; accepted: {list(summands[0].shape)}, that of "
                "summands[0]"
            )
    return pairwise(summands.__getitem__, 0, count) if count > 1 else summands[0].clone()


class _TreeAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, tensor, group=group)
        return tree_sum(gathered)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def tree_all_reduce(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """:func:`tree_sum` of the ranks' tensors, in the order of the ranks, on every rank.

    Each rank gathers all summands and adds them itself: an all-reduce adds in an order that depends on its algorithm, which depends on
    sizes and ranks. Within ``batch_invariant(k_blocks=n // ranks)`` the product of each rank's part of K, with an fp32 result, gives
    the bits that one rank computes within ``batch_invariant(k_blocks=n)``.

    Args:
        tensor: float32, of the same shape on all ranks.
        group: a power of two of ranks; ``None`` for all.

    Returns:
        A new float32 tensor. The gradient of every rank's summand is the gradient of the sum, which is the same on all ranks.

    Raises:
        TypeError: ``tensor`` is not a float32 tensor.
        ValueError: the number of ranks is not a power of two.

    Examples:
        >>> def row_parallel(x, weight, group, k_blocks):  # this rank's columns of x and weight
        ...     with ak.batch_invariant(k_blocks=k_blocks // torch.distributed.get_world_size(group)):
        ...         part = ak.matmul(x, weight.t(), out_dtype=torch.float32)
        ...     return ak.distributed.tree_all_reduce(part, group).to(x.dtype)
    """
    check_tensor("tree_all_reduce", "tensor", tensor, (torch.float32,))
    ranks = dist.get_world_size(group)
    if ranks & (ranks - 1):
        raise ValueError(f"tree_all_reduce: group has {ranks} ranks; accepted: a power of two (1, 2, 4, ...)")
    return _TreeAllReduce.apply(tensor.contiguous(), group)
