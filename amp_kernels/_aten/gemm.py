"""The GEMM ops over torch's products (cuBLAS): where no Tensor Core kernel of the package uses the GPU's own instructions.

A product goes out in the operands' dtype, with its bias or residual in the same call, so an activation reads a pre-activation that
is rounded to 16 bits, as torch's own layers do; an FP32 bias or residual is rounded to 16 bits, too. Results of another dtype, and what
must not depend on the number of rows, are the reference's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .._checks.activations import check_activation
from .._dispatch.library import Op, is_traced
from .._raw import activation_backward, activation_forward
from .._raw._column_sums import column_sums
from .._raw._product import check_gemm, product32
from .._raw.gemm import check_accumulate, check_dact, gemm_accumulate_op, gemm_dact_op, gemm_op


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    activation: str = "none",
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    preact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if batch_invariant or out_dtype not in (None, a.dtype):
        options = {"alpha": alpha, "beta": beta, "activation": activation, "out_dtype": out_dtype}
        return gemm_op.reference(a, b, bias, residual, **options, batch_invariant=batch_invariant, preact=preact)
    check_gemm(a, b, bias, residual, activation, out_dtype)
    if beta == 0:
        residual = None
    if bias is None and activation == "none" and not preact:
        return _product(a, b, residual, alpha, beta), None
    z = _product(a, b, bias, alpha)
    out = z if activation == "none" else _fusible(activation_forward.op, z)(z, activation=activation)
    if preact and out is z:
        out = z.clone()  # an op's results may not share memory
    if residual is not None:
        out.add_(residual, alpha=beta)
    return out, z if preact else None


def gemm_dact(
    a: torch.Tensor,
    b: torch.Tensor,
    preact: torch.Tensor,
    *,
    activation: str,
    bias_grad: bool = False,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if batch_invariant or preact.dtype != a.dtype or out_dtype not in (None, a.dtype):
        options = {"activation": activation, "bias_grad": bias_grad, "out_dtype": out_dtype}
        return gemm_dact_op.reference(a, b, preact, **options, batch_invariant=batch_invariant)
    check_dact(a, b, preact, activation, out_dtype)
    dz = _product(a, b)
    if check_activation("gemm_dact", activation) != "none":
        dz = _fusible(activation_backward.op, dz)(dz, preact, activation=activation)
    return dz, column_sums(dz.flatten(0, -2)) if bias_grad else None


def gemm_accumulate_(
    c: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    batch_invariant: bool = False,
) -> None:
    if batch_invariant:
        gemm_accumulate_op.reference(c, a, b, alpha=alpha, beta=beta, batch_invariant=True)
        return
    check_accumulate(c, a, b)
    product = product32(a, b, False)
    if beta == 0:
        torch.mul(product, alpha, out=c)
    else:
        (c if beta == 1 else c.mul_(beta)).add_(product, alpha=alpha)


def _product(
    a: torch.Tensor, b: torch.Tensor, addend: torch.Tensor | None = None, alpha: float = 1.0, beta: float = 1.0
) -> torch.Tensor:
    """``alpha * (a @ b) + beta * addend`` in the operands' dtype, contiguous; ``addend`` broadcasts."""
    if addend is None and alpha == 1:
        return torch.matmul(a, b)
    if addend is None:
        addend, beta = a.new_empty(1), 0.0
    add = torch.addmm if a.ndim == 2 else torch.baddbmm
    return add(addend.to(a.dtype), a, b, alpha=alpha, beta=beta)


def _fusible(op: Op, x: torch.Tensor) -> Callable:
    """The op, in a program that torch.compile makes by operations that the compiler fuses."""
    return op.reference if is_traced(x) else op
