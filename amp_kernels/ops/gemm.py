"""GEMM with fp16 or bf16 operands: fp32 accumulation, epilogue in fp32, one rounding to the output type.

The raw ops of this file and ``gemm_dact`` are what every matrix product of the package ends in. With
``z = alpha * (a @ b) + bias``:

- ``gemm``: ``activation(z) + beta * residual``;
- ``gemm_preact``: the same, and ``z``, which a backward needs;
- ``gemm_accumulate_``: ``c = alpha * (a @ b) + beta * c`` with an fp32 ``c``, as gradient accumulation wants it.

They take any strides and have no autograd formula; ``amp_kernels.linear``, ``amp_kernels.matmul`` and
``amp_kernels.baddbmm`` are the differentiable ops.

Numerics: products of 16-bit numbers are exact in fp32. Partial sums are never rounded to 16 bits, the epilogue sees the
unrounded fp32 sums, and the only rounding is the final one, to nearest even. So for K terms
``|error| <= u_out |result| + c K 2^-23 (|a| @ |b|)``, with ``u_out`` half an ulp of the output type
(amp_kernels/testing/bounds.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .._dispatch.library import Sample, define
from ._gemm import (
    ACTIVATIONS,
    OPERAND_DTYPES,
    OUTPUT_DTYPES,
    check_activation,
    check_gemm,
    check_no_internal_overlap,
    check_operands,
    check_same_device,
    check_tensor,
    finished,
    output_shape,
    preactivation,
    product32,
)

# ---- references


def _gemm_reference(
    a, b, bias=None, residual=None, *, alpha=1.0, beta=1.0, activation="none", out_dtype=None, batch_invariant=False
):
    check_gemm("gemm", a, b, bias, residual, activation, out_dtype)
    z = preactivation(product32(a, b, batch_invariant), bias, alpha)
    return finished(z, residual, activation, beta, out_dtype or a.dtype)


def _gemm_preact_reference(
    a, b, bias=None, residual=None, *, alpha=1.0, beta=1.0, activation, out_dtype=None, batch_invariant=False
):
    check_gemm("gemm_preact", a, b, bias, residual, activation, out_dtype)
    z = preactivation(product32(a, b, batch_invariant), bias, alpha)
    # "none" gives back z itself, and an op's results may not share memory.
    return finished(z, residual, activation, beta, out_dtype or a.dtype), z.to(out_dtype or a.dtype, copy=True)


def check_accumulate(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    op = "gemm_accumulate_"
    check_operands(op, a, b)
    check_tensor(op, "c", c, (torch.float32,))
    if c.shape != (*a.shape[:-1], b.shape[-1]):
        raise ValueError(
            f"{op}: c has shape {list(c.shape)}; accepted: {[*a.shape[:-1], b.shape[-1]]}, the shape of a @ b"
        )
    check_same_device(op, c=c, a=a, b=b)


def _gemm_accumulate_reference(c, a, b, *, alpha=1.0, beta=1.0, batch_invariant=False):
    check_accumulate(c, a, b)
    product = alpha * product32(a, b, batch_invariant)
    # beta = 0: what stands in c, be it NaN, is not read.
    c.copy_(product if beta == 0 else torch.add(product, c, alpha=beta))


# ---- samples for opcheck and `info --check`


def sample_operands(device: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    for dtype in OPERAND_DTYPES:
        yield normal(5, 7).to(device, dtype), normal(7, 10).to(device, dtype)
        yield normal(7, 16).to(device, dtype).t(), normal(8, 7).to(device, dtype).t()
        yield normal(2, 3, 8).to(device, dtype), normal(2, 4, 8).to(device, dtype).mT
    yield normal(3, 0).to(device, torch.bfloat16), normal(0, 4).to(device, torch.bfloat16)
    yield normal(0, 5).to(device, torch.float16), normal(5, 4).to(device, torch.float16)


def _gemm_samples(device: str) -> Iterator[Sample]:
    for i, (a, b) in enumerate(sample_operands(device)):
        bias = torch.linspace(-1, 1, b.shape[-1]).to(device)
        rows = torch.linspace(1, 2, a.shape[-2]).to(device, a.dtype)[:, None]
        activation = list(ACTIVATIONS)[i % len(ACTIVATIONS)]
        residual = torch.ones(output_shape(a, b, activation), device=device)
        yield (a, b), {}
        yield (a, b, bias), {"activation": activation, "out_dtype": OUTPUT_DTYPES[i % 3]}
        yield (a, b, bias.to(a.dtype), residual.to(a.dtype)), {"activation": activation, "beta": 0.5}
        yield (a, b, rows, residual[..., :1].expand_as(residual)), {"activation": activation, "alpha": -2.0}
        yield (a, b, None, torch.full_like(residual, torch.nan)), {"activation": activation, "beta": 0.0}
        yield (a, b, bias), {"activation": "swiglu", "batch_invariant": True, "out_dtype": torch.float32}


def _gemm_preact_samples(device: str) -> Iterator[Sample]:
    for args, kwargs in _gemm_samples(device):
        yield args, {"activation": "gelu", **kwargs}


def _gemm_accumulate_samples(device: str) -> Iterator[Sample]:
    for i, (a, b) in enumerate(sample_operands(device)):
        c = torch.ones(*a.shape[:-1], b.shape[-1], device=device)
        yield (c.clone(), a, b), {}
        yield (c.mT.contiguous().mT, a, b), {"alpha": 0.5, "beta": float(i % 2), "batch_invariant": i % 4 > 1}


# ---- ops

_EPILOGUE = "Tensor? bias=None, Tensor? residual=None, *, float alpha=1.0, float beta=1.0"

GEMM = define(
    f'gemm(Tensor a, Tensor b, {_EPILOGUE}, str activation="none", ScalarType? out_dtype=None, '
    "bool batch_invariant=False) -> Tensor",
    _gemm_reference,
    samples=_gemm_samples,
)
GEMM_PREACT = define(
    f"gemm_preact(Tensor a, Tensor b, {_EPILOGUE}, str activation, ScalarType? out_dtype=None, "
    "bool batch_invariant=False) -> (Tensor, Tensor)",
    _gemm_preact_reference,
    samples=_gemm_preact_samples,
)
GEMM_ACCUMULATE = define(
    "gemm_accumulate_(Tensor(a!) c, Tensor a, Tensor b, *, float alpha=1.0, float beta=1.0, "
    "bool batch_invariant=False) -> ()",
    _gemm_accumulate_reference,
    samples=_gemm_accumulate_samples,
)


def _expanded(op: str, residual, a, b, activation: str | None):
    """``residual`` in the shape of the result, if it broadcasts to that; any error is left to the checks that follow."""
    if not isinstance(residual, torch.Tensor):
        return residual
    check_operands(op, a, b)
    try:
        return residual.expand(output_shape(a, b, check_activation(op, activation)))
    except RuntimeError:
        return residual


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """``activation(alpha * (a @ b) + bias) + beta * residual`` of 16-bit operands. Not differentiable.

    Accumulated and finished in fp32, rounded once.

    Args:
        a: ``[M, K]`` or ``[B, M, K]``, fp16 or bf16, any strides.
        b: ``[K, N]`` or ``[B, K, N]``, the dtype of ``a``, any strides.
        bias: ``[N]``, one value per column, or ``[M, 1]``, one per row; the dtype of ``a`` or fp32.
        residual: a tensor of the shape of the result, or one that broadcasts to it; the dtype of ``a`` or fp32, any
            strides. Added after the activation.
        alpha: factor of the product.
        beta: factor of ``residual``. With 0, ``residual`` is not read.
        activation: ``None``, ``"relu"``, ``"gelu"`` (erf), ``"gelu_tanh"``, ``"silu"``, or ``"swiglu"``:
            ``silu(z[..., :N / 2]) * z[..., N / 2:]``, gates in the first half of the columns, values in the second.
        out_dtype: fp16, bf16 or fp32; the dtype of ``a`` by default.
        batch_invariant: the order of summation depends on N, K and the dtypes only, so that a row's result does not
            depend on how many rows and batches stand beside it.

    Returns:
        A contiguous tensor ``[M, N]`` or ``[B, M, N]``, with ``"swiglu"`` of N / 2 columns. With K = 0 the product is 0.

    Raises:
        TypeError: a dtype or layout is not accepted; fp16 and bf16 are never mixed.
        ValueError: shapes, devices or ``activation`` do not fit.
    """
    residual = _expanded("gemm", residual, a, b, activation)
    name = check_gemm("gemm", a, b, bias, residual, activation, out_dtype)
    return GEMM(
        a,
        b,
        bias,
        residual,
        alpha=alpha,
        beta=beta,
        activation=name,
        out_dtype=out_dtype,
        batch_invariant=batch_invariant,
    )


def gemm_preact(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    activation: str,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`gemm`, and the pre-activation ``z = alpha * (a @ b) + bias`` rounded to the same dtype, for
    :func:`activation_backward` and :func:`gemm_dact`.

    Arguments and errors are those of :func:`gemm`. The activation is computed from the unrounded fp32 ``z``.

    Returns:
        ``(activation(z) + beta * residual, z)``, two contiguous tensors; ``z`` always has N columns.
    """
    residual = _expanded("gemm_preact", residual, a, b, activation)
    name = check_gemm("gemm_preact", a, b, bias, residual, activation, out_dtype)
    return GEMM_PREACT(
        a,
        b,
        bias,
        residual,
        alpha=alpha,
        beta=beta,
        activation=name,
        out_dtype=out_dtype,
        batch_invariant=batch_invariant,
    )


def gemm_accumulate_(
    c: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """``c = alpha * (a @ b) + beta * c`` in place, in fp32 throughout. Not differentiable.

    Args:
        c: fp32, ``[M, N]`` or ``[B, M, N]``, any strides whose elements do not overlap.
        a: ``[M, K]`` or ``[B, M, K]``, fp16 or bf16, any strides.
        b: ``[K, N]`` or ``[B, K, N]``, the dtype of ``a``, any strides.
        alpha: factor of the product.
        beta: factor of ``c``. With 0, ``c`` is written without being read, as BLAS has it.
        batch_invariant: as in :func:`gemm`.

    Returns:
        ``c``.

    Raises:
        TypeError: a dtype or layout is not accepted.
        ValueError: shapes or devices do not fit, or elements of ``c`` share memory.
    """
    check_accumulate(c, a, b)
    check_no_internal_overlap("gemm_accumulate_", "c", c)
    GEMM_ACCUMULATE(c, a, b, alpha=alpha, beta=beta, batch_invariant=batch_invariant)
    return c
