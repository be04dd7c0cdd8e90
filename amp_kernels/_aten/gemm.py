"""The GEMM ops over torch's products (cuBLAS): where no Tensor Core kernel of the package uses the GPU's own instructions.

A product goes out in the operands' dtype, with its bias or residual in the same call, so an activation reads a pre-activation that
is rounded to 16 bits, as torch's own layers do; an FP32 bias or residual is rounded to 16 bits, too. Results of another dtype are the
reference's, and so is what must not depend on the number of rows, unless an op of the package has kernels for it (:func:`products`).
``torch._addmm_activation`` has no place here: cuBLASLt does not say that its ReLU keeps NaN, which must reach the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import _functional as F
from .._dispatch import policy
from .._dispatch.library import Op, is_traced
from .._raw import activation_backward, activation_forward
from .._raw._product import product32
from .._raw.column_sums import column_sums
from .._raw.gemm import gemm_accumulate_op, gemm_dact_op, gemm_op


@gemm_op.bound
def gemm(call: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    if call.batch_invariant or call.out_dtype not in (None, call.a.dtype):
        return gemm_op.reference(*call)
    residual = None if call.beta == 0 else call.residual
    if call.bias is None and call.activation == "none" and not call.preact:
        return _product(call.a, call.b, residual, call.alpha, call.beta), None
    z = _product(call.a, call.b, call.bias, call.alpha)
    out = z if call.activation == "none" else _fusible(activation_forward.op, z)(z, activation=call.activation)
    if call.preact and out is z:
        out = z.clone()  # an op's results may not share memory
    if residual is not None:
        out.add_(residual, alpha=call.beta)
    return out, z if call.preact else None


@gemm_dact_op.bound
def gemm_dact(call: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    dtype = call.a.dtype
    half = call.preact.dtype == dtype and call.out_dtype in (None, dtype) and not call.batch_invariant
    between = dtype if half else torch.float32
    multiply, _ = products(call.batch_invariant)
    dz, sums = multiply(call.a, call.b, out_dtype=between, batch_invariant=call.batch_invariant)
    if call.activation != "none":
        derivative = _fusible(activation_backward.op, dz)
        dz, sums = derivative(dz, call.preact.to(between), activation=call.activation, bias_grad=call.bias_grad)
    elif call.bias_grad:
        sums = column_sums(dz.flatten(0, -2))
    return dz.to(call.out_dtype or dtype), sums


@gemm_accumulate_op.bound
def gemm_accumulate_(call: Any) -> None:
    if call.batch_invariant:
        return gemm_accumulate_op.reference(*call)
    product = product32(call.a, call.b, False)
    if call.beta == 0:
        torch.mul(product, call.alpha, out=call.c)
    else:
        (call.c if call.beta == 1 else call.c.mul_(call.beta)).add_(product, alpha=call.alpha)


def products(batch_invariant: bool = False) -> tuple[Callable, Callable]:
    """``gemm`` and ``gemm_accumulate_``, of which the package's other products are made here: those over torch's product, or where sums
    need an order that the package fixes the ops, for the kernels of whatever backend has one."""
    if policy.fixes_order({"batch_invariant": batch_invariant}):
        return gemm_op, gemm_accumulate_op
    return gemm, gemm_accumulate_


def _product(
    a: torch.Tensor, b: torch.Tensor, addend: torch.Tensor | None = None, alpha: float = 1.0, beta: float = 1.0
) -> torch.Tensor:
    """``alpha * (a @ b) + beta * addend`` in the operands' dtype, contiguous; ``addend`` broadcasts."""
    if addend is None and alpha == 1:
        return F.matmul(a, b)
    if addend is None:
        addend, beta = a.new_empty(1), 0.0
    add = F.addmm if a.ndim == 2 else F.baddbmm
    return add(addend.to(a.dtype), a, b, alpha=alpha, beta=beta)


def _fusible(op: Op, x: torch.Tensor) -> Callable:
    """The op, in a program that torch.compile makes by operations that the compiler fuses."""
    return op.reference if is_traced(x) else op
