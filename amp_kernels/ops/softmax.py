"""``softmax`` and ``log_softmax``: fp32 inside, 16 bits outside, with a mask that costs no pass of its own.

The op is composite, over the raw ``softmax_rows`` and ``softmax_rows_backward``. Under autocast the result has autocast's
dtype, computed in fp32 from whatever comes in; torch's own rule makes an fp32 copy of the input and returns fp32. float64,
torch.func transforms, forward-mode AD and compilers take torch's own operations.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .. import _functional as F
from .._checks.lists import FLOATS, KERNEL_DTYPES
from .._checks.operands import check_same_device, check_tensor, check_tensors
from .._checks.types import type_name
from .._dispatch import autocast, nodes
from .._dispatch.batch_invariant import is_batch_invariant
from .._dispatch.library import Sample, define, is_traced
from .._dispatch.samples import Normal
from .._raw import softmax_rows
from .._sharding.dtensor import by_rows, is_dtensor
from ._autograd import under_transform
from ._tensors import aligned, is_strided, reshaped


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mask, log, safe, out_dtype):
        ctx.batch_invariant = is_batch_invariant()
        x = aligned(x) if ctx.batch_invariant else x
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y, statistics = softmax_rows.forward_op(rows, _rows_of(mask, x), log=log, safe=safe, out_dtype=out_dtype)
        y = reshaped(y, x.shape)
        ctx.log, ctx.safe, ctx.dtype = log, safe, x.dtype
        # log-softmax saves its input: exp(y) of a 16-bit y would be as inexact as the digits of y before its point. Softmax saves
        # y, which is 0 where the mask leaves an element out, as is the gradient, unless the row is NaN.
        ctx.save_for_backward(*((x, mask, statistics) if log else (y, None if safe else mask, None)))
        return y

    @staticmethod
    def backward(ctx, grad):
        of, mask, statistics = ctx.saved_tensors
        if torch.is_grad_enabled():
            result = _differentiable_backward(grad, of, mask, ctx.log, ctx.safe).to(ctx.dtype)
        else:
            columns = of.shape[-1]
            grad = aligned(grad) if ctx.batch_invariant else grad
            result = softmax_rows.backward_op(
                grad.reshape(-1, columns).contiguous(),
                of.reshape(-1, columns).contiguous(),
                statistics,
                _rows_of(mask, of),
                out_dtype=ctx.dtype,
            ).view(of.shape)
        return result, None, None, None, None


def _differentiable_backward(grad, of, mask, log: bool, safe: bool) -> Tensor:
    """The same through operations that autograd can differentiate again."""
    g = grad.float()
    if log:
        result = g - _composed(of, mask, False, safe, torch.float32) * g.sum(-1, keepdim=True)
    else:
        y = of.float()
        result = y * (g - (g * y).sum(-1, keepdim=True))
    return result if mask is None else torch.where(mask, result, 0.0)


def _backward_of_node(grads, saved, needs_input_grad, log):
    """The backward of :class:`_Softmax` for a node in C++, without a mask; in fp32, which autograd rounds."""
    (grad,), (of, statistics) = grads, saved
    if torch.is_grad_enabled():
        return (_differentiable_backward(grad, of, None, log, False),)
    rows, of_rows = (t.reshape(-1, of.shape[-1]).contiguous() for t in (grad, of))
    return (softmax_rows.backward_op(rows, of_rows, statistics, None, out_dtype=torch.float32).view(of.shape),)


nodes.FORMULAS["softmax"] = _backward_of_node


def _rows_of(mask: Tensor | None, x: Tensor) -> Tensor | None:
    """A mask that broadcasts to ``x`` as the raw ops take it, without copying what is expanded."""
    if mask is None:
        return None
    mask = mask.expand(x.shape)
    if mask.stride(-1) != 1 and mask.shape[-1] > 1:
        mask = mask.contiguous()
    return mask.flatten(0, -4) if mask.ndim > 4 else mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


def _composed(x: Tensor, mask: Tensor | None, log: bool, safe: bool, out_dtype: torch.dtype) -> Tensor:
    """The op in torch's own operations."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    with torch._C._DisableAutocast():
        v = x.to(wide)
        if mask is not None:
            v = v.masked_fill(~mask, -torch.inf)
        y = v.log_softmax(-1) if log else v.softmax(-1)
        if safe:
            y = torch.where((v == -torch.inf).all(-1, keepdim=True), -torch.inf if log else 0.0, y)
        return y.to(out_dtype)


def _softmax(
    x: Tensor,
    dim: int,
    mask: Tensor | None = None,
    *,
    log: bool = False,
    safe: bool = False,
    compute_dtype: torch.dtype | None = None,
) -> Tensor:
    name = "log_softmax" if log else "softmax"
    check_tensor(name, "input", x, FLOATS)
    if mask is not None:
        _check_mask(name, mask, x)
    out_dtype = compute_dtype if compute_dtype is not None and x.dtype != torch.float64 else x.dtype
    last = x.ndim - 1
    moved = x.ndim > 0 and dim % x.ndim != last
    if moved:
        x = x.movedim(dim, -1)
        mask = mask if mask is None else mask.expand(x.movedim(-1, dim).shape).movedim(dim, -1)
    wide = torch.float64 in (x.dtype, out_dtype)
    if wide or x.numel() == 0 or x.ndim == 0 or under_transform() or is_traced(x):
        y = _composed(x, mask, log, safe, out_dtype)
    else:
        y = _Softmax.apply(x, mask, log, safe, out_dtype)
    return y.movedim(-1, dim).clone(memory_format=torch.contiguous_format) if moved else y


