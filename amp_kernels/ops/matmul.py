"""``matmul``: torch.matmul's shapes over the package's GEMM, differentiable to any order, with an autocast rule.

The op is composite: it decomposes into ``gemm`` above autograd and fake tensors, as torch's own matmul decomposes into
``mm`` and ``bmm``. fp32 and fp64 operands outside autocast take torch's own matmul.

Backward of ``out = a @ b``: ``da = grad @ b^T`` and ``db = a^T @ grad``, each with one rounding to the dtype of ``a``
and ``b``: an fp32 operand, cast to 16 bits by autocast, gets an fp32 gradient straight from the fp32 sums. Gradients of
operands that were broadcast are summed over the batch in fp32 before that rounding. torch.func transforms and
forward-mode AD take torch's own matmul in the working dtype.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.autograd import forward_ad

from .._dispatch import autocast
from .._dispatch.batch_invariant import is_batch_invariant
from .._dispatch.library import Sample, define
from ._gemm import (
    OPERAND_DTYPES,
    OUTPUT_DTYPES,
    check_no_internal_overlap,
    check_out_dtype,
    check_same_device,
    check_tensor,
)
from ._lists import FLOATS, names
from .gemm import GEMM


def working_dtype(op: str, compute_dtype: torch.dtype | None, **tensors: torch.Tensor) -> torch.dtype:
    """The dtype in which an op on ``tensors`` works: that of the tensors, or ``compute_dtype`` if one is given.

    As in torch.autocast, float64 is not eligible for a cast: it keeps its dtype, and mixing it with others is an error.
    """
    for name, tensor in tensors.items():
        check_tensor(op, name, tensor, FLOATS)
    check_same_device(op, **tensors)
    if compute_dtype is not None and compute_dtype not in OPERAND_DTYPES:
        raise TypeError(f"{op}: compute_dtype is {compute_dtype}; accepted: None, {names(OPERAND_DTYPES)}")
    dtypes = {
        name: t.dtype if compute_dtype is None or t.dtype == torch.float64 else compute_dtype
        for name, t in tensors.items()
    }
    if len(set(dtypes.values())) > 1:
        given = ", ".join(f"{name} is {names([t.dtype])}" for name, t in tensors.items())
        hint = "one dtype for all" if compute_dtype is None else "float64 for all or for none"
        raise TypeError(
            f"{op}: {given}; accepted: {hint} (torch.autocast casts float16, bfloat16 and float32 to one dtype)"
        )
    return next(iter(dtypes.values()))


def under_transform() -> bool:
    """Whether a torch.func transform or forward-mode AD is at work.

    The formulas of this package are those of reverse mode; what a raw op passes on to a transform is no tangent at all,
    and so a derivative of zero. torch's own operations serve every transform.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def gemm_options(
    a: torch.Tensor, out_dtype: torch.dtype | None = None, alpha: float = 1.0, batch_invariant: bool = False
) -> dict:
    """Keyword arguments of a GEMM that differ from their defaults: each one passed costs a microsecond."""
    options: dict = {}
    if out_dtype is not None and out_dtype is not a.dtype:
        options["out_dtype"] = out_dtype
    if alpha != 1:
        options["alpha"] = alpha
    if batch_invariant:
        options["batch_invariant"] = True
    return options


def product(
    a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, alpha: float = 1.0, batch_invariant: bool = False
) -> torch.Tensor:
    """``alpha * (a @ b)`` of 16-bit operands with at least two dimensions each; the leading ones broadcast. Below
    autograd."""
    options = gemm_options(a, out_dtype, alpha, batch_invariant)
    if a.ndim == 2 and b.ndim == 2:
        return GEMM.below_autograd(a, b, **options)
    if b.ndim == 2:  # one matrix for all batches: the batches are rows of one GEMM
        return GEMM.below_autograd(a.flatten(0, -2), b, **options).unflatten(0, a.shape[:-1])
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])
    if len(batch) == 1:
        return GEMM.below_autograd(a, b, **options)
    return GEMM.below_autograd(a.flatten(0, -3), b.flatten(0, -3), **options).unflatten(0, batch)


def differentiable_product(
    a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, alpha: float = 1.0, batch_invariant: bool = False
) -> torch.Tensor:
    """:func:`product` for use inside a backward, which may itself be recorded (``create_graph=True``).

    Not the op: its autocast rule would turn the forward's dtype into another one where backward is called inside
    autocast.
    """
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return _Matmul.apply(a, b, a.dtype, out_dtype, alpha, batch_invariant)[0]
    return product(a, b, out_dtype, alpha, batch_invariant)


