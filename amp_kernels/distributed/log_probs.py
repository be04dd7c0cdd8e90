"""Log-probabilities of tokens from a head whose rows, the words of the vocabulary, are spread over ranks by tensor parallelism.

Each rank makes the logits of its words and keeps three numbers a row of them: the largest, ``m``, and relative to it the sum of
exponentials ``S`` and their first moment ``U``. Two collectives make those of the whole vocabulary, whatever the number of chunks: the
maximum ``M``; and with ``c = m - M`` the sum of ``S e^c``, of the target's logit less ``M``, and of ``e^c (U + c S)``. Backward sums the
gradient of the input over the ranks, in fp32.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from .._dispatch import autocast
from .._sharding.local import is_dtensor, local
from ..ops import _main_grad
from ..ops._head import Head, chunk_and_blocks
from ..ops._linear import gradient_dtype
from ..ops._loss import once
from ..ops._products import working_dtype
from ..ops._tensors import cast, flat, reshaped
from ..ops.linear_log_probs import check_call, fill_statistics, gradients_of, temperature_of
from .cross_entropy import piece_of

_OP = "vocab_parallel_log_probs"
_IGNORED = -1  # ignore_index of the raw op


@overload
def vocab_parallel_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    linear_bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    entropy: Literal[False] = False,
    ignore_index: int = -100,
    chunk_size: int | None = None,
) -> Tensor: ...
@overload
def vocab_parallel_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    linear_bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    entropy: Literal[True],
    ignore_index: int = -100,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]: ...
def vocab_parallel_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    linear_bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    ignore_index: int = -100,
    chunk_size: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`amp_kernels.linear_log_probs` of a head of which each rank holds some words.

    Logits are never gathered: ranks exchange 16 bytes a row in two collectives, and one in backward, the gradient of ``input``.

    Args:
        input: ``[..., in_features]``, the same on all ranks of ``group``.
        linear_weight: ``[V / T, in_features]``: the words of this rank, in rank order and equally many on each rank; or a DTensor with
            ``Shard(0)`` on one dimension of its mesh, evenly or not, and ``Replicate`` on others.
        target: int64 or uint8, of shape ``[...]``, the same on all ranks: words of the whole vocabulary.
        group: the T ranks that hold the vocabulary; ``None`` for all. Ignored for a DTensor, whose mesh determines them.
        linear_bias: ``[V / T]``, sharded as ``linear_weight``.
        temperature, entropy, ignore_index, chunk_size: as :func:`amp_kernels.linear_log_probs` takes them.

    Returns:
        Log-probabilities, or they and entropies, in fp32, the same bits on all ranks of the group. A row whose target is out of range
        is NaN. The gradient of ``input`` is whole on every rank. Not differentiable twice.

    Raises:
        TypeError: a dtype is not accepted, fp64 among them.
        ValueError: a shape, placement or option is not accepted, or there is no process group.

    Examples:
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> hidden, head = torch.randn(2, 8), torch.zeros(1000, 8, requires_grad=True)  # all words on one rank
        >>> log_probs = ak.distributed.vocab_parallel_log_probs(hidden, head, torch.tensor([0, 999]))
        >>> round(log_probs[0].item(), 4)  # -log(1000)
        -6.9078
        >>> log_probs.sum().backward()
        >>> torch.distributed.destroy_process_group()
    """
    weight, group, start, classes = piece_of(_OP, "linear_weight", linear_weight, 0, group)
    if is_dtensor(linear_weight) and is_dtensor(linear_bias):
        linear_bias = linear_bias.to_local()
    input, target = local(input), local(target)
    compute = autocast.dtype_on(input.device.type)
    dtype = working_dtype(_OP, compute, input=input, linear_weight=weight)
    if dtype == torch.float64:
        raise TypeError(f"{_OP}: input has dtype float64; accepted: float16, bfloat16, float32")
    divisor = temperature_of(_OP, temperature, target, input)
    check_call(_OP, input, weight, target, linear_bias, divisor, None, dtype, compute is not None, chunk_size)
    divisor = None if divisor is None else divisor.detach().float().expand(target.shape).reshape(-1)
    x, y = flat(input), target.reshape(-1).to(torch.int64)
    chunk, _ = chunk_and_blocks(_OP, x, weight, dtype, 0, chunk_size, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        arguments = x, weight, linear_bias, y, divisor, group, (start, classes), ignore_index, dtype, chunk
        log_probs, entropies = (reshaped(t, target.shape) for t in _VocabParallel.apply(*arguments))
    return (log_probs, entropies) if entropy else log_probs


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, weight, bias, target, temperature, group, words, ignore_index, dtype, chunk):
        ctx.set_materialize_grads(False)
        _main_grad.refuse_data_parallel(weight)
        start, classes = words
        counted = target != ignore_index
        here = target - start
        inside = counted & (here >= 0) & (here < weight.shape[0])
        at = torch.where(inside, here, 0)
        head = Head(cast(x, dtype), cast(weight, dtype), bias, chunk, 0, torch.float32)
        own = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        statistics = torch.empty(3, x.shape[0], dtype=torch.float32, device=x.device)

        def gather(rows, logits):
            own[rows] = logits.gather(1, at[rows, None])[:, 0]

        # The kernel wants a word of this rank; its loss, that of a row of another rank, too, is not used.
        words = torch.where(counted, at, _IGNORED)
        fill_statistics(head, words, temperature, _IGNORED, statistics, torch.empty_like(own), gather)
        if temperature is not None:
            own = own / temperature
        largest, sum_exp, moment = statistics
        most = largest.clone()
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        below = largest - most
        none = (largest == -torch.inf) & counted  # no word of this rank is possible
        share = torch.where(none, 0.0, below.exp())
        terms = [sum_exp, own - most, moment + below * sum_exp]
        sums = torch.stack([
            torch.where(none, 0.0, share * terms[0]),
            torch.where(inside, terms[1], 0.0),
            torch.where(none, 0.0, share * terms[2]),
        ])  # fmt: skip
        dist.all_reduce(sums, group=group)
        log_sum = sums[0].log()
        outside = counted & ((target < 0) | (target >= classes))
        impossible = counted & (most == -torch.inf)
        log_probs = torch.where(outside | impossible, torch.nan, sums[1] - log_sum)
        entropies = torch.where(outside | impossible, torch.nan, log_sum - sums[2] / sums[0])
        ctx.group, ctx.options = group, (_IGNORED, chunk, 0)
        ctx.dtypes = x.dtype, gradient_dtype(weight), None if bias is None else gradient_dtype(bias)
        # A word of another rank is none of this rank's columns.
        column = torch.where(inside, here, torch.where(counted, weight.shape[0], _IGNORED))
        known = torch.stack([most, torch.where(outside | impossible, torch.nan, sums[0]), sums[2]])
        ctx.save_for_backward(head.x, head.weight, bias, column, temperature, known)
        return torch.where(counted, log_probs, 0.0), torch.where(counted, entropies, 0.0)

    @staticmethod
    def backward(ctx: Any, grad_log_probs, grad_entropy):
        once(_OP)
        gradients = gradients_of(ctx, grad_log_probs, grad_entropy, lambda dx: dist.all_reduce(dx, group=ctx.group))
        return *gradients, *(None,) * 7
