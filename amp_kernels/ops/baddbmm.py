"""``baddbmm`` and ``addmm``: ``beta * input + alpha * (a @ b)``, differentiable to any order, with an autocast rule.

One composite op serves both; it decomposes into ``gemm`` with ``input`` as its residual, or as its bias where it is one
row: it is added to the fp32 sums before the one rounding. fp32 and fp64 outside autocast, torch.func transforms and
forward-mode AD take torch's own operations. Backward, with sums in fp32 and one rounding each: ``dinput = beta * grad``,
summed where it was broadcast; ``da = alpha * grad @ b^T``; ``db = alpha * a^T @ grad``.
"""

from __future__ import annotations

import torch

from .. import _functional as F
from .._checks.lists import HALF_DTYPES, KERNEL_DTYPES
from .._checks.operands import check_same_device, check_tensor, check_tensors
from .._checks.types import type_name
from .._dispatch import autocast
from .._dispatch.batch_invariant import k_blocks
from .._dispatch.library import define
from ._autograd import add_gradient, needs_gradient, under_transform
from ._products import added_product, check_blocks, reduced_product, working_dtype, write_out
from ._tensors import cast

#: The factors by their names in torch.
_FACTORS = {"baddbmm": ("batch1", "batch2"), "addmm": ("mat1", "mat2")}


class _Baddbmm(torch.autograd.Function):
    """The autograd node. The 16-bit copies of a and b are returned with the result, as in ``matmul``."""

    @staticmethod
    def forward(ctx, input, a, b, alpha, beta, dtype, batch_invariant):
        ctx.set_materialize_grads(False)
        _, needs_a, needs_b = ctx.needs_input_grad[:3]
        a16, b16 = cast(a, dtype), cast(b, dtype)
        ctx.options = alpha, beta, batch_invariant
        ctx.dtypes = input.dtype, a.dtype, b.dtype
        ctx.input_shape = input.shape
        ctx.save_for_backward(a16 if needs_b else None, b16 if needs_a else None)
        out = added_product(input, a16, b16, alpha, beta, batch_invariant)
        return out, a16 if needs_b and a16 is not a else None, b16 if needs_a and b16 is not b else None

    @staticmethod
    def backward(ctx, grad, grad_a16, grad_b16):
        a, b = ctx.saved_tensors
        alpha, beta, batch_invariant = ctx.options
        input_dtype, a_dtype, b_dtype = ctx.dtypes
        grad_input = grad_a = grad_b = None
        if grad is not None:
            needs_input, needs_a, needs_b = ctx.needs_input_grad[:3]
            if needs_input:
                grad_input = (beta * grad.float()).sum_to_size(ctx.input_shape).to(input_dtype)
            if needs_a:
                shape = (*grad.shape[:-1], b.shape[-2])
                grad_a = reduced_product(grad, b.mT, shape, a_dtype, alpha, batch_invariant)
            if needs_b:
                shape = (*a.shape[:-2], a.shape[-1], grad.shape[-1])
                grad_b = reduced_product(a.mT, grad, shape, b_dtype, alpha, min(batch_invariant, 1))
        grad_a, grad_b = add_gradient(grad_a, grad_a16, a_dtype), add_gradient(grad_b, grad_b16, b_dtype)
        return grad_input, grad_a, grad_b, None, None, None, None


def _baddbmm(input, a, b, *, beta=1.0, alpha=1.0, compute_dtype=None, batch_invariant=0):
    name = "baddbmm" if a.ndim == 3 else "addmm"
    dtype = working_dtype(name, compute_dtype, **dict(zip(_FACTORS[name], (a, b), strict=True)))
    _check(name, input, a, b, dtype, compute_dtype is not None)
    if dtype not in HALF_DTYPES or under_transform():
        add = F.addmm if a.ndim == 2 else F.baddbmm
        return add(input.to(dtype), a.to(dtype), b.to(dtype), beta=beta, alpha=alpha)
    check_blocks(name, batch_invariant, K=a.shape[-1], **({"N": b.shape[-1]} if needs_gradient(a) else {}))
    if needs_gradient(input, a, b):
        return autocast.apply(_Baddbmm, input, a, b, alpha, beta, dtype, batch_invariant)[0]
    return added_product(input, cast(a, dtype), cast(b, dtype), alpha, beta, batch_invariant)


