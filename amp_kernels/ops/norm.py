"""``layer_norm`` and ``rms_norm``: differentiable to any order, with an autocast rule.

The op is composite: it decomposes into ``norm_forward`` and ``norm_backward``. float64, torch.func transforms,
forward-mode AD and tensors without elements take torch's own norms, in at least fp32.

Under autocast the result has autocast's dtype, computed in fp32 from any input dtype. A residual stream in fp32 is read directly and
the next layer gets 16 bits, without a cast and without an fp32 copy of an activation. torch's own rule returns fp32 there, and for
rms_norm it depends on torch's version.

Compilers see torch's norm in fp32 instead and fuse it with the additions around it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor

from .. import _functional as F
from .._checks.lists import FLOATS, KERNEL_DTYPES
from .._checks.operands import check_same_device, check_tensor, check_tensors
from .._checks.types import type_name
from .._dispatch import autocast, nodes
from .._dispatch.batch_invariant import is_batch_invariant
from .._dispatch.library import define, is_traced
from .._raw import norm_backward, norm_forward
from .._raw._norm import check_like
from .._removed import refuse
from .._sharding.dtensor import by_rows, is_dtensor
from . import _main_grad
from ._autograd import needs_gradient, under_transform
from ._linear import gradient_dtype
from ._tensors import aligned, cast, is_strided, reshaped


class _Norm(torch.autograd.Function):
    """The autograd node of a norm. Returns ``(y, sum)``; the sum is ``None`` without a residual."""

    @staticmethod
    def forward(ctx, x, weight, bias, residual, dimensions, eps, centred, out_dtype):
        ctx.set_materialize_grads(False)
        y, total, mean, rstd = _forward(x, weight, bias, residual, dimensions, eps, centred, out_dtype)
        ctx.options = dimensions, eps, centred
        ctx.batch_invariant = is_batch_invariant()
        if ctx.batch_invariant:
            _main_grad.prepare(weight, bias)
        ctx.dtypes = [None if t is None else gradient_dtype(t) for t in (x, weight, bias, residual)]
        ctx.save_for_backward(x if total is None else total, weight, bias, mean if centred else None, rstd)
        return y, total

    @staticmethod
    def backward(ctx, *grads):
        needs = ctx.needs_input_grad[:4]
        return *_gradients(grads, ctx.saved_tensors, needs, ctx.options, ctx.dtypes, ctx), *(None,) * 4


def _gradients(grads, saved, needs, options, dtypes, ctx=None) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight, bias and residual, in ``dtypes``; ``grads`` and ``saved`` as in :class:`_Norm`, whose node is ``ctx``."""
    grad, grad_sum = grads
    x, weight, bias, mean, rstd = saved
    batch_invariant = ctx is not None and ctx.batch_invariant
    if grad is None:
        found = grad_sum, None, None, None
    elif torch.is_grad_enabled():
        found = *_differentiable_backward(options, x, weight, bias, grad, grad_sum), None
    else:
        branch_dtype = dtypes[0] if needs[0] else None
        if batch_invariant:
            grad, grad_sum = aligned(grad), aligned(grad_sum)
        in_kernel = (needs[0], False, False, needs[3]) if batch_invariant else needs
        found = _backward(options[0], x, weight, mean, rstd, grad, grad_sum, in_kernel, branch_dtype)
        if batch_invariant:
            found = found[0], *_parameter_gradients(ctx, x, weight, bias, mean, rstd, grad), found[3]
    of_x, of_weight, of_bias, of_branch = found
    results = zip((of_x if of_branch is None else of_branch, of_weight, of_bias, of_x), dtypes, needs, strict=True)
    return tuple(cast(t, dtype) if needed and t is not None else None for t, dtype, needed in results)


def _parameter_gradients(ctx, x, weight, bias, mean, rstd, grad) -> Iterator[Tensor | None]:
    """The gradients of weight and bias as sums whose order does not depend on the number of rows."""
    of_rows = x.reshape(rstd.shape[0], -1), mean, rstd
    position = 1
    for parameter, needed, norm, dtype in zip(
        (weight, bias), ctx.needs_input_grad[1:3], (of_rows, ()), ctx.dtypes[1:3], strict=True
    ):
        if not needed:
            yield None
        else:
            total = _main_grad.Total(ctx, position, parameter.shape, grad.device)
            total.add_rows(grad.reshape(rstd.shape[0], -1), *norm)
            yield total.gradient(dtype)
        position += parameter is not None


def _forward(x, weight, bias, residual, dimensions, eps, centred, out_dtype) -> tuple[Tensor | None, ...]:
    columns = math.prod(x.shape[-dimensions:])
    y, total, mean, rstd = norm_forward.op(
        x.reshape(-1, columns),
        *(t if t is None else t.reshape(columns) for t in (weight, bias)),
        None if residual is None else residual.reshape(-1, columns),
        eps=eps,
        centred=centred,
        out_dtype=out_dtype,
    )
    return reshaped(y, x.shape), None if residual is None else reshaped(total, x.shape), mean, rstd


