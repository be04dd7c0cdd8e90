"""Rotary position embedding of queries and keys, optionally after an RMS norm of each head, and its gradient: fp32 inside.

One pass reads queries and keys and writes both. A pair of elements ``(a, b)`` of a head becomes
``(a cos_a - b sin_a, b cos_b + a sin_b)`` (J. Su et al., arXiv:2104.09864). Backward of a norm computes its statistics again from the
heads, which it reads anyhow. The ops are raw; ``amp_kernels.rotary`` is the differentiable one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .._checks.lists import KERNEL_DTYPES
from .._checks.operands import check_out_dtype, check_same_device, check_tensor
from .._dispatch.library import Sample, define
from .._dispatch.samples import Normal
from ._norm import check_like, statistics

MAX_WIDTH = 256


def check_shapes(op: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads: int, dtypes=KERNEL_DTYPES) -> None:
    """``q`` and ``k`` agree but for their heads, dimension ``heads``, and ``cos`` and ``sin`` fit them."""
    for name, tensor in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        check_tensor(op, name, tensor, dtypes)
    shape = "[batch, tokens, heads, width]" if heads == 2 else "[batch, heads, tokens, width]"
    if q.ndim != 4 or q.shape[3] % 2 or not 0 < q.shape[3] <= MAX_WIDTH:
        raise ValueError(f"{op}: q has shape {list(q.shape)}; accepted: {shape}, an even width from 2 to {MAX_WIDTH}")
    fits = k.ndim == 4 and all(k.shape[d] == q.shape[d] for d in range(4) if d != heads)
    if not fits:
        raise ValueError(f"{op}: k has shape {list(k.shape)}; accepted: that of q, {list(q.shape)}, but for the heads")
    if k.dtype != q.dtype:
        raise TypeError(f"{op}: k has dtype {k.dtype}; accepted: that of q, {q.dtype}")
    batch, tokens, width = q.shape[0], q.shape[3 - heads], q.shape[3]
    for name, tensor in (("cos", cos), ("sin", sin)):
        shape = tensor.shape
        fits = len(shape) == 2 or (len(shape) == 3 and shape[0] in (1, batch))
        if not fits or shape[-2] != tokens or shape[-1] % 2 or not 0 < shape[-1] <= width or shape != cos.shape:
            raise ValueError(
                f"{op}: {name} has shape {list(shape)}; accepted: [{tokens}, rotary] or [1 or {batch}, {tokens}, rotary], with an "
                f"even rotary width up to {width}, the same for cos and sin"
            )
    if sin.dtype != cos.dtype:
        raise TypeError(f"{op}: sin has dtype {sin.dtype}; accepted: that of cos, {cos.dtype}")
    check_same_device(op, q=q, k=k, cos=cos, sin=sin)


def check_weights(op: str, q: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, dtypes=KERNEL_DTYPES) -> None:
    if (q_weight is None) != (k_weight is None):
        given, missing = ("k_weight", "q_weight") if q_weight is None else ("q_weight", "k_weight")
        raise ValueError(f"{op}: {missing} is None and {given} is not; accepted: both or none")
    if q_weight is not None:
        check_like(op, "q_weight", q_weight, q.shape[3:], dtypes)
        check_like(op, "k_weight", k_weight, q.shape[3:], (q_weight.dtype,))
        check_same_device(op, q=q, q_weight=q_weight, k_weight=k_weight)


def _quarter(x: Tensor, interleaved: bool) -> Tensor:
    """Each pair turned by a quarter: ``(a, b)`` becomes ``(-b, a)``."""
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, transposed: bool = False) -> Tensor:
    """The heads ``x`` turned, or with ``transposed`` the gradient of ``x`` from that of the result, in the dtype of ``x``. ``cos`` and
    ``sin`` broadcast to the first columns of ``x``."""
    width = cos.shape[-1]
    turning, rest = x[..., :width], x[..., width:]
    across = -_quarter(turning * sin, interleaved) if transposed else _quarter(turning, interleaved) * sin
    return torch.cat([turning * cos + across, rest], dim=-1)


def _of_heads(angle: Tensor) -> Tensor:
    """``cos`` or ``sin`` as it broadcasts to ``[batch, tokens, heads, width]``."""
    return angle.float().unsqueeze(-2)


def _normalized(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """fp32 heads over their root mean square, and its reciprocal."""
    rstd = statistics(x.flatten(0, -2), eps, False)[1].view(*x.shape[:-1], 1)
    return x * rstd, rstd


def _fresh(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device).copy_(x)


def _check_forward(call: Any) -> None:
    op = "rotary_forward"
    check_shapes(op, call.q, call.k, call.cos, call.sin, 2)
    check_weights(op, call.q, call.q_weight, call.k_weight)
    check_out_dtype(op, call.out_dtype, KERNEL_DTYPES)


def _check_backward(call: Any) -> None:
    op = "rotary_backward"
    check_shapes(op, call.grad_q, call.grad_k, call.cos, call.sin, 2)
    check_weights(op, call.grad_q, call.q_weight, call.k_weight)
    check_out_dtype(op, call.out_dtype, KERNEL_DTYPES)
    if len({t is None for t in (call.q, call.k, call.q_weight)}) > 1:
        raise ValueError(f"{op}: q, k and the weights are not all None; accepted: all or none")
    check_like(op, "q", call.q, call.grad_q.shape)
    if call.q is not None:
        check_like(op, "k", call.k, call.grad_k.shape, (call.q.dtype,))


def _reference_forward(call):
    results = []
    for x, weight in ((call.q.float(), call.q_weight), (call.k.float(), call.k_weight)):
        y = x if weight is None else _normalized(x, call.eps)[0] * weight.float()
        y = turned(y, _of_heads(call.cos), _of_heads(call.sin), call.interleaved)
        results.append(_fresh(y, call.out_dtype))
    return tuple(results)


def _reference_backward(call):
    results, sums = [], []
    for grad, x, weight in ((call.grad_q, call.q, call.q_weight), (call.grad_k, call.k, call.k_weight)):
        g = turned(grad.float(), _of_heads(call.cos), _of_heads(call.sin), call.interleaved, transposed=True)
        if weight is not None:
            n, rstd = _normalized(x.float(), call.eps)
            sums.append((g * n).flatten(0, 2).sum(0))
            g = g * weight.float()
            g = (g - n * (g * n).mean(-1, keepdim=True)) * rstd
        results.append(_fresh(g, call.out_dtype))
    return *results, torch.stack(sums) if sums else call.cos.new_empty(0, call.grad_q.shape[3], dtype=torch.float32)


def _operands(normal: Normal, dtype, angles, tokens, q_heads, k_heads, width, rotary, batches):
    q, k = (normal(2, tokens, heads, width, dtype=dtype) for heads in (q_heads, k_heads))
    cos, sin = (normal(*batches, tokens, rotary, dtype=angles) for _ in range(2))
    return q, k, cos, sin


def _shapes():
    """tokens, heads of q and k, width, rotary width, leading dimensions of cos and sin."""
    return ((5, 3, 1, 16, 16, ()), (3, 2, 2, 10, 6, (2,)), (0, 2, 1, 4, 4, (1,)), (4, 1, 1, 80, 32, (1,)))


def forward_samples(device: str) -> Iterator[Sample]:
    normal = Normal(device)
    for i, dtype in enumerate(KERNEL_DTYPES):
        other, third = KERNEL_DTYPES[i - 1], KERNEL_DTYPES[i - 2]
        for j, shape in enumerate(_shapes()):
            options = {"eps": 1e-6, "interleaved": (i + j) % 2 == 1, "out_dtype": other}
            yield _operands(normal, dtype, third, *shape), options
            weights = (normal(shape[3], dtype=other) for _ in range(2))
            yield (*_operands(normal, dtype, other, *shape), *weights), {**options, "out_dtype": dtype}


def backward_samples(device: str) -> Iterator[Sample]:
    normal = Normal(device)
    for i, dtype in enumerate(KERNEL_DTYPES):
        other, third = KERNEL_DTYPES[i - 1], KERNEL_DTYPES[i - 2]
        for j, shape in enumerate(_shapes()):
            options = {"eps": 1e-6, "interleaved": (i + j) % 2 == 0, "out_dtype": other}
            yield _operands(normal, dtype, third, *shape), options
            q, k, _, _ = _operands(normal, other, third, *shape)
            weights = (normal(shape[3], dtype=third) for _ in range(2))
            yield (*_operands(normal, dtype, other, *shape), q, k, *weights), options


#: Queries and keys, ``[batch, tokens, heads, width]`` with any strides, turned by ``cos`` and ``sin``,
#: ``[tokens, rotary]`` or ``[1 or batch, tokens, rotary]``, after an RMS norm if there are weights, ``[width]``. Results are contiguous.
forward_op = define(
    "rotary_forward(Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor? q_weight=None, Tensor? k_weight=None, *, float eps, "
    "bool interleaved, ScalarType out_dtype) -> (Tensor, Tensor)",
    _reference_forward,
    samples=forward_samples,
    check=_check_forward,
    bound=True,
)

#: The gradients of queries and keys, rounded once, and those of the weights: fp32 ``[2, width]``, or ``[0, width]`` without weights.
#: ``q`` and ``k`` come with the weights.
backward_op = define(
    "rotary_backward(Tensor grad_q, Tensor grad_k, Tensor cos, Tensor sin, Tensor? q=None, Tensor? k=None, Tensor? q_weight=None, "
    "Tensor? k_weight=None, *, float eps, bool interleaved, ScalarType out_dtype) -> (Tensor, Tensor, Tensor)",
    _reference_backward,
    samples=backward_samples,
    check=_check_backward,
    bound=True,
)