class _Matmul(torch.autograd.Function):
    """``alpha * (a @ b)`` for operands of at least two dimensions that autograd follows.

    A 16-bit copy that the forward makes of an operand is returned beside the result. It is thereby an output of this
    node, so a backward that is itself recorded sees that the copy depends on the operand, and the operand's fp32 memory
    need not be kept.
    """

    @staticmethod
    def forward(ctx, a, b, compute_dtype, out_dtype, alpha, batch_invariant):
        ctx.set_materialize_grads(False)
        ctx.options = alpha, batch_invariant
        ctx.shapes = a.shape, b.shape
        ctx.dtypes = a.dtype, b.dtype, compute_dtype
        needs_a, needs_b = ctx.needs_input_grad[:2]
        a16, b16 = a.to(compute_dtype), b.to(compute_dtype)
        ctx.save_for_backward(a16 if needs_b else None, b16 if needs_a else None)
        out = product(a16, b16, out_dtype, alpha, batch_invariant)
        return out, a16 if needs_b and a16 is not a else None, b16 if needs_a and b16 is not b else None

    @staticmethod
    def backward(ctx, grad, grad_a16, grad_b16):
        a, b = ctx.saved_tensors
        (a_shape, b_shape), (a_dtype, b_dtype, compute_dtype) = ctx.shapes, ctx.dtypes
        grad_a = grad_b = None
        if grad is not None:
            grad = grad.to(compute_dtype)
            if ctx.needs_input_grad[0]:
                grad_a = reduced_product(grad, b.mT, a_shape, a_dtype, *ctx.options)
            if ctx.needs_input_grad[1]:
                if len(b_shape) == 2 and grad.ndim > 2:
                    a, grad = a.flatten(0, -2), grad.flatten(0, -2)
                grad_b = reduced_product(a.mT, grad, b_shape, b_dtype, *ctx.options)
        return add_gradient(grad_a, grad_a16, a_dtype), add_gradient(grad_b, grad_b16, b_dtype), None, None, None, None


