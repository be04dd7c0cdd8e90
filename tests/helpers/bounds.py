"""Error bounds derived from the arithmetic of a GEMM: no correct kernel exceeds them, compared with float64 on the same 16-bit
inputs.

Let ``z = alpha (a @ b) + bias`` and ``G = |alpha| |a| @ |b| + |bias|`` in float64, with K terms, of which the hardware adds p
between two roundings of the accumulator. The error of ``activation(z) + beta c`` is at most::

    u_out |result|  +  slope e_z  +  2^-22 |z|  +  2^-23 (|activation(z)| + |beta c|)  +  tiny_out
    with  e_z = (K / p + 16) 2^-23 G

The terms are, in order:

- the rounding of the result (u_out is half an ulp);
- the fp32 accumulation (2^-23 instead of 2^-24, because tensor cores truncate), propagated by the largest slope of the activation,
  or by the product rule for ``silu(gate) up``;
- the evaluation of an activation that is not piecewise linear (csrc/activation/formula.h: 4 u |z|; for a gated one
  ``2^-22 |gate up|`` and the rounding of the product);
- the sum with c;
- half the smallest subnormal.

For p see Fasi, Higham, Mikaitis, Pranesh: Numerical behavior of NVIDIA tensor cores, PeerJ Computer Science 7:e330, 2021.

CPU instructions for bf16 treat subnormal operands as zero and flush subnormal sums (docs/cpu.md). If they are used, e_z also
covers each product with such an operand, and ``K 2^-126``.

The bound grows with K and would hide one missing product among many; a global error measure would hide one wrong row among
many. So a kernel is tested in three ways: elementwise against this bound, globally by :func:`assert_frobenius`, and exactly on
inputs with a representable result (generators.py, tests/ops/test_gemm.py).
"""

from __future__ import annotations

import math

import torch

from amp_kernels import _functional as F
from amp_kernels._checks.activations import ACTIVATIONS, GATED, halves
from amp_kernels._dispatch import cpu_isa

#: Half an ulp relative to the result, and half the smallest subnormal.
UNIT_ROUNDOFF = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24, torch.float64: 2.0**-53}
TINY = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134, torch.float32: 2.0**-150, torch.float64: 0.0}

#: Accepted relative Frobenius error of rounding the result. bf16 partial sums (split-K in the output dtype) reach 2.6e-3.
FROBENIUS = {torch.float16: 2.4e-4, torch.bfloat16: 1.9e-3}

#: The largest slope of each activation.
SLOPE = {"none": 1.0, "relu": 1.0, "gelu": 1.13, "gelu_tanh": 1.13, "silu": 1.10}


def products_per_rounding(device: torch.device | str) -> int:
    """The number of products that the hardware adds exactly before it rounds the accumulator: 16 on sm_90, 8 on sm_80, 4 before,
    1 on a CPU."""
    if torch.device(device).type != "cuda":
        return 1
    major = torch.cuda.get_device_capability(device)[0]
    return 16 if major >= 9 else 8 if major == 8 else 4


