"""Products of the differentiable ops (linear, mlp, matmul, baddbmm): working dtype, products in forwards and in backwards that
may be recorded themselves, and ``out``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._checks.lists import FLOATS, HALF_DTYPES, names
from .._checks.operands import check_no_internal_overlap, check_same_device, check_tensor
from .._dispatch import autocast, nodes, policy
from .._dispatch.library import PLAIN
from .._raw import activation_forward
from .._raw._product import pairwise, preactivation
from .._raw.gemm import gemm_op
from ._autograd import add_gradient, needs_gradient
from ._tensors import cast, like, reshaped


def working_dtype(op: str, compute_dtype: torch.dtype | None, **tensors: torch.Tensor) -> torch.dtype:
    """The dtype in which an op on ``tensors`` works: that of the tensors, or ``compute_dtype`` if one is given.

    As in torch.autocast, float64 is not eligible for a cast: it keeps its dtype, and mixing it with others is an error.
    """
    if compute_dtype is not None and compute_dtype not in HALF_DTYPES:
        raise TypeError(f"{op}: compute_dtype is {compute_dtype}; accepted: None, {names(HALF_DTYPES)}")
    working = None
    for name, tensor in tensors.items():
        if type(tensor) not in PLAIN or tensor.layout is not torch.strided or tensor.dtype not in FLOATS:
            check_tensor(op, name, tensor, FLOATS)
        dtype = tensor.dtype
        if compute_dtype is not None and dtype is not torch.float64:
            dtype = compute_dtype
        if working is not None and dtype is not working:
            given = ", ".join(f"{name} is {names([t.dtype])}" for name, t in tensors.items())
            hint = "one dtype for all" if compute_dtype is None else "float64 for all or for none"
            raise TypeError(
                f"{op}: {given}; accepted: {hint} (torch.autocast casts float16, bfloat16 and float32 to one dtype)"
            )
        working = dtype
    if working not in HALF_DTYPES:
        check_backend(tensor)
    return working


def check_backend(tensor: torch.Tensor) -> None:
    """Raise if the user chose a backend that does not exist or cannot run here. fp32 and float64 products are torch's on every
    backend, so nothing else would look at the choice."""
    if type(tensor) in PLAIN and not torch.compiler.is_compiling() and policy.requested_backend() is not None:
        policy.select(gemm_op, tensor)


def gemm_options(
    a: torch.Tensor, out_dtype: torch.dtype | None = None, alpha: float = 1.0, batch_invariant: int = 0
) -> dict:
    """Keyword arguments of :func:`gemm` that differ from their defaults: each one passed costs a microsecond.

    ``batch_invariant`` is the number of blocks of K whose sums are added pairwise; 0 leaves the order free.
    """
    options: dict = {}
    if out_dtype is not None and out_dtype is not a.dtype:
        options["out_dtype"] = out_dtype
    if alpha != 1:
        options["alpha"] = alpha
    if batch_invariant:
        options["batch_invariant"] = batch_invariant
    return options


def check_blocks(op: str, blocks: int, **sizes: int) -> None:
    """Raise unless every sum over features, by the name of its size, can be cut into ``blocks`` equal blocks."""
    for name, size in sizes.items():
        if blocks > 1 and size % blocks:
            raise ValueError(
                f"{op}: {name} is {size}; accepted within batch_invariant(k_blocks={blocks}): a multiple of {blocks}"
            )


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    batch_invariant: int = 0,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The raw op ``gemm`` with its K in ``batch_invariant`` blocks: each is a product of its own with an fp32 result."""
    if batch_invariant == 0:
        return gemm_op(a, b, bias, residual, **options)
    if batch_invariant == 1:
        return gemm_op(a, b, bias, residual, batch_invariant=True, **options)
    size = a.shape[-1] // batch_invariant

    def leaf(i: int) -> torch.Tensor:
        k = slice(i * size, (i + 1) * size)
        return gemm_op(a[..., k], b[..., k, :], out_dtype=torch.float32, batch_invariant=True)[0]

    z = preactivation(pairwise(leaf, 0, batch_invariant), bias, options.get("alpha", 1.0))
    activation, beta = options.get("activation", "none"), options.get("beta", 1.0)
    out = z if activation == "none" else activation_forward.op(z, activation=activation)
    if residual is not None and beta != 0:
        out = out + beta * residual.float()
    dtype = options.get("out_dtype") or a.dtype
    return out.to(dtype), z.to(dtype) if options.get("preact") else None