def _backward(dimensions, x, weight, mean, rstd, grad, grad_sum, needs, branch_dtype) -> tuple[Tensor | None, ...]:
    """The gradients of the sum, of weight and bias, and of the branch if it differs from the sum's."""
    columns = math.prod(x.shape[-dimensions:])
    _, needs_weight, needs_bias, _ = needs
    if branch_dtype not in KERNEL_DTYPES or branch_dtype == x.dtype:
        branch_dtype = None
    grad_x, sums, of_branch = norm_backward.op(
        grad.reshape(-1, columns),
        x.reshape(-1, columns),
        rstd,
        mean,
        weight if weight is None else weight.reshape(columns),
        grad_sum if grad_sum is None else grad_sum.reshape(-1, columns),
        parameters=2 if needs_bias else 1 if needs_weight else 0,
        branch_dtype=branch_dtype,
    )
    shape = x.shape[-dimensions:]
    return (
        grad_x.view(x.shape),
        sums[0].view(shape) if needs_weight else None,
        sums[1].view(shape) if needs_bias else None,
        None if branch_dtype is None else of_branch.view(x.shape),
    )


def _gradients_of_node(grads, saved, needs_input_grad, dimensions, eps, centred, x_dtype):
    """:func:`_gradients` for a node in C++, which has a second output and a fourth input only with a residual."""
    of_sum, *parameters = (None if t is None else t.dtype for t in saved[:3])
    dtypes = getattr(torch, x_dtype), *parameters, of_sum
    needs = (*needs_input_grad, False)[:4]
    return _gradients((*grads, None)[:2], saved, needs, (dimensions, eps, centred), dtypes)[: len(needs_input_grad)]


nodes.FORMULAS["norm"] = _gradients_of_node


def _differentiable_backward(options, x, weight, bias, grad, grad_sum) -> tuple[Tensor | None, ...]:
    """The same through operations that autograd can differentiate again."""
    dimensions, eps, centred = options
    inputs = [t if t is None or t.requires_grad else t.detach().requires_grad_() for t in (x, weight, bias)]
    y = _composed(inputs[0], x.shape[-dimensions:], *inputs[1:], None, eps, centred, grad.dtype)[0]
    wanted = [t for t in inputs if t is not None]
    found = iter(torch.autograd.grad(y, wanted, grad, create_graph=True, allow_unused=True))
    grads = [None if t is None else next(found) for t in inputs]
    if grad_sum is not None:
        grads[0] = grads[0] + grad_sum
    return tuple(grads)