def _check(name: str, input, a, b, dtype: torch.dtype, autocast: bool) -> None:
    narrow, (one, other) = dtype in HALF_DTYPES, _FACTORS[name]
    wide = KERNEL_DTYPES if autocast else (dtype, torch.float32)
    check_tensor(name, "input", input, wide if narrow else (dtype,))
    if a.ndim not in (2, 3) or b.ndim != a.ndim or a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        raise ValueError(
            f"{name}: {one} has shape {list(a.shape)} and {other} {list(b.shape)}; accepted: "
            + ("[M, K] and [K, N]" if name == "addmm" else "[B, M, K] and [B, K, N]")
        )
    shape = [*a.shape[:-1], b.shape[-1]]
    try:
        fits = list(torch.broadcast_shapes(input.shape, shape)) == shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"{name}: input has shape {list(input.shape)}; accepted: one that broadcasts to {shape}")
    check_same_device(name, **{"input": input, one: a, other: b})


op = define(
    "baddbmm(Tensor input, Tensor a, Tensor b, *, float beta=1.0, float alpha=1.0, ScalarType? compute_dtype=None, "
    "int batch_invariant=0) -> Tensor",
    _baddbmm,
    composite=True,
)
autocast.lower_precision(op)


def _call(name: str, input, a, b, beta: float, alpha: float, out: torch.Tensor | None) -> torch.Tensor:
    ndim, accepted = (3, "[B, M, K]") if name == "baddbmm" else (2, "[M, K]")
    one, other = _FACTORS[name]
    check_tensors(name, **{"input": input, one: a, other: b})
    if a.ndim != ndim:
        raise ValueError(f"{name}: {one} has shape {list(a.shape)}; accepted: {accepted}")
    for factor, value in (("beta", beta), ("alpha", alpha)):
        if isinstance(value, str) or value is None:
            raise TypeError(f"{name}: {factor} is {value!r}, of type {type_name(value)}; accepted: a number")
    options = {"beta": float(beta), "alpha": float(alpha), "batch_invariant": k_blocks()}
    if out is not None:
        factors = {one: a, other: b}
        return write_out(
            name, out, (working_dtype(name, None, **factors),), lambda: op(input, a, b, **options), **factors
        )
    if autocast.eager(input, a, b):
        return _baddbmm(input, a, b, compute_dtype=autocast.dtype_on(a.device.type), **options)
    return op(input, a, b, **options)


def baddbmm(
    input: torch.Tensor,
    batch1: torch.Tensor,
    batch2: torch.Tensor,
    *,
    beta: float = 1.0,
    alpha: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``beta * input + alpha * (batch1 @ batch2)``: torch.baddbmm with fp32 sums that are rounded once.

    Args:
        input: a tensor that broadcasts to ``[B, M, N]``. For 16-bit work in the working dtype or fp32, else in the dtype
            of the operands; inside torch.autocast fp16, bf16 or fp32.
        batch1: ``[B, M, K]``, any strides.
        batch2: ``[B, K, N]``, any strides.
        beta: factor of ``input``. With 0, ``input`` is not read: NaN and inf in it do not spread.
        alpha: factor of the product.
        out: a tensor for the result, of its exact shape and dtype; it may be ``input``. As in torch, gradients are not
            recorded with ``out``, and autocast does not apply.

    Returns:
        ``[B, M, N]`` in the working dtype: that of ``batch1`` and ``batch2``, or autocast's. fp16 and bf16 take this
        package's GEMM, fp32 and fp64 torch's own. Every argument gets its gradient in its own dtype, rounded once.

    Raises:
        TypeError: a dtype or layout is not accepted; outside autocast dtypes are not mixed.
        ValueError: shapes or devices do not fit, or ``out`` overlaps itself or an operand.
        RuntimeError: ``out`` was given while gradients of an operand are recorded.

    Examples:
        >>> query = key = torch.ones(1, 2, 16, dtype=torch.bfloat16)
        >>> mask = torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])
        >>> ak.baddbmm(mask, query, key.mT, alpha=0.25)
        tensor([[[4., -inf],
                 [4., 4.]]], dtype=torch.bfloat16)
    """
    return _call("baddbmm", input, batch1, batch2, beta, alpha, out)


def addmm(
    input: torch.Tensor,
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    *,
    beta: float = 1.0,
    alpha: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``beta * input + alpha * (mat1 @ mat2)``: torch.addmm with fp32 sums that are rounded once.

    ``mat1`` is ``[M, K]``, ``mat2`` ``[K, N]``, ``input`` broadcasts to ``[M, N]``; all else is as in :func:`baddbmm`.

    Examples:
        >>> a, b = torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(8, 3, dtype=torch.bfloat16)
        >>> bias = torch.tensor([1.0, 2.0, 3.0])  # float32 with 16-bit operands
        >>> ak.addmm(bias, a, b)
        tensor([[ 9., 10., 11.],
                [ 9., 10., 11.]], dtype=torch.bfloat16)
    """
    return _call("addmm", input, mat1, mat2, beta, alpha, out)