def reference_and_bound(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    out_dtype: torch.dtype,
    alpha: float = 1.0,
    beta: float = 0.0,
    c: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``activation(alpha * a @ b + bias) + beta * c`` in float64, and the elementwise error bound of a kernel's result.

    Args:
        a, b, bias, c: the kernel's own inputs; leading dimensions broadcast.
        activation: as in the op ``gemm``.
        out_dtype: dtype of the kernel's result.
        alpha, beta: factors of the product and of ``c``; with ``beta`` 0, ``c`` is ignored, even if it is NaN.
    """
    z, error = _preactivation(a, b, bias, alpha)
    activation = activation or "none"
    result = ACTIVATIONS[activation](z)
    if activation in GATED:
        (gate, up), (gate_error, up_error) = halves(z), halves(error)
        slope = SLOPE["silu"]
        error = slope * gate_error * (up.abs() + up_error) + F.silu(gate).abs() * up_error
        error = error + 2.0**-22 * (gate * up).abs() + 2.0**-24 * result.abs()
    else:
        error = SLOPE[activation] * error
        if activation not in ("none", "relu"):
            error = error + 2.0**-22 * z.abs()
    if c is not None and beta:
        error = error + 2.0**-23 * (result.abs() + (beta * c.double()).abs())
        result = result + beta * c.double()
    return result, _rounded(result, error, out_dtype)


def _preactivation(a, b, bias, alpha) -> tuple[torch.Tensor, torch.Tensor]:
    """``z`` in float64, and the error bound of a kernel's fp32 ``z``."""
    z = alpha * F.matmul(a.double(), b.double())
    size = abs(alpha) * F.matmul(a.double().abs(), b.double().abs())
    flushed = abs(alpha) * _flushed(a, b)
    if bias is not None:
        z, size = z + bias.double(), size + bias.double().abs()
    return z, (a.shape[-1] / products_per_rounding(a.device) + 16) * 2.0**-23 * size + flushed


def _flushed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | float:
    """The error of a @ b if subnormals are treated as zero."""
    if a.device.type != "cpu" or a.dtype != torch.bfloat16 or not cpu_isa.flushes_subnormals():
        return 0.0
    tiny = torch.finfo(torch.float32).tiny
    a, b = a.double().abs(), b.double().abs()
    return torch.where(a < tiny, a, 0) @ b + a @ torch.where(b < tiny, b, 0) + a.shape[-1] * tiny


def _rounded(result: torch.Tensor, error: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The error bound after rounding to ``dtype``."""
    u = UNIT_ROUNDOFF[dtype]
    return u * result.abs() + (1 + u) * error + TINY[dtype]


def dact_reference_and_bound(
    a: torch.Tensor, b: torch.Tensor, preact: torch.Tensor, *, activation: str, out_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``gemm_dact`` in float64: ``(dz, bound, sums, bound of the sums)``, with sums over all rows.

    The error of the product is multiplied by the largest slope, and that of the derivative (2^-18, for values of size 1) by the
    size of the product. M rows are summed in fp32 in any order: ``M 2^-23`` of the sum of sizes.
    """
    grad, grad_error = _preactivation(a, b, None, 1.0)
    z = preact.double().requires_grad_()
    (dz,) = torch.autograd.grad(ACTIVATIONS[activation](z), z, grad)
    if activation in GATED:
        gate, up = halves(preact.double())
        factor = torch.cat([SLOPE["silu"] * up.abs(), F.silu(gate).abs()], dim=-1)
        error = torch.cat([grad_error, grad_error], dim=-1) * factor
        size = torch.cat([grad.abs(), grad.abs()], dim=-1) * factor
    else:
        size, error = grad.abs(), SLOPE[activation] * grad_error
    error = error + 2.0**-18 * size
    rows = max(1, dz.flatten(0, -2).shape[0])
    sums, sizes, errors = (t.flatten(0, -2).sum(0) for t in (dz, dz.abs(), error))
    return dz, _rounded(dz, error, out_dtype), sums, errors + rows * 2.0**-23 * (sizes + errors)


def assert_within(actual: torch.Tensor, reference: torch.Tensor, bound: torch.Tensor, what: str = "result") -> None:
    """Assert that every element of ``actual`` is within ``bound`` of ``reference``, with the same NaN and inf.

    If the reference reaches the overflow threshold of the dtype within the bound, inf of its sign is accepted too.
    """
    assert actual.shape == reference.shape, f"{what}: shape {list(actual.shape)}, expected {list(reference.shape)}"
    if not actual.numel():
        return
    value = actual.double()
    largest = torch.finfo(actual.dtype).max
    threshold = largest * (1 + UNIT_ROUNDOFF[actual.dtype] / 2)
    overflow = (reference.abs() + bound >= threshold) & (
        value == torch.copysign(torch.full_like(value, math.inf), reference)
    )
    same = (value == reference) | (value.isnan() & reference.isnan())
    good = same | overflow | ((value - reference).abs() <= bound)
    if not good.all():
        ratio = torch.where(good, 0.0, ((value - reference).abs() / bound).nan_to_num(math.inf))
        worst = int(ratio.argmax())
        index = [int(i) for i in torch.unravel_index(torch.tensor(worst), reference.shape)]
        raise AssertionError(
            f"{what}: {int((~good).sum())} of {good.numel()} elements are out of bounds; the worst, at {index}, is "
            f"{value.flatten()[worst].item():.9g}, expected {reference.flatten()[worst].item():.9g} within "
            f"{bound.flatten()[worst].item():.3g}"
        )


def frobenius_gate(out_dtype: torch.dtype, k: int) -> float:
    """The largest relative Frobenius error of a correct GEMM on random data with inner size ``k``."""
    return FROBENIUS.get(out_dtype, 4e-8 * (k / 16) + 3e-7)


def assert_frobenius(actual: torch.Tensor, reference: torch.Tensor, k: int, what: str = "result") -> None:
    """Assert a relative Frobenius error below :func:`frobenius_gate`, for random data with a few hundred elements or more."""
    error = ((actual.double() - reference).norm() / reference.norm()).item()
    gate = frobenius_gate(actual.dtype, k)
    assert error <= gate, (
        f"{what}: relative Frobenius error {error:.3g}, accepted: {gate:.3g} ({actual.dtype}, K = {k})"
    )


def assert_unbiased(actual: torch.Tensor, reference: torch.Tensor, what: str = "result") -> None:
    """Assert that the mean signed relative error is within three standard errors of 0. Truncation on store is far outside."""
    error = (actual.double() - reference) / reference
    error = error[reference != 0]
    sigmas = abs(error.mean() / (error.std() / math.sqrt(error.numel()))).item()
    assert sigmas <= 3, (
        f"{what}: the mean relative error {error.mean().item():.3g} is {sigmas:.1f} standard errors from 0"
    )


def norm_forward_bound(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    eps: float,
    centred: bool,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``norm_forward`` of rows in float64, and the error bound of a kernel.

    With u = 2^-24 and sums over N columns in at least 16 lanes, each sum has ``k = N / 16 + 16`` roundings. The error of the mean
    is ``k u mean|x|``; that of a difference from the mean is the same plus one rounding; that of the mean square is the square of
    the former plus ``(k + 4) u`` of itself. The relative error of rstd is half that of the mean square. All are small against 1.
    """
    u = UNIT_ROUNDOFF[torch.float32]
    wide = x.double()
    k = x.shape[1] / 16 + 16
    mean = wide.mean(1, keepdim=True) if centred else wide.new_zeros(x.shape[0], 1)
    mean_error = k * u * wide.abs().mean(1, keepdim=True) if centred else 0.0
    square = (wide - mean).square().mean(1, keepdim=True) + eps
    rstd = square.rsqrt()
    rstd_error = (mean_error**2 / square + (k + 4) * u) / 2 + 3 * u
    n = (wide - mean) * rstd
    error = rstd * mean_error + n.abs() * (2 * u + rstd_error) * 1.01
    w = 1.0 if weight is None else weight.double()
    b = 0.0 if bias is None else bias.double()
    y = n * w + b
    error = (error * abs(w)) * (1 + u) + 2 * u * ((n * w).abs() + y.abs())
    return y, _rounded(y, error, out_dtype)


def norm_backward_bound(
    grad: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    mean: torch.Tensor | None,
    weight: torch.Tensor | None,
    grad_sum: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``norm_backward`` in float64 from the same statistics: ``(grad_x, bound, sums, bound of the sums)``, with the sums of weight
    and bias. The error of a product n is 2u, that of the means over N columns ``k u`` of the mean of sizes (see
    :func:`norm_forward_bound`), that of sums over M rows ``M u`` of the sum of sizes."""
    u = UNIT_ROUNDOFF[torch.float32]
    dy, k = grad.double(), x.shape[1] / 16 + 20
    s = rstd.double()[:, None]
    n = x.double() * s if mean is None else (x.double() - mean.double()[:, None]) * s
    g = dy if weight is None else dy * weight.double()
    mean_gn, size_gn = (g * n).mean(1, keepdim=True), (g * n).abs().mean(1, keepdim=True)
    mean_g, size_g = g.mean(1, keepdim=True), g.abs().mean(1, keepdim=True)
    if mean is None:
        mean_g, size_g = 0 * mean_g, 0 * size_g
    dx = s * (g - mean_g - n * mean_gn)
    sizes = g.abs() + mean_g.abs() + (n * mean_gn).abs()
    error = s * (5 * u * sizes + k * u * (size_g + n.abs() * size_gn)) * 1.01
    if grad_sum is not None:
        dx = dx + grad_sum.double()
        error = error + u * dx.abs()
    sums = torch.stack([(dy * n).sum(0), dy.sum(0)])
    sums_error = (x.shape[0] + 4) * u * torch.stack([(dy * n).abs().sum(0), dy.abs().sum(0)])
    return dx, _rounded(dx, error, x.dtype), sums, sums_error
