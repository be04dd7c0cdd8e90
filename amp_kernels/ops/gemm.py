"""GEMM with fp16 or bf16 operands: fp32 accumulation, bias and activation in fp32, one rounding to the output type.

The three raw ops of this file are what every matrix product of the package ends in:

- ``gemm``: ``activation(a @ b + bias)``;
- ``gemm_preact``: the same, and the pre-activation ``z = a @ b + bias`` that a backward needs;
- ``gemm_accumulate_``: ``c = alpha * a @ b + beta * c`` with an fp32 ``c``, as gradient accumulation wants it.

They take any strides and have no autograd formula; ``amp_kernels.linear`` and ``amp_kernels.matmul`` are the
differentiable ops.

Numerics: products of 16-bit numbers are exact in fp32. Partial sums are never rounded to 16 bits, the activation sees
the unrounded fp32 ``z``, and the only rounding is the final one, to nearest even. So for K terms
``|error| <= u_out |result| + c K 2^-23 (|a| @ |b|)``, with ``u_out`` half an ulp of the output type
(amp_kernels/testing/bounds.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from .._library import Sample, define
from ._lists import names

#: The activations of the epilogue, as they are named in the schemas, in torch's own definitions.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda z: z,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
}

OPERAND_DTYPES = (torch.float16, torch.bfloat16)
OUTPUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


# ---- argument checks, shared by the ops that end in a GEMM


def check_activation(op: str, activation: str | None) -> str:
    """The schema's name of ``activation``; ``None`` means ``"none"``."""
    name = "none" if activation is None else activation
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"{op}: activation is {activation!r}; accepted: None, {', '.join(map(repr, ACTIVATIONS))}")
    return name


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


def check_bias(op: str, bias: torch.Tensor | None, width: int, dtypes: tuple[torch.dtype, ...]) -> None:
    if bias is None:
        return
    check_tensor(op, "bias", bias, dtypes)
    if bias.ndim != 1 or bias.shape[0] != width:
        raise ValueError(f"{op}: bias has shape {list(bias.shape)}; accepted: [{width}], one value per output column")


def check_out_dtype(op: str, out_dtype: torch.dtype | None, dtypes: tuple[torch.dtype, ...]) -> None:
    if out_dtype is not None and out_dtype not in dtypes:
        raise TypeError(f"{op}: out_dtype is {out_dtype}; accepted: None, {names(dtypes)}")


def _check_operands(op: str, a: torch.Tensor, b: torch.Tensor) -> None:
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


def _check_gemm(op: str, a, b, bias, activation: str | None, out_dtype: torch.dtype | None) -> str:
    _check_operands(op, a, b)
    check_bias(op, bias, b.shape[-1], (a.dtype, torch.float32))
    check_same_device(op, a=a, b=b, bias=bias)
    check_out_dtype(op, out_dtype, OUTPUT_DTYPES)
    return check_activation(op, activation)


# ---- references


