"""Arguments and reference of the ops that end in a GEMM: checks, shape of the result, product and epilogue in fp32."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from .. import _functional as F
from .._checks.activations import activated, activated_width, check_activation, check_gated_width
from .._checks.lists import names, within_float32
from .._checks.operands import HALF_DTYPES, KERNEL_DTYPES, check_out_dtype, check_tensor


def check_half_dtypes(op: str, a: torch.Tensor, b: torch.Tensor) -> None:
    check_tensor(op, "a", a, HALF_DTYPES)
    check_tensor(op, "b", b, HALF_DTYPES)
    if a.dtype != b.dtype:
        raise TypeError(f"{op}: a is {names([a.dtype])} and b is {names([b.dtype])}; accepted: the same dtype for both")


def check_operands(op: str, a: torch.Tensor, b: torch.Tensor) -> None:
    check_half_dtypes(op, a, b)
    if a.ndim not in (2, 3) or b.ndim != a.ndim:
        raise ValueError(
            f"{op}: a has shape {list(a.shape)} and b {list(b.shape)}; accepted: [M, K] and [K, N], or [B, M, K] and "
            "[B, K, N]"
        )
    if a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        raise ValueError(
            f"{op}: a has shape {list(a.shape)} and b {list(b.shape)}; the columns of a and the rows of b must be as "
            "many, and so must the batches"
        )


def check_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype | None,
) -> str:
    """Everything that ``gemm`` asks of its arguments; the name of the activation."""
    op = "gemm"
    check_operands(op, a, b)
    name = check_activation(op, activation)
    check_gated_width(op, "b", b, -1, name)
    if bias is not None:
        check_tensor(op, "bias", bias, (a.dtype, torch.float32))
        if bias.shape not in ((b.shape[-1],), (a.shape[-2], 1)):
            raise ValueError(
                f"{op}: bias has shape {list(bias.shape)}; accepted: [{b.shape[-1]}], one value per column of a @ b, "
                f"or [{a.shape[-2]}, 1], one per row"
            )
    if residual is not None:
        check_tensor(op, "residual", residual, (a.dtype, torch.float32))
        shape = output_shape(a, b, name)
        if tuple(residual.shape) != shape:
            raise ValueError(
                f"{op}: residual has shape {list(residual.shape)}; accepted: {list(shape)}, that of the result"
            )
    check_out_dtype(op, out_dtype, KERNEL_DTYPES)
    return name


def output_shape(a: torch.Tensor, b: torch.Tensor, activation: str) -> tuple[int, ...]:
    """Shape of ``activation(a @ b)``."""
    return (*a.shape[:-1], activated_width(activation, b.shape[-1]))


def product32(
    a: torch.Tensor, b: torch.Tensor, batch_invariant: bool, start: torch.Tensor | None = None
) -> torch.Tensor:
    """``a @ b`` of 16-bit operands in fp32, in torch's operations.

    torch chooses algorithms by shape, so ``batch_invariant`` takes elementwise operations only, one K after the other; then the
    sum begins with ``start``.
    """
    if batch_invariant:
        a, b = a.float(), b.float()
        acc = a.new_zeros(*a.shape[:-1], b.shape[-1]) if start is None else start.clone()
        for k in range(0 if a.is_meta else a.shape[-1]):
            acc += a[..., k : k + 1] * b[..., k : k + 1, :]
        return acc
    if a.is_cuda and a.numel() and b.numel():  # tensor cores with fp32 sums, which only CUDA's mm and bmm offer
        return (F.mm if a.ndim == 2 else F.bmm)(a, b, out_dtype=torch.float32)
    return F.matmul(a.float(), b.float())


def pairwise(leaf: Callable[[int], torch.Tensor], first: int, count: int) -> torch.Tensor:
    """The sum of ``leaf(first)`` to ``leaf(first + count - 1)``, a power of two, neighbours first: ``(0 + 1) + (2 + 3)``. At most
    log2(count) + 1 summands are alive."""
    if count == 1:
        return leaf(first)
    half = count // 2
    return pairwise(leaf, first, half) + pairwise(leaf, first + half, half)


def preactivation(product: torch.Tensor, bias: torch.Tensor | None, alpha: float) -> torch.Tensor:
    """``z = alpha * product + bias`` in fp32."""
    z = product if alpha == 1 else within_float32(alpha) * product
    return z if bias is None else z + bias.float()


def finished(
    z: torch.Tensor, residual: torch.Tensor | None, activation: str, beta: float, out_dtype: torch.dtype
) -> torch.Tensor:
    """``activation(z) + beta * residual`` of an fp32 ``z``, rounded once. With ``beta`` 0, ``residual`` is not read."""
    out = activated(z, activation)
    if residual is not None and beta != 0:
        out = torch.add(out, residual.float(), alpha=within_float32(beta))
    return out.to(out_dtype)


def product_flops(a_shape, b_shape, *args, **kwargs) -> int:
    """2 M N K, times the batch, as torch counts mm and bmm: an epilogue counts nothing, and the last group of a grouped product ends
    with the operand."""
    return 2 * math.prod(a_shape) * b_shape[-1]
