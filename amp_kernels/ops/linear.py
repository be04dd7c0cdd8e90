"""``linear``: ``activation(x @ weight^T + bias)``, differentiable to any order, with an autocast rule.

The op is composite: it decomposes into ``gemm``, ``gemm_preact`` and ``activation_backward``. fp32 and fp64 outside
autocast take torch's own linear and activation; so do torch.func transforms and forward-mode AD, in the working dtype.

Precision. Bias and activation are computed in fp32 from the fp32 sums, the result is rounded once. Under autocast ``x``
is cast once and kept for backward in 16 bits; the bias keeps its dtype; the weight is cast inside the op, or read from
its ``shadow``, a 16-bit copy that the optimizer step has written. Backward, with the saved pre-activation ``z`` in 16
bits and all sums in fp32: ``dz = grad * activation'(z)``; ``dx = dz @ weight`` in the dtype of ``x``; ``dweight = dz^T
@ x`` in the dtype of the weight (an fp32 weight gets the fp32 sums themselves); ``dbias``, the sum of the rows of
``dz``, in the dtype of the bias.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from .. import _autocast
from .._library import Sample, define
from ._lists import FLOATS
from .activation_backward import ACTIVATION_BACKWARD, differentiable_activation_backward
from .gemm import (
    ACTIVATIONS,
    GEMM,
    GEMM_PREACT,
    OPERAND_DTYPES,
    check_activation,
    check_bias,
    check_same_device,
    check_tensor,
)
from .matmul import add_gradient, differentiable_product, under_transform, working_dtype


def _flat(x: torch.Tensor) -> torch.Tensor:
    """``[..., K]`` as ``[rows, K]``."""
    return x.unsqueeze(0) if x.ndim == 1 else x.flatten(0, -2)


class _Linear(torch.autograd.Function):
    """What autograd follows of ``linear``.

    The 16-bit copies of x and weight and the pre-activation are returned beside the result: as outputs of this node
    they carry their dependence on the inputs into a backward that is itself recorded, and no fp32 copy need be kept for
    it.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, shadow, activation, compute_dtype):
        ctx.set_materialize_grads(False)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        x16 = x.to(compute_dtype)
        weight16 = weight.to(compute_dtype) if shadow is None else shadow
        preact = None
        if activation == "none":
            out = GEMM(_flat(x16), weight16.t(), bias)
        else:
            out, preact = GEMM_PREACT(_flat(x16), weight16.t(), bias, activation=activation)
            preact = preact.view(*x.shape[:-1], preact.shape[-1])
        ctx.activation = activation
        ctx.x_shape = x.shape
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        # The fp32 weight is kept beside its shadow for a recorded backward, which must reach the weight itself.
        ctx.save_for_backward(
            x16 if needs_weight else None,
            weight16 if needs_x else None,
            preact,
            weight if needs_x and shadow is not None else None,
        )
        return (
            out.view(*x.shape[:-1], out.shape[-1]),
            preact,
            x16 if needs_weight and x16 is not x else None,
            weight16 if needs_x and shadow is None and weight16 is not weight else None,
        )

    @staticmethod
    def backward(ctx, grad, grad_preact, grad_x16, grad_weight16):
        x16, weight16, preact, weight = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        if weight is not None and torch.is_grad_enabled():
            weight16 = weight.to(weight16.dtype)
        dz = _preactivation_gradient(ctx.activation, grad, grad_preact, preact)
        grad_x = grad_weight = grad_bias = None
        if dz is not None:
            dz = _flat(dz)
            if ctx.needs_input_grad[0]:
                grad_x = differentiable_product(dz, weight16, x_dtype).view(ctx.x_shape)
            if ctx.needs_input_grad[1]:
                grad_weight = differentiable_product(dz.t(), _flat(x16), weight_dtype)
            if ctx.needs_input_grad[2]:
                grad_bias = dz.sum(0, dtype=torch.float32).to(bias_dtype)
        grad_x = add_gradient(grad_x, grad_x16, x_dtype)
        grad_weight = add_gradient(grad_weight, grad_weight16, weight_dtype)
        return grad_x, grad_weight, grad_bias, None, None, None


def _preactivation_gradient(
    activation: str, grad: torch.Tensor | None, grad_preact: torch.Tensor | None, preact: torch.Tensor | None
) -> torch.Tensor | None:
    """The gradient of ``z``; ``grad_preact`` is what a differentiated backward sent to ``z`` directly."""
    if grad is None or activation == "none":
        return grad if grad is not None else grad_preact
    if torch.is_grad_enabled():
        dz = differentiable_activation_backward(grad, preact, activation)
    else:
        dz = ACTIVATION_BACKWARD(grad, preact, activation=activation)
    return add_gradient(dz, grad_preact, dz.dtype)


