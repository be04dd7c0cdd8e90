"""The autograd nodes of ``linear`` and the gradients of its weights; of a result that is split without a concatenation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._checks.lists import HALF_DTYPES
from .._checks.operands import readable_bias
from .._dispatch import nodes
from .._raw import activation_backward, segmented_gemm
from .._raw.column_sums import column_sums
from . import _main_grad
from ._autograd import add_gradient
from ._products import differentiable_product, gemm, gemm_options
from ._tensors import cast, flat, like


class Linear(torch.autograd.Function):
    """The autograd node of ``linear``.

    The 16-bit copies of x and weight and the pre-activation are outputs too. So a recorded backward sees their dependence
    on the inputs, and no fp32 copy is kept for it.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, shadow, activation, compute_dtype, batch_invariant):
        ctx.set_materialize_grads(False)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        _main_grad.refuse_data_parallel(weight)
        x16 = cast(x, compute_dtype)
        weight16 = cast(weight, compute_dtype) if shadow is None else shadow
        options = gemm_options(x16, batch_invariant=batch_invariant)
        if activation != "none":
            options |= {"activation": activation, "preact": True}
        out, preact = gemm(flat(x16), weight16.t(), readable_bias(bias, compute_dtype), **options)
        if preact is not None:
            preact = like(x, preact)
        ctx.activation = activation
        ctx.batch_invariant = batch_invariant
        if batch_invariant:
            _main_grad.prepare(bias)
        ctx.x_shape = x.shape
        ctx.dtypes = x.dtype, gradient_dtype(weight), None if bias is None else gradient_dtype(bias)
        # The fp32 weight is kept with its shadow for a recorded backward, which must reach the weight itself.
        ctx.save_for_backward(
            x16 if needs_weight else None,
            weight16 if needs_x else None,
            preact,
            weight if needs_x and shadow is not None else None,
        )
        return (
            like(x, out),
            preact,
            x16 if needs_weight and x16 is not x else None,
            weight16 if needs_x and shadow is None and weight16 is not weight else None,
        )

    @staticmethod
    def backward(ctx, *grads):
        gradients = _gradients(
            grads,
            ctx.saved_tensors,
            ctx.needs_input_grad,
            ctx.dtypes,
            ctx.x_shape,
            ctx.activation,
            ctx.batch_invariant,
            ctx,
        )
        return *gradients, None, None, None, None


def _gradients(
    grads, saved, needs_input_grad, dtypes, x_shape, activation, batch_invariant=0, ctx=None
) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight and bias. ``grads`` and ``saved`` are in the order of :class:`Linear`, whose node is ``ctx``."""
    grad, grad_preact, grad_x16, grad_weight16 = grads
    x16, weight16, preact, weight = saved
    x_dtype, weight_dtype, bias_dtype = dtypes
    needs_x, needs_weight, needs_bias = needs_input_grad[:3]
    if weight is not None and torch.is_grad_enabled():
        weight16 = weight.to(weight16.dtype)
    sums_rows = needs_bias and batch_invariant == 0
    dz, sums = preactivation_gradient(activation, grad, grad_preact, preact, sums_rows)
    grad_x = grad_weight = grad_bias = None
    if dz is not None:
        dz = flat(dz)
        if needs_x:
            grad_x = differentiable_product(dz, weight16, x_dtype, 1.0, batch_invariant)
            grad_x = grad_x if len(x_shape) == 2 else grad_x.view(x_shape)
        if needs_weight:
            grad_weight = weight_gradient(ctx, 1, dz, flat(x16), weight_dtype, batch_invariant)
        if sums is not None:
            grad_bias = cast(sums, bias_dtype)
        elif needs_bias:
            grad_bias = bias_gradient(ctx, 2, dz, bias_dtype, batch_invariant)
    return add_gradient(grad_x, grad_x16, x_dtype), add_gradient(grad_weight, grad_weight16, weight_dtype), grad_bias


def _node_gradients(grads, saved, needs_input_grad, dtype_names, x_shape, compute_dtype, activation):
    """:func:`_gradients` for a node in C++, which has two or three inputs and knows dtypes by name."""
    dtypes = [getattr(torch, name) for name in dtype_names]
    needs_input_grad, dtypes = (*needs_input_grad, False)[:3], (*dtypes, None)[:3]
    return _gradients(grads, saved, needs_input_grad, dtypes, x_shape, activation)[: len(dtype_names)]


nodes.FORMULAS["linear"] = _node_gradients


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype in which a gradient is wanted: the tensor's own, unless it is a leaf that asks for another one."""
    wide = parameter.dtype not in HALF_DTYPES or not parameter.is_leaf
    return parameter.dtype if wide else parameter.grad_dtype or parameter.dtype