def added_product(
    input: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    alpha: float = 1.0,
    beta: float = 1.0,
    batch_invariant: int = 0,
) -> torch.Tensor:
    """``beta * input + alpha * (a @ b)`` of 16-bit operands with two or three dimensions each. Below autograd.

    A row that is added to all others is passed as a bias, which a kernel reads once for a tile. Other broadcasts are read
    element by element. With ``beta`` 0, ``input`` is not read.
    """
    options = gemm_options(a, None, alpha, batch_invariant)
    if beta == 0:
        return gemm(a, b, **options)[0]
    if input.dtype not in (a.dtype, torch.float32):
        input = input.float()
    columns = b.shape[-1]
    if input.numel() == columns and input.ndim and input.shape[-1] == columns:
        row = input.reshape(columns)
        return gemm(a, b, row if beta == 1 else beta * row.float(), **options)[0]
    return gemm(a, b, None, input.expand(*a.shape[:-1], columns), beta=beta, **options)[0]


def product(
    a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, alpha: float = 1.0, batch_invariant: int = 0
) -> torch.Tensor:
    """``alpha * (a @ b)`` of 16-bit operands with at least two dimensions each; the leading ones broadcast. Below
    autograd."""
    options = gemm_options(a, out_dtype, alpha, batch_invariant)
    if a.ndim == 2 and b.ndim == 2:
        return gemm(a, b, **options)[0]
    if b.ndim == 2:  # one matrix for all batches: the batches are rows of one GEMM
        return like(a, gemm(a.flatten(0, -2), b, **options)[0])
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])
    if len(batch) == 1:
        return gemm(a, b, **options)[0]
    out = gemm(a.flatten(0, -3), b.flatten(0, -3), **options)[0]
    return reshaped(out, (*batch, *out.shape[-2:]))


def differentiable_product(
    a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, alpha: float = 1.0, batch_invariant: int = 0
) -> torch.Tensor:
    """:func:`product` for use inside a backward, which may itself be recorded (``create_graph=True``).

    Not the op: its autocast rule would turn the forward's dtype into another one where backward is called inside
    autocast.
    """
    if needs_gradient(a, b):
        return autocast.apply(Matmul, a, b, a.dtype, out_dtype, alpha, batch_invariant)[0]
    return product(a, b, out_dtype, alpha, batch_invariant)


class Matmul(torch.autograd.Function):
    """``alpha * (a @ b)`` for operands of at least two dimensions that autograd follows.

    The 16-bit copies that the forward makes of operands are outputs of this node. A backward that is itself recorded then sees that
    a copy depends on its operand, and the operand's fp32 memory need not be kept.
    """

    @staticmethod
    def forward(ctx, a, b, compute_dtype, out_dtype, alpha, batch_invariant):
        ctx.set_materialize_grads(False)
        ctx.options = alpha, batch_invariant
        ctx.shapes = a.shape, b.shape
        ctx.dtypes = a.dtype, b.dtype, compute_dtype
        needs_a, needs_b = ctx.needs_input_grad[:2]
        a16, b16 = cast(a, compute_dtype), cast(b, compute_dtype)
        ctx.save_for_backward(a16 if needs_b else None, b16 if needs_a else None)
        out = product(a16, b16, out_dtype, alpha, batch_invariant)
        return out, a16 if needs_b and a16 is not a else None, b16 if needs_a and b16 is not b else None

    @staticmethod
    def backward(ctx, *grads):
        gradients = _matmul_gradients(
            grads, ctx.saved_tensors, ctx.needs_input_grad, ctx.dtypes, ctx.shapes, *ctx.options
        )
        return *gradients, None, None, None, None


