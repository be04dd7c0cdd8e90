"""The gradient of an activation: ``grad * activation'(preact)``, elementwise in fp32 and rounded once.

``preact`` is the ``z = x @ w + b`` that ``gemm`` saved. The op is raw; ``amp_kernels.linear`` is the
differentiable one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from .._checks.activations import (
    ACTIVATIONS,
    GATED,
    activated,
    activated_width,
    check_activation,
    check_gated_width,
    halves,
    sloping,
)
from .._checks.lists import HALF_DTYPES, KERNEL_DTYPES
from .._checks.operands import check_same_device, check_tensor
from .._dispatch.library import Sample, define
from .activation_forward import extremes

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


def check(grad: torch.Tensor, preact: torch.Tensor, activation: str, bias_grad: bool = False) -> str:
    op = "activation_backward"
    check_tensor(op, "preact", preact, KERNEL_DTYPES)
    check_tensor(op, "grad", grad, tuple({preact.dtype, torch.float32}))
    name = check_activation(op, activation)
    if preact.ndim == 0 and (name in GATED or bias_grad):
        accepted = f"activation={name!r}: [..., 2 F]" if name in GATED else "bias_grad: [..., F]"
        raise ValueError(f"{op}: preact has no dimension; accepted with {accepted}")
    check_gated_width(op, "preact", preact, -1, name)
    shape = (*preact.shape[:-1], activated_width(name, preact.shape[-1])) if name in GATED else preact.shape
    if grad.shape != shape:
        raise ValueError(
            f"{op}: grad has shape {list(grad.shape)}; accepted: that of activation(preact), {list(shape)}"
        )
    check_same_device(op, grad=grad, preact=preact)
    return name


def _reference(grad, preact, *, activation, bias_grad=False):
    check(grad, preact, activation, bias_grad)
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
)


def activation_backward(
    grad: torch.Tensor, preact: torch.Tensor, *, activation: str, bias_grad: bool = False
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``grad * activation'(preact)``, computed in fp32. Not differentiable.

    Args:
        grad: gradient of ``activation(preact)``, any strides, the dtype of ``preact`` or fp32.
        preact: the pre-activation, fp16, bf16 or fp32, any strides.
        activation: ``"none"``, ``"relu"``, ``"gelu"``, ``"gelu_tanh"`` or ``"silu"``: ``grad`` and ``preact`` have one
            shape; or ``"swiglu"``: ``grad`` is ``[..., F]``, ``preact`` ``[..., 2 F]``, gates before values.
        bias_grad: also sum the columns of the result: the gradient of a bias.

    Returns:
        A contiguous tensor of the shape and dtype of ``preact``. relu's derivative at 0 is 0, as in torch. With
        ``bias_grad`` a pair: the same, and the fp32 sums of its columns, as rounded, with the bits of ``column_sums``.

    Raises:
        TypeError: a dtype or layout is not accepted.
        ValueError: shapes, devices or ``activation`` do not fit.
    """
    name = check(grad, preact, activation, bias_grad)
    dz, sums = op(grad, preact, activation=name, bias_grad=bias_grad)
    return (dz, sums) if bias_grad else dz