def _preactivation(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if a.is_cuda and a.numel() and b.numel():  # tensor cores with fp32 sums, which only CUDA's mm and bmm offer
        z = (torch.mm if a.ndim == 2 else torch.bmm)(a, b, out_dtype=torch.float32)
    else:
        z = torch.matmul(a.float(), b.float())
    return z if bias is None else z + bias.float()


def _gemm_reference(a, b, bias=None, *, activation="none", out_dtype=None):
    _check_gemm("gemm", a, b, bias, activation, out_dtype)
    return ACTIVATIONS[activation](_preactivation(a, b, bias)).to(out_dtype or a.dtype)


def _gemm_preact_reference(a, b, bias=None, *, activation, out_dtype=None):
    _check_gemm("gemm_preact", a, b, bias, activation, out_dtype)
    z = _preactivation(a, b, bias)
    return ACTIVATIONS[activation](z).to(out_dtype or a.dtype, copy=True), z.to(out_dtype or a.dtype)


def _check_accumulate(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    op = "gemm_accumulate_"
    _check_operands(op, a, b)
    check_tensor(op, "c", c, (torch.float32,))
    if c.shape != (*a.shape[:-1], b.shape[-1]):
        raise ValueError(
            f"{op}: c has shape {list(c.shape)}; accepted: {[*a.shape[:-1], b.shape[-1]]}, the shape of a @ b"
        )
    check_same_device(op, c=c, a=a, b=b)


def _gemm_accumulate_reference(c, a, b, *, alpha=1.0, beta=1.0):
    _check_accumulate(c, a, b)
    product = alpha * _preactivation(a, b, None)
    c.copy_(
        product if beta == 0 else torch.add(product, c, alpha=beta)
    )  # beta = 0: what stands in c, be it NaN, is not read


# ---- samples for opcheck and `info --check`


def _operands(device: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    for dtype in OPERAND_DTYPES:
        yield normal(5, 7).to(device, dtype), normal(7, 9).to(device, dtype)
        yield normal(7, 16).to(device, dtype).t(), normal(8, 7).to(device, dtype).t()
        yield normal(2, 3, 8).to(device, dtype), normal(2, 4, 8).to(device, dtype).mT
    yield normal(3, 0).to(device, torch.bfloat16), normal(0, 4).to(device, torch.bfloat16)
    yield normal(0, 5).to(device, torch.float16), normal(5, 4).to(device, torch.float16)


def _gemm_samples(device: str) -> Iterator[Sample]:
    for i, (a, b) in enumerate(_operands(device)):
        bias = torch.linspace(-1, 1, b.shape[-1]).to(device)
        activation = list(ACTIVATIONS)[i % len(ACTIVATIONS)]
        yield (a, b), {}
        yield (a, b, bias), {"activation": activation, "out_dtype": OUTPUT_DTYPES[i % 3]}
        yield (a, b, bias.to(a.dtype)), {"activation": activation}


def _gemm_preact_samples(device: str) -> Iterator[Sample]:
    for args, kwargs in _gemm_samples(device):
        yield args, {"activation": "gelu", **kwargs}


def _gemm_accumulate_samples(device: str) -> Iterator[Sample]:
    for i, (a, b) in enumerate(_operands(device)):
        c = torch.ones(*a.shape[:-1], b.shape[-1], device=device)
        yield (c.clone(), a, b), {}
        yield (c.mT.contiguous().mT, a, b), {"alpha": 0.5, "beta": float(i % 2)}


# ---- ops

GEMM = define(
    'gemm(Tensor a, Tensor b, Tensor? bias=None, *, str activation="none", ScalarType? out_dtype=None) -> Tensor',
    _gemm_reference,
    samples=_gemm_samples,
)
GEMM_PREACT = define(
    "gemm_preact(Tensor a, Tensor b, Tensor? bias=None, *, str activation, ScalarType? out_dtype=None) "
    "-> (Tensor, Tensor)",
    _gemm_preact_reference,
    samples=_gemm_preact_samples,
)
GEMM_ACCUMULATE = define(
    "gemm_accumulate_(Tensor(a!) c, Tensor a, Tensor b, *, float alpha=1.0, float beta=1.0) -> ()",
    _gemm_accumulate_reference,
    samples=_gemm_accumulate_samples,
)


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``activation(a @ b + bias)`` of 16-bit operands, accumulated in fp32 and rounded once. Not differentiable.

    Args:
        a: ``[M, K]`` or ``[B, M, K]``, fp16 or bf16, any strides.
        b: ``[K, N]`` or ``[B, K, N]``, the dtype of ``a``, any strides.
        bias: ``[N]``, the dtype of ``a`` or fp32; added in fp32.
        activation: ``None``, ``"relu"``, ``"gelu"`` (erf), ``"gelu_tanh"`` or ``"silu"``; computed in fp32.
        out_dtype: fp16, bf16 or fp32; the dtype of ``a`` by default.

    Returns:
        A contiguous tensor ``[M, N]`` or ``[B, M, N]``. With K = 0 it holds ``activation(bias)``.

    Raises:
        TypeError: a dtype or layout is not accepted; fp16 and bf16 are never mixed.
        ValueError: shapes, devices or ``activation`` do not fit.
    """
    name = _check_gemm("gemm", a, b, bias, activation, out_dtype)
    return GEMM(a, b, bias, activation=name, out_dtype=out_dtype)


def gemm_preact(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`gemm`, and the pre-activation ``z = a @ b + bias`` rounded to the same dtype, for
    :func:`activation_backward`.

    Arguments and errors are those of :func:`gemm`. The activation is computed from the unrounded fp32 ``z``.

    Returns:
        ``(activation(z), z)``, two contiguous tensors.
    """
    name = _check_gemm("gemm_preact", a, b, bias, activation, out_dtype)
    return GEMM_PREACT(a, b, bias, activation=name, out_dtype=out_dtype)


def gemm_accumulate_(
    c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, alpha: float = 1.0, beta: float = 1.0
) -> torch.Tensor:
    """``c = alpha * (a @ b) + beta * c`` in place, in fp32 throughout. Not differentiable.

    Args:
        c: fp32, ``[M, N]`` or ``[B, M, N]``, any strides whose elements do not overlap.
        a: ``[M, K]`` or ``[B, M, K]``, fp16 or bf16, any strides.
        b: ``[K, N]`` or ``[B, K, N]``, the dtype of ``a``, any strides.
        alpha: factor of the product.
        beta: factor of ``c``. With 0, ``c`` is written without being read, as BLAS has it.

    Returns:
        ``c``.

    Raises:
        TypeError: a dtype or layout is not accepted.
        ValueError: shapes or devices do not fit, or elements of ``c`` share memory.
    """
    _check_accumulate(c, a, b)
    check_no_internal_overlap("gemm_accumulate_", "c", c)
    GEMM_ACCUMULATE(c, a, b, alpha=alpha, beta=beta)
    return c


def check_no_internal_overlap(op: str, name: str, tensor: torch.Tensor) -> None:
    """A tensor that is written must not have two elements in one place (an expanded one has)."""
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError(
            f"{op}: {name} has strides {list(tensor.stride())} for shape {list(tensor.shape)}, so elements share "
            "memory; accepted: a tensor without overlap"
        )
