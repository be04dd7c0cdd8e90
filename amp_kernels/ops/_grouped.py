"""The two products of groups behind ``grouped_mm`` that have kernels, rows and sums, with their derivatives of any order.

Operands are of the working dtype, or are cast to it below autograd. fp16 and bf16 run ``grouped_gemm``. fp32 and fp64 take torch's
products: on a CPU one of each group's rows; where the host does not know the ends, one of all rows for each group, from which a mask
takes the group's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import _functional as F
from .._checks.activations import ACTIVATIONS
from .._checks.lists import HALF_DTYPES, KERNEL_DTYPES
from .._checks.operands import readable_bias
from .._dispatch import autocast
from .._raw import activation_backward
from .._raw.grouped_gemm import grouped_gemm_accumulate_op, grouped_gemm_op, row_products, sum_products
from . import _main_grad
from ._autograd import add_gradient, needs_gradient
from ._linear import gradient_dtype, preactivation_gradient
from ._tensors import cast, values_are_known
from .routing import combine_rows, spread_rows


class Options(NamedTuple):
    """``transposed``: b is ``[G, N, K]``, the weight of a layer."""

    dtype: torch.dtype
    out_dtype: torch.dtype
    activation: str = "none"
    transposed: bool = False
    batch_invariant: bool = False


def _kernel_options(a: torch.Tensor, options: Options) -> dict:
    out_dtype = {} if options.out_dtype is a.dtype else {"out_dtype": options.out_dtype}
    return {**out_dtype, "batch_invariant": True} if options.batch_invariant else out_dtype


def _ranges(offs: torch.Tensor) -> list[slice]:
    ends = offs.tolist()
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def _rows(a, b, offs, bias, options: Options, preact: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The result, and with an activation the pre-activation if it is asked for."""
    if options.transposed:
        b = b.mT
    if a.dtype in HALF_DTYPES:
        keywords = _kernel_options(a, options)
        if options.activation != "none":
            keywords |= {"activation": options.activation, "preact": preact}
        return grouped_gemm_op(a, b, offs, bias, **keywords)
    z = torch_rows(a, b, offs, bias)
    return (z, None) if options.activation == "none" else (ACTIVATIONS[options.activation](z), z)


def torch_rows(a, b, offs, bias) -> torch.Tensor:
    def product(a, b, g):
        z = F.matmul(a, b)
        return z if bias is None else z + (bias if bias.ndim == 1 else bias[g])

    if not values_are_known(offs):
        return row_products(a, b, offs, product, a.new_zeros(a.shape[0], b.shape[2]))
    ranges = _ranges(offs)
    parts = [product(a[rows], b[g], g) for g, rows in enumerate(ranges)]
    return torch.cat([*parts, a.new_zeros(a.shape[0] - (ranges[-1].stop if ranges else 0), b.shape[2])])


def _sums(a, b, offs, options: Options) -> torch.Tensor:
    if a.dtype in HALF_DTYPES:
        return grouped_gemm_op(a, b, offs, **_kernel_options(a, options))[0]
    return torch_sums(a, b, offs)


def torch_sums(a, b, offs) -> torch.Tensor:
    if not values_are_known(offs) or not offs.shape[0]:
        return sum_products(a, b, offs, F.matmul)
    return torch.stack([F.matmul(a[:, terms], b[terms]) for terms in _ranges(offs)])


# ---- autograd


def differentiable_rows(a, b, offs, bias, shadow, options: Options, gather=None) -> torch.Tensor:
    if needs_gradient(a, b, bias):
        return autocast.apply(_Rows, a, b, bias, shadow, offs, gather, options)[0]
    b16 = cast(b, options.dtype) if shadow is None else shadow
    rows = _gathered(cast(a, options.dtype), gather)
    return _rows(rows, b16, offs, readable_bias(bias, options.dtype), options)[0]


def _gathered(a, gather) -> torch.Tensor:
    return a if gather is None else spread_rows(a, gather)


def differentiable_sums(a, b, offs, options: Options) -> torch.Tensor:
    if needs_gradient(a, b):
        return autocast.apply(_Sums, a, b, offs, options)[0]
    return _sums(cast(a, options.dtype), cast(b, options.dtype), offs, options)


