"""``gemm_dact``: a GEMM whose result is the gradient of an activation, taken back through that activation at once.

In the backward of ``y = activation(z) @ w2`` the gradient of ``activation(z)`` is ``dy @ w2^T``, and all that is wanted
of it is ``dz = activation'(z) * (dy @ w2^T)`` and the bias gradient, the sum of the rows of ``dz``. Fused, the gradient
of ``activation(z)`` is never rounded to 16 bits and never stored: of M N elements one read (``z``) and one write
(``dz``) remain, where separate kernels take three of each.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .._dispatch.library import Sample, define
from ._gemm import (
    ACTIVATIONS,
    GATED,
    OUTPUT_DTYPES,
    check_activation,
    check_operands,
    check_out_dtype,
    check_same_device,
    check_tensor,
    product32,
)
from .activation_backward import DERIVATIVES
from .gemm import sample_operands


def check_dact(a, b, preact, activation: str, out_dtype: torch.dtype | None) -> str:
    op = "gemm_dact"
    check_operands(op, a, b)
    name = check_activation(op, activation)
    check_tensor(op, "preact", preact, (a.dtype, torch.float32))
    shape = (*a.shape[:-1], b.shape[-1] * (2 if name in GATED else 1))
    if tuple(preact.shape) != shape:
        raise ValueError(
            f"{op}: preact has shape {list(preact.shape)}; accepted with a {list(a.shape)}, b {list(b.shape)} and "
            f"activation={name!r}: {list(shape)}"
        )
    check_same_device(op, a=a, b=b, preact=preact)
    check_out_dtype(op, out_dtype, OUTPUT_DTYPES)
    return name


def _reference(a, b, preact, *, activation, bias_grad=False, out_dtype=None, batch_invariant=False):
    check_dact(a, b, preact, activation, out_dtype)
    dz = DERIVATIVES[activation](product32(a, b, batch_invariant), preact.float().contiguous())
    sums = dz.flatten(0, -2).sum(0) if bias_grad else dz.new_empty(0)
    return dz.to(out_dtype or a.dtype), sums


def _samples(device: str) -> Iterator[Sample]:
    for i, (a, b) in enumerate(sample_operands(device)):
        for j, activation in enumerate(ACTIVATIONS):
            generator = torch.Generator().manual_seed(i)
            columns = b.shape[-1] * (2 if activation in GATED else 1)
            preact = (2 * torch.randn(*a.shape[:-1], columns, generator=generator)).to(device)
            yield (
                (a, b, preact.to(a.dtype) if (i + j) % 3 else preact.mT.contiguous().mT),
                {
                    "activation": activation,
                    "bias_grad": (i + j) % 2 == 0,
                    "out_dtype": (None, *OUTPUT_DTYPES)[(i + j) % 4],
                    "batch_invariant": j == 3,
                },
            )


GEMM_DACT = define(
    "gemm_dact(Tensor a, Tensor b, Tensor preact, *, str activation, bool bias_grad=False, ScalarType? out_dtype=None, "
    "bool batch_invariant=False) -> (Tensor, Tensor)",
    _reference,
    samples=_samples,
)


def gemm_dact(
    a: torch.Tensor,
    b: torch.Tensor,
    preact: torch.Tensor,
    *,
    activation: str,
    bias_grad: bool = False,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``dz``, the gradient of ``preact``, where ``a @ b`` is the gradient of ``activation(preact)``. Not differentiable.

    Args:
        a: ``[M, K]`` or ``[B, M, K]``, fp16 or bf16, any strides: the gradient that arrived.
        b: ``[K, N]`` or ``[B, K, N]``, the dtype of ``a``, any strides: the weight, ``[out_features, in_features]``, of
            the layer that follows the activation.
        preact: ``[M, N]`` or ``[B, M, N]``, with ``"swiglu"`` of 2 N columns (gates, then values); the dtype of ``a`` or
            fp32, any strides.
        activation: ``"none"``, ``"relu"``, ``"gelu"``, ``"gelu_tanh"``, ``"silu"`` or ``"swiglu"``.
        bias_grad: whether to sum the rows of ``dz``, too.
        out_dtype: dtype of ``dz``: fp16, bf16 or fp32; that of ``a`` by default.
        batch_invariant: as in :func:`gemm`, for ``dz``. The bias gradient is a sum over the rows and depends on all.

    Returns:
        ``(dz, sums)``: ``dz`` contiguous, in the shape of ``preact``, from fp32 sums and derivatives, rounded once; and
        the fp32 sums of the unrounded ``dz`` over rows and batches, one per column of ``preact``, added in a fixed
        order, or without ``bias_grad`` an empty fp32 tensor.

    Raises:
        TypeError: a dtype or layout is not accepted.
        ValueError: shapes, devices or ``activation`` do not fit.
    """
    name = check_dact(a, b, preact, activation, out_dtype)
    return GEMM_DACT(
        a, b, preact, activation=name, bias_grad=bias_grad, out_dtype=out_dtype, batch_invariant=batch_invariant
    )