def _check_mask(name: str, mask: Tensor, x: Tensor) -> None:
    check_tensor(name, "mask", mask, (torch.bool,))
    check_same_device(name, input=x, mask=mask)
    padded = (1,) * (x.ndim - mask.ndim) + tuple(mask.shape)
    if len(padded) != x.ndim or any(m not in (1, size) for m, size in zip(padded, x.shape, strict=True)):
        raise ValueError(
            f"{name}: mask has shape {list(mask.shape)}; accepted: what broadcasts to that of input, {list(x.shape)}"
        )


def samples(device: str) -> Iterator[Sample]:
    normal = Normal(device, grad=True)
    for i, dtype in enumerate(FLOATS):
        yield (normal(3, 6, dtype=dtype), -1), {"log": i % 2 == 0}
        if i % 2:
            yield (normal(2, 3, 4, dtype=dtype), 1), {"log": i == 1}
            mask = torch.rand(2, 1, 1, 5, generator=normal.generator).to(device) < 0.6
            mask[..., 0] = True
            yield (normal(2, 2, 3, 5, dtype=dtype), 3, mask), {"log": i == 3}
    for dtype in (torch.float16, torch.bfloat16):
        x, mask = normal(2, 4, dtype=torch.float32), torch.tensor([[True] * 4, [False] * 4], device=device)
        yield (x, 1, mask), {"safe": True, "compute_dtype": dtype}
        yield (normal(4, dtype=torch.float32), 0), {"log": True, "compute_dtype": dtype}


op = define(
    "softmax(Tensor x, int dim, Tensor? mask=None, *, bool log=False, bool safe=False, ScalarType? compute_dtype=None) "
    "-> Tensor",
    _softmax,
    samples=samples,
    composite=True,
)
autocast.lower_precision(op)


def _call(input: Tensor, dim: int, mask: Tensor | None, safe: bool, dtype: torch.dtype | None, log: bool) -> Tensor:
    if mask is None and dtype is None and not safe and nodes.may_serve():
        y = nodes.softmax(input, dim, log)
        if y is not None:
            return y
    name = "log_softmax" if log else "softmax"
    check_tensors(name, input=input)
    check_tensors(name, optional=True, mask=mask)
    if not hasattr(dim, "__index__"):
        raise TypeError(f"{name}: dim is {dim!r}, of type {type_name(dim)}; accepted: a whole number")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"{name}: dtype is {dtype}; accepted: None, a floating-point dtype")
    if not is_strided(input) or not input.is_floating_point():
        if mask is not None or safe:
            raise TypeError(f"{name}: input is {input.layout} {input.dtype}; accepted with mask or safe: dense floats")
        return F.log_softmax(input, dim, dtype) if log else F.softmax(input, dim, dtype)
    if not -max(input.ndim, 1) <= dim < max(input.ndim, 1):
        raise IndexError(f"{name}: dim is {dim}; accepted: {-max(input.ndim, 1)} to {max(input.ndim, 1) - 1}")
    if dtype is not None and dtype not in KERNEL_DTYPES:
        input, dtype = input.to(dtype), None
    options = {"log": log, "safe": safe}
    if autocast.eager(input):
        on = dtype or autocast.dtype_on(input.device.type)
        return _softmax(input, dim, mask, compute_dtype=on, **options)
    if is_dtensor(input):
        if mask is not None:
            raise ValueError(f"{name}: input is a DTensor and there is a mask; accepted: DTensors without one")
        return by_rows(name, lambda x: _call(x, dim, None, safe, dtype, log), [dim], [input])
    return op(input, dim, mask, compute_dtype=dtype, **options)


def softmax(
    input: Tensor,
    dim: int,
    *,
    mask: Tensor | None = None,
    safe: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """torch.softmax, computed in fp32 whatever the dtypes are, with a mask.

    Args:
        input: any shape and strides; float64 runs torch's own softmax.
        dim: the dimension whose elements add up to 1. The last one is read in place, others are moved there first.
        mask: bool, broadcasts to ``input``; True keeps an element, as in scaled_dot_product_attention.
        safe: zeros for a slice that is fully masked or all -inf, which is NaN otherwise, as in torch. An unmasked NaN
            makes its slice NaN in both cases.
        dtype: of the result, instead of the usual.

    Returns:
        A contiguous tensor in the dtype of ``input``, inside torch.autocast (fp16, bf16 and fp32) in autocast's dtype,
        rounded once. Masked elements have no gradient. Saved for backward: the result and, unless ``safe``, the mask.

    Raises:
        TypeError: a dtype or layout is not accepted.
        NotImplementedError: integers, as in torch.
        ValueError: the mask does not fit.
        IndexError: ``dim`` is out of range.

    Examples:
        >>> scores = torch.tensor([[0.0, 0.0, 9.0], [1.0, 2.0, 3.0]], dtype=torch.float16)
        >>> keep = torch.tensor([[True, True, False], [False, False, False]])
        >>> ak.softmax(scores, -1, mask=keep, safe=True)
        tensor([[0.5000, 0.5000, 0.0000],
                [0.0000, 0.0000, 0.0000]], dtype=torch.float16)
    """
    return _call(input, dim, mask, safe, dtype, False)


def log_softmax(
    input: Tensor,
    dim: int,
    *,
    mask: Tensor | None = None,
    safe: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """torch.log_softmax, computed in fp32 whatever the dtypes are, with a mask.

    Masked elements are -inf and have no gradient. A fully masked slice is NaN, or all -inf with ``safe``. Saved
    for backward: ``input``, from which the gradient is as exact as fp32, and two fp32 numbers a slice.

    The arguments, the result's dtype and the errors are those of :func:`softmax`.

    Examples:
        >>> ak.log_softmax(torch.zeros(4), 0)
        tensor([-1.3863, -1.3863, -1.3863, -1.3863])
    """
    return _call(input, dim, mask, safe, dtype, True)