class _Rows(torch.autograd.Function):
    """The rows form. The 16-bit copies of a and b and the pre-activation are outputs too, as in ``linear``. Gathered rows are not
    kept: backward gathers again."""

    @staticmethod
    def forward(ctx, a, b, bias, shadow, offs, gather, options):
        ctx.set_materialize_grads(False)
        needs_a, needs_b = ctx.needs_input_grad[:2]
        _main_grad.refuse_data_parallel(b)
        a16 = cast(a, options.dtype)
        b16 = cast(b, options.dtype) if shadow is None else shadow
        rows = _gathered(a16, gather)
        out, preact = _rows(rows, b16, offs, readable_bias(bias, options.dtype), options, preact=True)
        ctx.options, ctx.bias_shape = options, None if bias is None else bias.shape
        ctx.dtypes = a.dtype, gradient_dtype(b), None if bias is None else gradient_dtype(bias)
        ctx.save_for_backward(
            a16 if needs_b else None,
            b16 if needs_a else None,
            preact,
            b if needs_a and shadow is not None else None,  # a recorded backward must reach the weight itself
            offs,
            gather,
        )
        return (
            out,
            preact,
            a16 if needs_b and a16 is not a else None,
            b16 if needs_a and shadow is None and b16 is not b else None,
        )

    @staticmethod
    def backward(ctx, grad, grad_preact, grad_a16, grad_b16):
        a16, b16, preact, b, offs, gather = ctx.saved_tensors
        options, (a_dtype, b_dtype, bias_dtype) = ctx.options, ctx.dtypes
        needs_a, needs_b, needs_bias = ctx.needs_input_grad[:3]
        if b is not None and torch.is_grad_enabled():
            b16 = b.to(b16.dtype)
        dz = _preactivation_gradient(options, grad, grad_preact, preact)
        grad_a = grad_b = grad_bias = None
        if dz is not None:
            plain = Options(options.dtype, options.dtype, batch_invariant=options.batch_invariant)
            if needs_a:
                of_rows = a_dtype if gather is None else options.dtype
                back = plain._replace(out_dtype=of_rows, transposed=not options.transposed)
                grad_a = differentiable_rows(dz, b16, offs, None, None, back)
                if gather is not None:
                    grad_a = combine_rows(grad_a, gather, None, a_dtype)
            if needs_b:
                rows = _gathered(a16, gather)
                one, other = (dz.t(), rows) if options.transposed else (rows.t(), dz)
                grad_b = _accumulated(ctx, one, other, offs, options.batch_invariant)
                if grad_b is None:
                    grad_b = differentiable_sums(one, other, offs, plain._replace(out_dtype=b_dtype))
            if needs_bias:
                # A product with ones, in which only the terms of a group meet.
                wide = torch.float32 if dz.dtype in HALF_DTYPES else dz.dtype
                ones = dz.new_ones(1, dz.shape[0])
                grad_bias = differentiable_sums(ones, dz, offs, plain._replace(out_dtype=wide)).squeeze(1)
                grad_bias = cast(grad_bias.sum_to_size(ctx.bias_shape).view(ctx.bias_shape), bias_dtype)
        return (
            add_gradient(grad_a, grad_a16, a_dtype),
            add_gradient(grad_b, grad_b16, b_dtype),
            grad_bias,
            None,
            None,
            None,
            None,
        )


def _preactivation_gradient(options: Options, grad, grad_preact, preact) -> torch.Tensor | None:
    if preact is not None and preact.dtype not in KERNEL_DTYPES:  # fp64, whose derivatives are torch's
        dz = None if grad is None else activation_backward.DERIVATIVES[options.activation](grad, preact)
        return add_gradient(dz, grad_preact, preact.dtype)
    dz, _ = preactivation_gradient(options.activation, grad, grad_preact, preact)
    return None if dz is None else cast(dz, options.dtype)


def _accumulated(ctx, one, other, offs, batch_invariant: bool) -> torch.Tensor | None:
    """The sums form into the ``main_grad`` of b; ``None`` where it has none."""
    if one.dtype not in HALF_DTYPES:
        return None

    def add_to(main: torch.Tensor, fresh: bool) -> None:
        grouped_gemm_accumulate_op(main, one, other, offs, overwrite=fresh, batch_invariant=batch_invariant)

    return _main_grad.into(ctx, 1, add_to)


class _Sums(torch.autograd.Function):
    """The sums form. The 16-bit copies of a and b are outputs too."""

    @staticmethod
    def forward(ctx, a, b, offs, options):
        ctx.set_materialize_grads(False)
        needs_a, needs_b = ctx.needs_input_grad[:2]
        a16, b16 = cast(a, options.dtype), cast(b, options.dtype)
        ctx.options, ctx.dtypes = options, (a.dtype, b.dtype)
        ctx.save_for_backward(a16 if needs_b else None, b16 if needs_a else None, offs)
        out = _sums(a16, b16, offs, options)
        return out, a16 if needs_b and a16 is not a else None, b16 if needs_a and b16 is not b else None

    @staticmethod
    def backward(ctx, grad, grad_a16, grad_b16):
        a16, b16, offs = ctx.saved_tensors
        options, (a_dtype, b_dtype) = ctx.options, ctx.dtypes
        grad_a = grad_b = None
        if grad is not None:
            grad = cast(grad, options.dtype)
            plain = Options(options.dtype, a_dtype, batch_invariant=options.batch_invariant)
            if ctx.needs_input_grad[0]:
                grad_a = differentiable_rows(b16, grad, offs, None, None, plain._replace(transposed=True)).t()
            if ctx.needs_input_grad[1]:
                grad_b = differentiable_rows(a16.t(), grad, offs, None, None, plain._replace(out_dtype=b_dtype))
        return add_gradient(grad_a, grad_a16, a_dtype), add_gradient(grad_b, grad_b16, b_dtype), None, None
