"""The gradient of an activation: ``grad * activation'(preact)``, elementwise in fp32 and rounded once.

``preact`` is the ``z = x @ w + b`` that ``gemm`` saved. The op is raw; ``amp_kernels.linear`` is the
differentiable one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from .._checks.activations import ACTIVATIONS, GATED, activated, activated_width, halves, sloping
from .._checks.lists import HALF_DTYPES, KERNEL_DTYPES
from .._dispatch.library import Sample, define
from ._norm import check_like
from .activation_forward import check, extremes

aten = torch.ops.aten


def _silu_backward(grad: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    z = sloping(z)
    s = torch.sigmoid(z)  # aten.silu_backward itself has no derivative
    return grad * (s + z * s * (1 - s))


def _swiglu_backward(grad: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    gate, up = halves(z)
    return torch.cat([_silu_backward(grad * up, gate), grad * activated(gate, "silu")], dim=-1)


#: ``name -> (grad, z) -> grad of z``, in torch's own operations, which are differentiable themselves.
DERIVATIVES = {
    "none": lambda grad, z: grad,
    "relu": lambda grad, z: aten.threshold_backward(grad, z, 0),
    "gelu": lambda grad, z: aten.gelu_backward(grad, sloping(z)),
    "gelu_tanh": lambda grad, z: aten.gelu_backward(grad, sloping(z), approximate="tanh"),
    "silu": _silu_backward,
    "swiglu": _swiglu_backward,
}


def differentiable(grad: torch.Tensor, preact: torch.Tensor, activation: str) -> torch.Tensor:
    """The op's result by operations that autograd can differentiate again."""
    return DERIVATIVES[activation](grad.float(), preact.float()).to(preact.dtype)


def _check(call) -> None:
    op, preact = "activation_backward", call.preact
    check(preact, call.activation, op=op)
    if call.bias_grad and preact.ndim == 0:
        raise ValueError(f"{op}: preact has no dimension; accepted with bias_grad: [..., F]")
    gated = call.activation in GATED
    shape = (*preact.shape[:-1], activated_width(call.activation, preact.shape[-1])) if gated else preact.shape
    check_like(op, "grad", call.grad, shape, tuple({preact.dtype, torch.float32}))


def _reference(grad, preact, *, activation, bias_grad=False):
    g = grad.float().contiguous()
    z = preact.float().contiguous()
    dz = DERIVATIVES[activation](g, z).to(preact.dtype, copy=True)
    return dz, dz[None].flatten(0, -2).sum(0, dtype=torch.float32) if bias_grad else None


def samples(device: str) -> Iterator[Sample]:
    generator = torch.Generator().manual_seed(0)
    for activation in ACTIVATIONS:
        for dtype in KERNEL_DTYPES:
            grad, z = (4 * torch.randn(2, 6, 6, generator=generator) for _ in range(2))
            if activation in GATED:
                grad = grad[..., ::2]
            yield (grad.to(device, dtype), z.to(device, dtype)), {"activation": activation}
    for dtype in HALF_DTYPES:
        z = torch.randn(6, 4, generator=generator).to(device, dtype)
        yield (torch.ones((), device=device).expand(6, 4), z), {"activation": "silu"}
        yield (z, z.t().contiguous().t()), {"activation": "relu"}
        yield (z[:0], z[:0]), {"activation": "gelu"}
    for activation, dtype in itertools.product(("none", "relu", "swiglu"), KERNEL_DTYPES):
        for rows, columns in ((450, 40), (9, 10), (0, 8)):  # sums of integers, which have the same bits in any order
            grad, z = (torch.randint(-3, 4, (rows, columns), generator=generator) for _ in range(2))
            z = torch.cat([100 * (z > 0), z], -1) if activation in GATED else z
            yield (grad.to(device, dtype), z.to(device, dtype)), {"activation": activation, "bias_grad": True}
    for activation in ACTIVATIONS:
        yield (torch.ones(1, 6, device=device), extremes(activation).to(device)), {"activation": activation}


op = define(
    "activation_backward(Tensor grad, Tensor preact, *, str activation, bool bias_grad=False) -> (Tensor, Tensor)",
    _reference,
    samples=samples,
    check=_check,
)
