"""``matmul``: torch.matmul's shapes over the package's GEMM, differentiable to any order, with an autocast rule.

The op is composite: it decomposes into ``gemm`` above autograd and fake tensors, as torch's own matmul decomposes into
``mm`` and ``bmm``. fp32 and fp64 operands outside autocast take torch's own matmul.

Backward of ``out = a @ b``: ``da = grad @ b^T`` and ``db = a^T @ grad``, each with one rounding to the dtype of ``a``
and ``b``: an fp32 operand, cast to 16 bits by autocast, gets an fp32 gradient straight from the fp32 sums. Gradients of
operands that were broadcast are summed over the batch in fp32 before that rounding. torch.func transforms and
forward-mode AD take torch's own matmul in the working dtype.
"""

from __future__ import annotations

import torch

from .. import _functional as F
from .._checks.lists import HALF_DTYPES, KERNEL_DTYPES
from .._checks.operands import check_out_dtype, check_same_device, check_tensors
from .._dispatch import autocast, nodes
from .._dispatch.batch_invariant import k_blocks
from .._dispatch.library import define
from .._sharding.dtensor import is_dtensor
from ._autograd import needs_gradient, under_transform
from ._products import Matmul, check_blocks, product, working_dtype, write_out
from ._tensors import cast, reshaped


def _matmul(a, b, *, compute_dtype=None, out_dtype=None, batch_invariant=0):
    dtype = working_dtype("matmul", compute_dtype, a=a, b=b)
    _check_shapes(a, b)
    if dtype not in HALF_DTYPES:
        check_out_dtype("matmul", out_dtype, (dtype,))
        return F.matmul(a, b)
    check_out_dtype("matmul", out_dtype, KERNEL_DTYPES)
    out_dtype = out_dtype or dtype
    if under_transform():
        wide = dtype if out_dtype == dtype else torch.float32
        return F.matmul(a.to(dtype).to(wide), b.to(dtype).to(wide)).to(out_dtype)
    row = a.unsqueeze(0) if a.ndim == 1 else a
    column = b.unsqueeze(1) if b.ndim == 1 else b
    check_blocks("matmul", batch_invariant, K=a.shape[-1], **({"N": column.shape[-1]} if needs_gradient(a) else {}))
    if needs_gradient(a, b):
        out = autocast.apply(Matmul, row, column, dtype, out_dtype, 1.0, batch_invariant)[0]
    else:
        out = product(cast(row, dtype), cast(column, dtype), out_dtype, 1.0, batch_invariant)
    if a.ndim > 1 and b.ndim > 1:
        return out
    rows = out.shape[-2:-1] if a.ndim > 1 else ()
    columns = out.shape[-1:] if b.ndim > 1 else ()
    return reshaped(out, (*out.shape[:-2], *rows, *columns))


def _check_shapes(a: torch.Tensor, b: torch.Tensor) -> None:
    check_same_device("matmul", a=a, b=b)
    shapes = f"matmul: a has shape {list(a.shape)} and b {list(b.shape)}"
    if a.ndim == 0 or b.ndim == 0:
        raise ValueError(f"{shapes}; accepted: at least one dimension each")
    inner = b.shape[-2] if b.ndim > 1 else b.shape[0]
    if a.shape[-1] != inner:
        raise ValueError(f"{shapes}; a has {a.shape[-1]} columns but b has {inner} rows")
    if a.ndim <= 2 or b.ndim <= 2:
        return
    try:
        torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except RuntimeError as error:
        raise ValueError(f"{shapes}; the dimensions before the last two must broadcast") from error


op = define(
    "matmul(Tensor a, Tensor b, *, ScalarType? compute_dtype=None, ScalarType? out_dtype=None, "
    "int batch_invariant=0) -> Tensor",
    _matmul,
    composite=True,
)
autocast.lower_precision(op)


def matmul(
    a: torch.Tensor, b: torch.Tensor, *, out_dtype: torch.dtype | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Matrix product with torch.matmul's broadcasting. 16-bit operands accumulate in fp32 and the result is rounded
    once.

    Args:
        a: one to N dimensions: ``[K]``, ``[M, K]`` or ``[..., M, K]``, any strides.
        b: one to N dimensions: ``[K]``, ``[K, N]`` or ``[..., K, N]``, any strides. Leading dimensions broadcast.
        out_dtype: dtype of the result. For 16-bit operands fp16, bf16 or fp32; otherwise their own. Default: the
            operands' dtype.
        out: a tensor for the result, of its exact shape; its dtype takes the place of ``out_dtype``. As in torch,
            gradients are not recorded with ``out``, and autocast does not apply.

    dtypes: both operands fp16, or both bf16: this package's GEMM. Both fp32 or both fp64: torch's own matmul. Inside
    torch.autocast fp16, bf16 and fp32 operands are computed in autocast's dtype, and each gets its gradient in its own
    dtype, rounded once. The gradient that arrives is cast to the compute dtype, also where ``out_dtype`` is wider. DTensors take
    torch's own matmul.

    Raises:
        TypeError: a dtype or layout is not accepted; operands of different dtypes are not mixed.
        ValueError: shapes or devices do not fit, or ``out`` overlaps itself or an operand.
        RuntimeError: ``out`` was given while gradients of an operand are recorded.

    Examples:
        >>> a = torch.ones(1, 70_000, dtype=torch.float16)
        >>> ak.matmul(a, a.T, out_dtype=torch.float32)  # float16 itself ends at 65,504
        tensor([[70000.]])
    """
    if out is None and out_dtype is None and nodes.may_serve():
        result = nodes.matmul(a, b)
        if result is not None:
            return result
    check_tensors("matmul", a=a, b=b)
    invariant = k_blocks()
    if out is None:
        if out_dtype is None and (is_dtensor(a) or is_dtensor(b)):
            return F.matmul(a, b)
        if autocast.eager(a, b):
            dtype = autocast.dtype_on(a.device.type)
            return _matmul(a, b, compute_dtype=dtype, out_dtype=out_dtype, batch_invariant=invariant)
        return op(a, b, out_dtype=out_dtype, batch_invariant=invariant)
    dtype = working_dtype("matmul", None, a=a, b=b)
    if out_dtype not in (None, getattr(out, "dtype", None)):
        raise TypeError(
            f"matmul: out_dtype is {out_dtype} but out has dtype {out.dtype}; accepted: one of them, or the same"
        )
    accepted = KERNEL_DTYPES if dtype in HALF_DTYPES else (dtype,)
    return write_out(
        "matmul", out, accepted, lambda: op(a, b, out_dtype=out.dtype, batch_invariant=invariant), a=a, b=b
    )
