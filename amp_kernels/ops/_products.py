"""What the differentiable products (linear, mlp, matmul, baddbmm) share: the dtype they work in, products for forwards and
for backwards that may themselves be recorded, and writing into ``out``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from torch.autograd import forward_ad

from .._checks.lists import FLOATS, names
from .._checks.operands import OPERAND_DTYPES, OUTPUT_DTYPES, check_no_internal_overlap, check_same_device, check_tensor
from .._dispatch import autocast, nodes
from .._raw.gemm import gemm_op


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


def plainly_16_bit(a: torch.Tensor, b: torch.Tensor, compute_dtype: torch.dtype | None) -> bool:
    """A quick yes to most calls: :func:`working_dtype` accepts the tensors and gives a 16-bit dtype."""
    if compute_dtype is None:
        right = a.dtype in OPERAND_DTYPES and b.dtype is a.dtype
    else:
        right = compute_dtype in OPERAND_DTYPES and a.dtype in OUTPUT_DTYPES and b.dtype in OUTPUT_DTYPES
    return right and a.device == b.device and a.layout is b.layout is torch.strided


def under_transform() -> bool:
    """Whether a torch.func transform or forward-mode AD is at work.

    The formulas of this package are those of reverse mode; what a raw op passes on to a transform is no tangent at all,
    and so a derivative of zero. torch's own operations serve every transform.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_dense(x: torch.Tensor) -> bool:
    """Whether ``x`` is a tensor as kernels know them. Nested, sparse and MKLDNN tensors are torch's own ops' business."""
    return x.layout is torch.strided and not x.is_nested


def sampler(device: str) -> Callable[..., torch.Tensor]:
    """``normal(*shape, dtype=..., grad=True)``: seeded tensors for the samples of an op."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype, grad: bool = True) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_(grad)

    return normal


def flat(x: torch.Tensor) -> torch.Tensor:
    """``[..., K]`` as ``[rows, K]``."""
    return x if x.ndim == 2 else x.flatten(0, -2) if x.ndim > 2 else x.unsqueeze(0)


def like(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``[rows, N]`` with the leading dimensions of ``x``."""
    return rows if x.ndim == 2 else reshaped(rows, (*x.shape[:-1], rows.shape[-1]))


def reshaped(fresh: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A contiguous tensor that nobody else holds, in another shape, for a result.

    Not by ``view``: autograd lets nobody write in place to a view that a Function returned. torch's own linear ends in this
    operation, too.
    """
    same = fresh.ndim == len(shape) and fresh.shape == shape
    return fresh if same else _unsafe_view(fresh, shape)


_unsafe_view = torch.ops.aten._unsafe_view.default


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x if x.dtype is dtype else x.to(dtype)


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


def added_product(
    input: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    alpha: float = 1.0,
    beta: float = 1.0,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """``beta * input + alpha * (a @ b)`` of 16-bit operands with two or three dimensions each. Below autograd.

    A row that is added to all others goes as a bias, which a kernel reads once for a tile. What else broadcasts is read
    element by element. With ``beta`` 0, ``input`` is not read.
    """
    options = gemm_options(a, None, alpha, batch_invariant)
    if beta == 0:
        return gemm_op(a, b, **options)[0]
    if input.dtype not in (a.dtype, torch.float32):
        input = input.float()
    columns = b.shape[-1]
    if input.numel() == columns and input.ndim and input.shape[-1] == columns:
        row = input.reshape(columns)
        return gemm_op(a, b, row if beta == 1 else beta * row.float(), **options)[0]
    return gemm_op(a, b, None, input.expand(*a.shape[:-1], columns), beta=beta, **options)[0]


def product(
    a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, alpha: float = 1.0, batch_invariant: bool = False
) -> torch.Tensor:
    """``alpha * (a @ b)`` of 16-bit operands with at least two dimensions each; the leading ones broadcast. Below
    autograd."""
    options = gemm_options(a, out_dtype, alpha, batch_invariant)
    if a.ndim == 2 and b.ndim == 2:
        return gemm_op(a, b, **options)[0]
    if b.ndim == 2:  # one matrix for all batches: the batches are rows of one GEMM
        return like(a, gemm_op(a.flatten(0, -2), b, **options)[0])
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])
    if len(batch) == 1:
        return gemm_op(a, b, **options)[0]
    out = gemm_op(a.flatten(0, -3), b.flatten(0, -3), **options)[0]
    return reshaped(out, (*batch, *out.shape[-2:]))


def differentiable_product(
    a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, alpha: float = 1.0, batch_invariant: bool = False
) -> torch.Tensor:
    """:func:`product` for use inside a backward, which may itself be recorded (``create_graph=True``).

    Not the op: its autocast rule would turn the forward's dtype into another one where backward is called inside
    autocast.
    """
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return autocast.apply(Matmul, a, b, a.dtype, out_dtype, alpha, batch_invariant)[0]
    return product(a, b, out_dtype, alpha, batch_invariant)


class Matmul(torch.autograd.Function):
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
        a16, b16 = cast(a, compute_dtype), cast(b, compute_dtype)
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


def _backward_of_node(grads, saved, needs_input_grad, dtypes, a_shape, compute_dtype, activation):
    """The backward of :class:`Matmul` for a node in C++, whose ``b`` is a matrix."""
    grad, _, grad_a16, grad_b16 = grads
    a16, b16, _, _ = saved
    ctx = SimpleNamespace(
        saved_tensors=(a16, b16),
        shapes=(a_shape, None if grad is None else torch.Size((a_shape[-1], grad.shape[-1]))),
        dtypes=(*dtypes, compute_dtype),
        needs_input_grad=needs_input_grad,
        options=(1.0, False),
    )
    return Matmul.backward(ctx, grad, grad_a16, grad_b16)[:2]


nodes.FORMULAS["matmul"] = _backward_of_node


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


def write_out(
    op: str,
    out: torch.Tensor,
    accepted: tuple[torch.dtype, ...],
    compute: Callable[[], torch.Tensor],
    **operands: torch.Tensor,
) -> torch.Tensor:
    """``out.copy_(compute())``, without autocast; whether the result may be written there is checked before it is computed."""
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
    with torch._C._DisableAutocast():
        result = compute()
    if result.shape != out.shape:
        raise ValueError(f"{op}: out has shape {list(out.shape)}; accepted: {list(result.shape)}")
    return out.copy_(result)


def _overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors surely share memory. Views with gaps may interleave without doing so, and pass, as in
    torch."""
    if torch.compiler.is_compiling() or x.is_meta or not x.numel() or not y.numel():
        return False
    if not (torch.ops.aten.is_non_overlapping_and_dense(x) and torch.ops.aten.is_non_overlapping_and_dense(y)):
        return False
    begin, end = (x.data_ptr(), x.data_ptr() + x.numel() * x.element_size())
    return begin < y.data_ptr() + y.numel() * y.element_size() and y.data_ptr() < end
