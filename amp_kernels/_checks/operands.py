"""What the ops that end in a GEMM share: activations, argument checks, and the reference's fp32 product."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from .lists import names


def halves(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gates and values of a gated activation: the first and the second half of the columns."""
    width = z.shape[-1] // 2
    return z[..., :width], z[..., width:]


def _swiglu(z: torch.Tensor) -> torch.Tensor:
    gate, up = halves(z)
    return F.silu(gate) * up


#: The activations of the epilogue, as they are named in the schemas, in torch's own definitions.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda z: z,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
    "swiglu": _swiglu,
}

#: Those whose result has half the columns of ``z``: ``silu(z[..., :F]) * z[..., F:]``.
GATED = ("swiglu",)

OPERAND_DTYPES = (torch.float16, torch.bfloat16)
OUTPUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def activated_width(activation: str, columns: int) -> int:
    """Columns of ``activation(z)`` for a ``z`` of ``columns``."""
    return columns // 2 if activation in GATED else columns


# ---- argument checks


def check_activation(op: str, activation: str | None) -> str:
    """The schema's name of ``activation``; ``None`` means ``"none"``."""
    name = "none" if activation is None else activation
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"{op}: activation is {activation!r}; accepted: None, {', '.join(map(repr, ACTIVATIONS))}")
    return name


def check_gated_width(op: str, name: str, tensor: torch.Tensor, dim: int, activation: str) -> None:
    if activation in GATED and tensor.shape[dim] % 2:
        raise ValueError(
            f"{op}: {name} has shape {list(tensor.shape)}; accepted with activation={activation!r}: gates and values "
            f"in equal numbers, so an even size {tensor.shape[dim] + 1} or {tensor.shape[dim] - 1}"
        )


def check_tensor(op: str, name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{op}: {name} is a {type(tensor).__name__}; accepted: a tensor")
    if tensor.layout != torch.strided:
        raise TypeError(f"{op}: {name} has layout {tensor.layout}; accepted: torch.strided")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{op}: {name} has dtype {names([tensor.dtype])}; accepted: {names(dtypes)}")


def check_same_device(op: str, **tensors: torch.Tensor | None) -> None:
    (first, device), *rest = ((name, t.device) for name, t in tensors.items() if t is not None)
    for name, other in rest:
        if other != device:
            raise ValueError(f"{op}: {name} is on {other}, but {first} is on {device}; accepted: one device")


def check_bias(
    op: str, bias: torch.Tensor | None, width: int, dtype: torch.dtype, autocast: bool, name: str = "bias"
) -> None:
    """``dtype`` is the one to work in. Autocast takes any mix of dtypes, :func:`readable_bias` makes of it what kernels read."""
    if bias is None:
        return
    narrow = OUTPUT_DTYPES if autocast else tuple({dtype, torch.float32})
    check_tensor(op, name, bias, narrow if dtype in OPERAND_DTYPES else (dtype,))
    if bias.ndim != 1 or bias.shape[0] != width:
        raise ValueError(f"{op}: {name} has shape {list(bias.shape)}; accepted: [{width}], one value per output column")


def readable_bias(bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A bias beside operands of ``dtype``: fp32 is read as it is, the other 16-bit dtype is rounded to ``dtype``."""
    return bias if bias is None or bias.dtype in (dtype, torch.float32) else bias.to(dtype)


def check_out_dtype(op: str, out_dtype: torch.dtype | None, dtypes: tuple[torch.dtype, ...]) -> None:
    if out_dtype is not None and out_dtype not in dtypes:
        raise TypeError(f"{op}: out_dtype is {out_dtype}; accepted: None, {names(dtypes)}")


def check_no_internal_overlap(op: str, name: str, tensor: torch.Tensor) -> None:
    """A tensor that is written must not have two elements in one place (an expanded one has)."""
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError(
            f"{op}: {name} has strides {list(tensor.stride())} for shape {list(tensor.shape)}, so elements share "
            "memory; accepted: a tensor without overlap"
        )


def check_operands(op: str, a: torch.Tensor, b: torch.Tensor) -> None:
    check_tensor(op, "a", a, OPERAND_DTYPES)
    check_tensor(op, "b", b, OPERAND_DTYPES)
    if a.dtype != b.dtype:
        raise TypeError(f"{op}: a is {names([a.dtype])} and b is {names([b.dtype])}; accepted: the same dtype for both")
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
    check_same_device(op, a=a, b=b, bias=bias, residual=residual)
    check_out_dtype(op, out_dtype, OUTPUT_DTYPES)
    return name


def output_shape(a: torch.Tensor, b: torch.Tensor, activation: str) -> tuple[int, ...]:
    """Shape of ``activation(a @ b)``."""
    return (*a.shape[:-1], activated_width(activation, b.shape[-1]))


# ---- reference


def product32(a: torch.Tensor, b: torch.Tensor, batch_invariant: bool) -> torch.Tensor:
    """``a @ b`` of 16-bit operands in fp32, in torch's operations.

    torch chooses algorithms by shape, so ``batch_invariant`` takes elementwise operations only, one K after the other.
    """
    if batch_invariant:
        a, b = a.float(), b.float()
        acc = a.new_zeros(*a.shape[:-1], b.shape[-1])
        for k in range(0 if a.is_meta else a.shape[-1]):
            acc += a[..., k : k + 1] * b[..., k : k + 1, :]
        return acc
    if a.is_cuda and a.numel() and b.numel():  # tensor cores with fp32 sums, which only CUDA's mm and bmm offer
        return (torch.mm if a.ndim == 2 else torch.bmm)(a, b, out_dtype=torch.float32)
    return torch.matmul(a.float(), b.float())


def preactivation(product: torch.Tensor, bias: torch.Tensor | None, alpha: float) -> torch.Tensor:
    """``z = alpha * product + bias`` in fp32."""
    z = product if alpha == 1 else alpha * product
    return z if bias is None else z + bias.float()


def finished(
    z: torch.Tensor, residual: torch.Tensor | None, activation: str, beta: float, out_dtype: torch.dtype
) -> torch.Tensor:
    """``activation(z) + beta * residual`` of an fp32 ``z``, rounded once. With ``beta`` 0, ``residual`` is not read."""
    out = ACTIVATIONS[activation](z)
    if residual is not None and beta != 0:
        out = torch.add(out, residual.float(), alpha=beta)
    return out.to(out_dtype)