def _matmul_gradients(grads, saved, needs_input_grad, dtypes, shapes, alpha=1.0, batch_invariant=0):
    """The gradients of a and b. ``grads`` are those of the result and of the 16-bit copies of a and b, ``dtypes`` those of a and
    b and the compute dtype."""
    grad, grad_a16, grad_b16 = grads
    (a, b), (a_shape, b_shape), (a_dtype, b_dtype, compute_dtype) = saved, shapes, dtypes
    grad_a = grad_b = None
    if grad is not None:
        grad = grad.to(compute_dtype)
        if needs_input_grad[0]:
            grad_a = reduced_product(grad, b.mT, a_shape, a_dtype, alpha, batch_invariant)
        if needs_input_grad[1]:
            if len(b_shape) == 2 and grad.ndim > 2:
                a, grad = a.flatten(0, -2), grad.flatten(0, -2)
            # A sum over the rows of a, which k_blocks does not cut.
            grad_b = reduced_product(a.mT, grad, b_shape, b_dtype, alpha, min(batch_invariant, 1))
    return add_gradient(grad_a, grad_a16, a_dtype), add_gradient(grad_b, grad_b16, b_dtype)


def _node_gradients(grads, saved, needs_input_grad, dtype_names, a_shape, compute_dtype, activation):
    """:func:`_matmul_gradients` for a node in C++, whose ``b`` is a matrix and which knows dtypes by name."""
    dtypes = tuple(getattr(torch, name) for name in (*dtype_names, compute_dtype))
    grad, _, *grads16 = grads
    b_shape = None if grad is None else torch.Size((a_shape[-1], grad.shape[-1]))
    return _matmul_gradients((grad, *grads16), saved[:2], needs_input_grad, dtypes, (a_shape, b_shape))


nodes.FORMULAS["matmul"] = _node_gradients


def reduced_product(
    a: torch.Tensor,
    b: torch.Tensor,
    shape: torch.Size,
    dtype: torch.dtype,
    alpha: float = 1.0,
    batch_invariant: int = 0,
) -> torch.Tensor:
    """``alpha * (a @ b)`` summed over the batch dimensions that broadcasting had added to ``shape``, in fp32, then
    rounded to ``dtype``."""
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    if batch == shape[:-2]:
        return differentiable_product(a, b, dtype, alpha, batch_invariant)
    return differentiable_product(a, b, torch.float32, alpha, batch_invariant).sum_to_size(shape).to(dtype)


def write_out(
    op: str,
    out: torch.Tensor,
    accepted: tuple[torch.dtype, ...],
    compute: Callable[[], torch.Tensor],
    **operands: torch.Tensor,
) -> torch.Tensor:
    """``out.copy_(compute())`` without autocast; ``out`` is checked before anything is computed."""
    check_tensor(op, "out", out, accepted)
    check_same_device(op, **operands, out=out)
    check_no_internal_overlap(op, "out", out)
    if needs_gradient(*operands.values(), out):
        raise RuntimeError(
            f"{op}: out is given while an operand or out requires grad; accepted: torch.no_grad(), or no out"
        )
    for name, operand in operands.items():
        if _overlap(out, operand):
            raise ValueError(f"{op}: out shares memory with {name}; accepted: memory of its own")
    with torch._C._DisableAutocast():
        result = compute()
    if result.shape != out.shape:
        raise ValueError(f"{op}: out has shape {list(out.shape)}; accepted: {list(result.shape)}")
    return out.copy_(result)


def _overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """True if two tensors surely share memory. Views with gaps may interleave without sharing any; they pass, as in
    torch."""
    if torch.compiler.is_compiling() or x.is_meta or not x.numel() or not y.numel():
        return False
    if not (torch.ops.aten.is_non_overlapping_and_dense(x) and torch.ops.aten.is_non_overlapping_and_dense(y)):
        return False
    begin, end = (x.data_ptr(), x.data_ptr() + x.numel() * x.element_size())
    return begin < y.data_ptr() + y.numel() * y.element_size() and y.data_ptr() < end
