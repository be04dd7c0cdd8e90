"""GEMM with fp16 or bf16 operands: fp32 accumulation, epilogue in fp32, one rounding to the output type.

Every matrix product of the package ends in one of these raw ops. With ``z = alpha * (a @ b) + bias``:

- ``gemm``: ``activation(z) + beta * residual``, and with ``preact`` also ``z``, which a backward needs;
- ``gemm_dact``: ``activation'(preact) * (a @ b)``, the gradient of an activation, taken back through it at once;
- ``gemm_accumulate_``: ``c = alpha * (a @ b) + beta * c`` with an fp32 ``c``, for gradient accumulation.

They take any strides and have no autograd formula; ``amp_kernels.linear``, ``amp_kernels.matmul`` and
``amp_kernels.baddbmm`` are the differentiable ops. A second result that was not asked for is ``None``: even an empty tensor would
cost each call a microsecond.

Numerics: products of 16-bit numbers are exact in fp32. Partial sums are never rounded to 16 bits, the epilogue sees the
unrounded fp32 sums, and the only rounding is the final one, to nearest even. So for K terms
``|error| <= u_out |result| + c K 2^-23 (|a| @ |b|)``, with ``u_out`` half an ulp of the output type
(tests/helpers/bounds.py). One exception: on Hopper an accumulation with alpha = beta = 1 is an addition in the L2
cache, which takes and gives subnormal numbers as zeros.

``gemm_dact`` serves the backward of ``y = activation(z) @ w2``. The gradient of ``activation(z)``, ``dy @ w2^T``, is only
needed for ``dz = activation'(z) * (dy @ w2^T)`` and for the bias gradient, the sum of the rows of ``dz``. Fused, it is
never rounded to 16 bits and never stored: of M N elements one read (``z``) and one write (``dz``) remain, where separate
kernels take three of each.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .._checks.activations import ACTIVATIONS, GATED, check_activation
from .._checks.lists import HALF_DTYPES, KERNEL_DTYPES, within_float32
from .._checks.operands import check_out_dtype, check_tensor
from .._dispatch.library import KernelOp, Sample, define
from .._dispatch.samples import Normal
from ._product import check_gemm, check_operands, finished, output_shape, preactivation, product32, product_flops
from .activation_backward import DERIVATIVES

# ---- checks and references


def _gemm_reference(call):
    z = preactivation(product32(call.a, call.b, call.batch_invariant), call.bias, call.alpha)
    out = finished(z, call.residual, call.activation, call.beta, call.out_dtype or call.a.dtype)
    # "none" gives back z itself, and an op's results may not share memory.
    return out, z.to(out.dtype, copy=True) if call.preact else None


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
    check_out_dtype(op, out_dtype, KERNEL_DTYPES)
    return name


def _gemm_dact_reference(call):
    product = product32(call.a, call.b, call.batch_invariant)
    dz = DERIVATIVES[call.activation](product, call.preact.float().contiguous())
    return dz.to(call.out_dtype or call.a.dtype), dz.flatten(0, -2).sum(0) if call.bias_grad else None


def check_accumulate(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    op = "gemm_accumulate_"
    check_operands(op, a, b)
    check_tensor(op, "c", c, (torch.float32,))
    if c.shape != (*a.shape[:-1], b.shape[-1]):
        raise ValueError(
            f"{op}: c has shape {list(c.shape)}; accepted: {[*a.shape[:-1], b.shape[-1]]}, the shape of a @ b"
        )


def _gemm_accumulate_reference(call):
    if call.batch_invariant and call.alpha == 1 and call.beta == 1:
        call.c.copy_(product32(call.a, call.b, True, call.c))
        return
    alpha, beta = map(within_float32, (call.alpha, call.beta))
    product = alpha * product32(call.a, call.b, call.batch_invariant)
    # With beta = 0, c is not read, since it may hold NaN.
    call.c.copy_(product if call.beta == 0 else torch.add(product, call.c, alpha=beta))


# ---- samples for opcheck and `info --check`


def _operands(device: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    normal = Normal(device)
    for dtype in HALF_DTYPES:
        yield normal(5, 7, dtype=dtype), normal(7, 10, dtype=dtype)
        yield normal(7, 16, dtype=dtype).t(), normal(8, 7, dtype=dtype).t()
        yield normal(2, 3, 8, dtype=dtype), normal(2, 4, 8, dtype=dtype).mT
    yield normal(3, 0, dtype=torch.bfloat16), normal(0, 4, dtype=torch.bfloat16)
    yield normal(0, 5, dtype=torch.float16), normal(5, 4, dtype=torch.float16)


def gemm_samples(device: str) -> Iterator[Sample]:
    for i, (a, b) in enumerate(_operands(device)):
        bias = torch.linspace(-1, 1, b.shape[-1]).to(device)
        rows = torch.linspace(1, 2, a.shape[-2]).to(device, a.dtype)[:, None]
        activation = list(ACTIVATIONS)[i % len(ACTIVATIONS)]
        residual = torch.ones(output_shape(a, b, activation), device=device)
        yield (a, b), {}
        yield (a, b, bias), {"activation": activation, "out_dtype": KERNEL_DTYPES[i % 3]}
        yield (a, b, bias.to(a.dtype), residual.to(a.dtype)), {"activation": activation, "beta": 0.5}
        yield (a, b, rows, residual[..., :1].expand_as(residual)), {"activation": activation, "alpha": -2.0}
        yield (a, b, None, torch.full_like(residual, torch.nan)), {"activation": activation, "beta": 0.0}
        yield (a, b, bias), {"activation": "swiglu", "batch_invariant": True, "out_dtype": torch.float32}
    for i, (a, b) in enumerate(_operands(device)):
        rows = torch.linspace(1, 2, a.shape[-2]).to(device, a.dtype)[:, None]
        for activation in list(ACTIVATIONS)[i % 2 :: 2]:
            options = {"activation": activation, "out_dtype": KERNEL_DTYPES[i % 3], "preact": True}
            yield (a, b, rows, torch.ones(output_shape(a, b, activation), device=device)), options


def gemm_accumulate_samples(device: str) -> Iterator[Sample]:
    for i, (a, b) in enumerate(_operands(device)):
        c = torch.ones(*a.shape[:-1], b.shape[-1], device=device)
        yield (c.clone(), a, b), {}
        yield (c.mT.contiguous().mT, a, b), {"alpha": 0.5, "beta": float(i % 2), "batch_invariant": i % 4 > 1}


def gemm_dact_samples(device: str) -> Iterator[Sample]:
    for i, (a, b) in enumerate(_operands(device)):
        for j, activation in enumerate(ACTIVATIONS):
            generator = torch.Generator().manual_seed(i)
            columns = b.shape[-1] * (2 if activation in GATED else 1)
            preact = (2 * torch.randn(*a.shape[:-1], columns, generator=generator)).to(device)
            yield (
                (a, b, preact.to(a.dtype) if (i + j) % 3 else preact.mT.contiguous().mT),
                {
                    "activation": activation,
                    "bias_grad": (i + j) % 2 == 0,
                    "out_dtype": (None, *KERNEL_DTYPES)[(i + j) % 4],
                    "batch_invariant": j == 3,
                },
            )


# ---- ops


gemm_op = define(
    "gemm(Tensor a, Tensor b, Tensor? bias=None, Tensor? residual=None, *, float alpha=1.0, float beta=1.0, "
    'str activation="none", ScalarType? out_dtype=None, bool batch_invariant=False, bool preact=False) '
    "-> (Tensor, Tensor)",
    _gemm_reference,
    bound=True,
    samples=gemm_samples,
    check=lambda call: check_gemm(*call[:4], call.activation, call.out_dtype),
    tensor_cores=True,
    flop_count=product_flops,
)
gemm_dact_op = define(
    "gemm_dact(Tensor a, Tensor b, Tensor preact, *, str activation, bool bias_grad=False, ScalarType? out_dtype=None, "
    "bool batch_invariant=False) -> (Tensor, Tensor)",
    _gemm_dact_reference,
    bound=True,
    samples=gemm_dact_samples,
    check=lambda call: check_dact(*call[:3], call.activation, call.out_dtype),
    tensor_cores=True,
    flop_count=product_flops,
)
gemm_accumulate_op = define(
    "gemm_accumulate_(Tensor(a!) c, Tensor a, Tensor b, *, float alpha=1.0, float beta=1.0, "
    "bool batch_invariant=False) -> ()",
    _gemm_accumulate_reference,
    bound=True,
    samples=gemm_accumulate_samples,
    check=lambda call: check_accumulate(*call[:3]),
    tensor_cores=True,
    flop_count=lambda c_shape, a_shape, b_shape, *args, **kwargs: product_flops(a_shape, b_shape),
)


#: What :func:`amp_kernels._dispatch.policy.set_plan` calls.
set_gemm_plan = KernelOp("_set_gemm_plan(Tensor on, int[] product, str activation, int[] plan) -> ()")