def weight_gradient(
    ctx: torch.autograd.function.FunctionCtx | None,
    position: int,
    dz: Tensor,
    x: Tensor,
    dtype: torch.dtype,
    batch_invariant: int,
) -> Tensor:
    """``dz^T @ x``, rounded once, or what autograd still has to add if it went to the weight's ``main_grad``; ``ctx`` and ``position``
    as in :func:`_main_grad.into`. A sum over rows is one chain, whatever the number of blocks of K."""
    chained = batch_invariant > 0
    rest = None if ctx is None else _main_grad.accumulate(ctx, position, dz, x, chained)
    return differentiable_product(dz.t(), x, dtype, 1.0, int(chained)) if rest is None else rest


def bias_gradient(
    ctx: torch.autograd.function.FunctionCtx | None, position: int, dz: Tensor, dtype: torch.dtype, batch_invariant: int
) -> Tensor:
    """The sum of the rows of ``dz``; like :func:`weight_gradient`."""
    if ctx is None or batch_invariant == 0 or torch.is_grad_enabled():
        return cast(column_sums(dz), dtype)
    total = _main_grad.Total(ctx, position, dz.shape[1:], dz.device)
    total.add_rows(dz)
    return total.gradient(dtype)


def preactivation_gradient(
    activation: str, grad: Tensor | None, grad_preact: Tensor | None, preact: Tensor | None, with_sums: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """The gradient of ``z``, and the sums of its rows if they are wanted and come from the same pass; ``grad_preact`` is what a
    differentiated backward sent to ``z`` directly."""
    if grad is None or activation == "none":
        return grad if grad is not None else grad_preact, None
    if torch.is_grad_enabled():
        dz, sums = activation_backward.differentiable(grad, preact, activation), None
    else:
        with_sums = with_sums and grad_preact is None
        dz, sums = activation_backward.op(grad, preact, activation=activation, bias_grad=with_sums)
    return add_gradient(dz, grad_preact, dz.dtype), sums


# ---- a result that is split


class LinearSplit(torch.autograd.Function):
    """The node of a :class:`Linear` whose result is split. Its outputs are the pieces and the 16-bit copies.

    The pieces share one memory. To autograd they are no views, which it would not let a user write to."""

    @staticmethod
    def forward(ctx, x, weight, bias, shadow, split, compute_dtype, batch_invariant):
        out, _, x16, weight16 = Linear.forward(ctx, x, weight, bias, shadow, "none", compute_dtype, batch_invariant)
        ctx.split = split
        return *(piece.detach() for piece in out.split(split, -1)), x16, weight16

    @staticmethod
    def backward(ctx, *grads):
        *pieces, grad_x16, grad_weight16 = grads
        dz = _rows_of(pieces, ctx.split)
        pieces_alone = grad_x16 is None and grad_weight16 is None
        if pieces_alone and not torch.is_grad_enabled() and ctx.batch_invariant == 0 and segmented_gemm.reads(dz):
            return *_gradients_of_pieces(dz, ctx), None, None, None, None
        whole = torch.cat(dz, 1) if dz else None
        return Linear.backward(ctx, whole, None, grad_x16, grad_weight16)


def _rows_of(pieces: Sequence[Tensor | None], sizes: Sequence[int]) -> list[Tensor]:
    """The gradients as matrices, zeros where none arrived; none at all if none arrived."""
    some = next((piece for piece in pieces if piece is not None), None)
    if some is None:
        return []
    return [
        flat(some.new_zeros(*some.shape[:-1], size) if piece is None else piece)
        for piece, size in zip(pieces, sizes, strict=True)
    ]


def _gradients_of_pieces(dz: list[Tensor], ctx: torch.autograd.function.FunctionCtx) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight and bias; ``ctx`` is the node."""
    x16, weight16 = ctx.saved_tensors[:2]
    x_dtype, weight_dtype, bias_dtype = ctx.dtypes
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    grad_x = grad_weight = grad_bias = None
    if needs_x:
        grad_x = segmented_gemm.op(dz, weight16, dim=1, out_dtype=x_dtype)
        grad_x = grad_x if len(ctx.x_shape) == 2 else grad_x.view(ctx.x_shape)
    if needs_weight:
        x16, turned = flat(x16), [piece.t() for piece in dz]

        def add_to(main: Tensor, fresh: bool) -> None:
            segmented_gemm.accumulate_op(main, turned, x16, overwrite=fresh)

        grad_weight = _main_grad.into(ctx, 1, add_to)
        if grad_weight is None:
            grad_weight = segmented_gemm.op(turned, x16, dim=0, out_dtype=weight_dtype)
    if needs_bias:
        grad_bias = cast(torch.cat([column_sums(piece) for piece in dz]), bias_dtype)
    return grad_x, grad_weight, grad_bias