def _linear(x, weight, bias=None, shadow=None, *, activation="none", compute_dtype=None):
    dtype = working_dtype("linear", compute_dtype, x=x, weight=weight)
    _check(x, weight, bias, shadow, dtype, activation)
    if dtype not in OPERAND_DTYPES:
        return ACTIVATIONS[activation](F.linear(x, weight, bias))
    if under_transform():
        bias = None if bias is None else bias.to(dtype)
        return ACTIVATIONS[activation](F.linear(x.to(dtype), weight.to(dtype), bias))
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        return _Linear.apply(x, weight, bias, shadow, activation, dtype)[0]
    weight16 = weight.to(dtype) if shadow is None else shadow
    out = GEMM(_flat(x.to(dtype)), weight16.t(), bias, activation=activation)
    return out.view(*x.shape[:-1], out.shape[-1])


def _check(x, weight, bias, shadow, dtype: torch.dtype, activation: str) -> None:
    if x.ndim == 0 or weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear: x has shape {list(x.shape)} and weight {list(weight.shape)}; accepted: [..., in_features] and "
            "[out_features, in_features]"
        )
    check_bias("linear", bias, weight.shape[0], tuple({dtype, torch.float32}) if dtype in OPERAND_DTYPES else (dtype,))
    if shadow is not None:
        check_tensor("linear", "shadow", shadow, (dtype,))
        if shadow.shape != weight.shape or dtype not in OPERAND_DTYPES:
            raise ValueError(
                f"linear: shadow has shape {list(shadow.shape)} and dtype {shadow.dtype}; accepted: a float16 or "
                f"bfloat16 copy of weight, {list(weight.shape)}"
            )
    check_same_device("linear", x=x, weight=weight, bias=bias, shadow=shadow)
    check_activation("linear", activation)


def _samples(device: str) -> Iterator[Sample]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype, grad: bool = True) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_(grad)

    for i, dtype in enumerate(FLOATS):
        activation = list(ACTIVATIONS)[i + 1]
        yield (normal(4, 5, dtype=dtype), normal(3, 5, dtype=dtype)), {}
        yield (
            (normal(2, 4, 5, dtype=dtype), normal(3, 5, dtype=dtype), normal(3, dtype=dtype)),
            {"activation": activation},
        )
    for dtype in OPERAND_DTYPES:
        x, weight, bias = (normal(*shape, dtype=torch.float32) for shape in ((4, 5), (3, 5), (3,)))
        yield (x, weight, bias), {"activation": "gelu", "compute_dtype": dtype}
        yield (x, weight, None, weight.detach().to(dtype)), {"activation": "silu", "compute_dtype": dtype}
        yield (normal(5, dtype=dtype, grad=False), weight), {"compute_dtype": dtype}
        yield (normal(4, 5, dtype=dtype, grad=False), normal(3, 5, dtype=dtype, grad=False)), {"activation": "relu"}


LINEAR = define(
    "linear(Tensor x, Tensor weight, Tensor? bias=None, Tensor? shadow=None, *, "
    'str activation="none", ScalarType? compute_dtype=None) -> Tensor',
    _linear,
    samples=_samples,
    differentiable=True,
    composite=True,
)


def _with_shadow(args: tuple, kwargs: dict, dtype: torch.dtype) -> tuple[tuple, dict]:
    """Completes a call under autocast with the weight's shadow, if the optimizer keeps a fresh one in autocast's
    dtype."""
    weight = args[1]
    if len(args) > 3 or "shadow" in kwargs or weight.dtype == dtype:
        return args, kwargs
    from ..optim._state import fresh_shadow  # the optimizers import the ops, so not at the top

    shadow = fresh_shadow(weight, dtype)
    return args, kwargs if shadow is None else {**kwargs, "shadow": shadow}


_autocast.lower_precision(LINEAR, _with_shadow)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
) -> torch.Tensor:
    """``activation(x @ weight^T + bias)``: torch.nn.functional.linear with a fused activation, differentiable.

    Args:
        x: ``[..., in_features]``, any strides.
        weight: ``[out_features, in_features]``, any strides.
        bias: ``[out_features]``; for 16-bit work in the working dtype or fp32, otherwise in the dtype of ``x``.
        activation: ``None``, ``"relu"``, ``"gelu"`` (erf), ``"gelu_tanh"`` or ``"silu"``, computed in fp32 before the
            one rounding.

    Returns:
        ``[..., out_features]`` in the working dtype.

    The working dtype is that of ``x`` and ``weight``, which must agree: fp16 or bf16 runs this package's GEMM with fp32
    accumulation, fp32 and fp64 run torch's own linear. Inside torch.autocast it is autocast's dtype, whatever mix of
    fp16, bf16 and fp32 comes in, and every argument gets its gradient in its own dtype. Saved for backward: ``x`` and
    ``weight`` in 16 bits, and with an activation the 16-bit pre-activation.

    Raises:
        TypeError: a dtype or layout is not accepted; outside autocast dtypes are not mixed.
        ValueError: shapes, devices or ``activation`` do not fit.
    """
    return LINEAR(x, weight, bias, activation=check_activation("linear", activation))