def _composed(x, shape, weight, bias, residual, eps, centred, out_dtype) -> list[Tensor]:
    """The op in torch's own operations."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    with torch._C._DisableAutocast():
        total = x if residual is None else (x.to(wide) + residual.to(wide)).to(residual.dtype)
        weight, bias = (t if t is None else t.to(wide) for t in (weight, bias))
        if centred:
            y = F.layer_norm(total.to(wide), shape, weight, bias, eps)
        else:
            y = F.rms_norm(total.to(wide), shape, weight, eps)
            y = y if bias is None else y + bias
        return [y.to(out_dtype)] if residual is None else [y.to(out_dtype), total]


def _norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    eps: float,
    centred: bool,
    compute_dtype: torch.dtype | None = None,
) -> list[Tensor]:
    shape = tuple(normalized_shape)
    _check("layer_norm" if centred else "rms_norm", x, shape, weight, bias, residual)
    own_dtype = x.dtype if residual is None else residual.dtype
    out_dtype = compute_dtype if compute_dtype is not None and x.dtype != torch.float64 else own_dtype
    if x.dtype == torch.float64 or x.numel() == 0 or under_transform() or is_traced(x):
        return _composed(x, shape, weight, bias, residual, eps, centred, out_dtype)
    if is_batch_invariant():
        x, residual = aligned(x), aligned(residual)
    arguments = x, weight, bias, residual, len(shape), eps, centred, out_dtype
    y, total = autocast.apply(_Norm, *arguments) if needs_gradient(*arguments[:4]) else _forward(*arguments)[:2]
    return [y] if total is None else [y, total]


def _check(name: str, x, shape: tuple[int, ...], weight, bias, residual) -> None:
    check_tensor(name, "x", x, FLOATS)
    if not shape or x.shape[-len(shape) :] != shape:
        raise ValueError(
            f"{name}: normalized_shape is {list(shape)} and x has shape {list(x.shape)}; accepted: the last dimensions of x"
        )
    dtypes = FLOATS if x.dtype == torch.float64 else KERNEL_DTYPES
    check_like(name, "weight", weight, shape, dtypes)
    check_like(name, "bias", bias, shape, dtypes)
    check_like(name, "residual", residual, x.shape, (x.dtype,) if x.dtype == torch.float64 else dtypes)
    check_same_device(name, x=x, weight=weight, bias=bias, residual=residual)


op = define(
    "norm(Tensor x, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, Tensor? residual=None, "
    "*, float eps, bool centred, ScalarType? compute_dtype=None) -> Tensor[]",
    _norm,
    composite=True,
)
autocast.lower_precision(op)


def _call(x, residual, weight, bias, normalized_shape, eps: float, centred: bool):
    if nodes.may_serve():
        found = nodes.norm(x, normalized_shape, weight, bias, eps, centred, residual)
        if found is not None:
            return found
    name = "layer_norm" if centred else "rms_norm"
    check_tensors(name, x=x)
    check_tensors(name, optional=True, weight=weight, bias=bias, residual=residual)
    if not isinstance(normalized_shape, (int, Sequence)):
        raise TypeError(
            f"{name}: normalized_shape is {normalized_shape!r}, of type {type_name(normalized_shape)}; accepted: an int or several"
        )
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    if residual is None and not is_strided(x):
        return F.layer_norm(x, shape, weight, bias, eps) if centred else F.rms_norm(x, shape, weight, eps)
    options = {"eps": eps, "centred": centred}
    if autocast.eager(*(t for t in (x, weight, bias, residual) if t is not None)):
        dtype = autocast.dtype_on(x.device.type)
        results = _norm(x, shape, weight, bias, residual, compute_dtype=dtype, **options)
    elif is_dtensor(x):
        norm = partial(_call, normalized_shape=shape, **options)
        return by_rows(name, norm, range(-len(shape), 0), (x, residual), (weight, bias))
    else:
        results = op(x, shape, weight, bias, residual, **options)
    return results[0] if residual is None else (results[0], results[1])


@overload
def layer_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: None = None,
) -> Tensor: ...
@overload
def layer_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor,
) -> tuple[Tensor, Tensor]: ...
def layer_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    **removed: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """torch.nn.functional.layer_norm, computed in fp32 whatever the dtypes are, with an addition in front.

    ``y = (s - mean) / sqrt(var + eps) * weight + bias`` over the last dimensions of ``s = x + residual``, which are
    ``normalized_shape``. Mean and variance are those of the row in fp32, in two passes; the result is rounded once.

    Args:
        x: ``[..., *normalized_shape]``, any strides.
        normalized_shape: the dimensions that a row covers.
        weight, bias: of shape ``normalized_shape``, or ``None``.
        eps: added to the variance.
        residual: a tensor of the shape of ``x``, never written to. The sum is rounded to its dtype and normalised.

    Returns:
        ``y``, or with ``residual`` the pair ``(y, s)``: ``s`` in the dtype of ``residual``. ``y`` has the dtype of
        ``s``, and inside torch.autocast, from 16 bits or fp32, autocast's dtype, on every version of torch.

    The dtypes of ``x``, ``weight``, ``bias`` and ``residual`` are fp16, bf16 and fp32 in any mix, each gets its
    gradient in its own; float64 runs torch's own norm. Gradients of weight and bias are fp32 sums in a fixed order.
    Saved for backward: ``s``, and two fp32 numbers a row. A nested ``x`` without a residual runs torch's own norm.

    Raises:
        TypeError: a dtype or layout is not accepted.
        ValueError: shapes or devices do not fit.

    Examples:
        >>> ak.layer_norm(torch.tensor([[1.0, 3.0]]), 2, eps=0.0)
        tensor([[-1.,  1.]])
        >>> x, residual = torch.randn(4, 64, dtype=torch.bfloat16), torch.randn(4, 64)
        >>> y, total = ak.layer_norm(x, 64, torch.ones(64), torch.zeros(64), residual=residual)
        >>> torch.equal(total, x + residual)
        True
    """
    refuse("layer_norm", removed)
    return _call(x, residual, weight, bias, normalized_shape, eps, True)


@overload
def rms_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    residual: None = None,
) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    residual: Tensor,
) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    residual: Tensor | None = None,
    **removed: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """torch.nn.functional.rms_norm, computed in fp32 whatever the dtypes are, with an addition in front.

    ``y = s / sqrt(mean(s^2) + eps) * weight`` over the last dimensions of ``s = x + residual``. B. Zhang, R. Sennrich:
    Root mean square layer normalization, NeurIPS 2019.

    Args:
        eps: added to the mean square; ``None`` is fp32's machine epsilon, 1.19e-7, as the computation is in fp32
            (float64's for float64).

    The other arguments, the results and the errors are those of :func:`layer_norm`.

    Examples:
        >>> x = torch.tensor([[2.0, -2.0, 2.0, 2.0]], dtype=torch.float16)
        >>> ak.rms_norm(x, 4, weight=torch.tensor([1.0, 1.0, 1.0, 10.0]))
        tensor([[ 1., -1.,  1., 10.]], dtype=torch.float16)
    """
    refuse("rms_norm", removed)
    if eps is None:
        eps = torch.finfo(torch.float64 if getattr(x, "dtype", None) == torch.float64 else torch.float32).eps
    return _call(x, residual, weight, None, normalized_shape, eps, False)