def add_gradient(total: torch.Tensor | None, copy: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Adds what reached an operand through its 16-bit ``copy``: nothing, unless a backward was differentiated."""
    if copy is None:
        return total
    return copy.to(dtype) if total is None else total + copy.to(dtype)


def reduced_product(
    a: torch.Tensor,
    b: torch.Tensor,
    shape: torch.Size,
    dtype: torch.dtype,
    alpha: float = 1.0,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """``alpha * (a @ b)`` summed over the batch dimensions that broadcasting had added to ``shape``, in fp32, then
    rounded to ``dtype``."""
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    if batch == shape[:-2]:
        return differentiable_product(a, b, dtype, alpha, batch_invariant)
    return differentiable_product(a, b, torch.float32, alpha, batch_invariant).sum_to_size(shape).to(dtype)


def _matmul(a, b, *, compute_dtype=None, out_dtype=None, batch_invariant=False):
    dtype = working_dtype("matmul", compute_dtype, a=a, b=b)
    _check_shapes(a, b)
    if dtype not in OPERAND_DTYPES:
        check_out_dtype("matmul", out_dtype, (dtype,))
        return torch.matmul(a, b)
    check_out_dtype("matmul", out_dtype, OUTPUT_DTYPES)
    out_dtype = out_dtype or dtype
    if under_transform():
        wide = dtype if out_dtype == dtype else torch.float32
        return torch.matmul(a.to(dtype).to(wide), b.to(dtype).to(wide)).to(out_dtype)
    row = a.unsqueeze(0) if a.ndim == 1 else a
    column = b.unsqueeze(1) if b.ndim == 1 else b
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        out = _Matmul.apply(row, column, dtype, out_dtype, 1.0, batch_invariant)[0]
    else:
        out = product(row.to(dtype), column.to(dtype), out_dtype, 1.0, batch_invariant)
    out = out.squeeze(-2) if a.ndim == 1 else out
    return out.squeeze(-1) if b.ndim == 1 else out


def _check_shapes(a: torch.Tensor, b: torch.Tensor) -> None:
    shapes = f"matmul: a has shape {list(a.shape)} and b {list(b.shape)}"
    if a.ndim == 0 or b.ndim == 0:
        raise ValueError(f"{shapes}; accepted: at least one dimension each")
    inner = b.shape[-2] if b.ndim > 1 else b.shape[0]
    if a.shape[-1] != inner:
        raise ValueError(f"{shapes}; a has {a.shape[-1]} columns but b has {inner} rows")
    try:
        torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except RuntimeError as error:
        raise ValueError(f"{shapes}; the dimensions before the last two must broadcast") from error


def _samples(device: str) -> Iterator[Sample]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype, grad: bool = False) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_(grad)

    for dtype in FLOATS:
        yield (normal(3, 5, dtype=dtype), normal(5, 4, dtype=dtype)), {}
        yield (normal(2, 3, 5, dtype=dtype, grad=True), normal(5, 4, dtype=dtype, grad=True)), {}
    for dtype in OPERAND_DTYPES:
        yield (normal(5, dtype=dtype), normal(5, dtype=dtype)), {"out_dtype": torch.float32}
        yield (
            (normal(2, 1, 3, 5, dtype=dtype, grad=True), normal(4, 5, 2, dtype=dtype, grad=True)),
            {"out_dtype": torch.float32},
        )
        yield (normal(3, 5, dtype=torch.float32, grad=True), normal(2, 5, 4, dtype=dtype)), {"compute_dtype": dtype}


MATMUL = define(
    "matmul(Tensor a, Tensor b, *, ScalarType? compute_dtype=None, ScalarType? out_dtype=None, "
    "bool batch_invariant=False) -> Tensor",
    _matmul,
    samples=_samples,
    differentiable=True,
    composite=True,
)
autocast.lower_precision(MATMUL)


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
    dtype, rounded once. The gradient that arrives is cast to the compute dtype, also where ``out_dtype`` is wider.

    Raises:
        TypeError: a dtype or layout is not accepted; operands of different dtypes are not mixed.
        ValueError: shapes or devices do not fit, or ``out`` overlaps itself or an operand.
        RuntimeError: ``out`` was given while gradients of an operand are recorded.
    """
    invariant = is_batch_invariant()
    if out is None:
        if autocast.eager(a, b):
            dtype = autocast.dtype_on(a.device.type)
            return _matmul(a, b, compute_dtype=dtype, out_dtype=out_dtype, batch_invariant=invariant)
        return MATMUL(a, b, out_dtype=out_dtype, batch_invariant=invariant)
    dtype = working_dtype("matmul", None, a=a, b=b)
    with torch._C._DisableAutocast():
        if out_dtype not in (None, getattr(out, "dtype", None)):
            raise TypeError(
                f"matmul: out_dtype is {out_dtype} but out has dtype {out.dtype}; accepted: one of them, or the same"
            )
        check_out("matmul", out, OUTPUT_DTYPES if dtype in OPERAND_DTYPES else (dtype,), a=a, b=b)
        result = MATMUL(a, b, out_dtype=out.dtype, batch_invariant=invariant)
        if result.shape != out.shape:
            raise ValueError(f"matmul: out has shape {list(out.shape)}; accepted: {list(result.shape)}")
        return out.copy_(result)


def check_out(op: str, out, accepted: tuple[torch.dtype, ...], **operands: torch.Tensor) -> None:
    """Whether a result may be written to ``out``, before anything is computed."""
    check_tensor(op, "out", out, accepted)
    check_same_device(op, **operands, out=out)
    check_no_internal_overlap(op, "out", out)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*operands.values(), out)):
        raise RuntimeError(
            f"{op}: out is given while an operand or out requires grad; accepted: torch.no_grad(), or no out"
        )
    for name, operand in operands.items():
        if _overlap(out, operand):
            raise ValueError(f"{op}: out shares memory with {name}; accepted: memory of its own")


def _overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors surely share memory. Views with gaps may interleave without doing so, and pass, as in
    torch."""
    if torch.compiler.is_compiling() or x.is_meta or not x.numel() or not y.numel():
        return False
    if not (torch.ops.aten.is_non_overlapping_and_dense(x) and torch.ops.aten.is_non_overlapping_and_dense(y)):
        return False
    begin, end = (x.data_ptr(), x.data_ptr() + x.numel() * x.element_size())
    return begin < y.data_ptr() + y.numel() * y.element_size() and y.data_ptr() < end
