"""``linear``: ``activation(x @ weight^T + bias)``, differentiable to any order, with an autocast rule.

The op is composite: it decomposes into ``gemm`` and ``activation_backward``. fp32 and fp64 outside
autocast take torch's own linear and activation; so do torch.func transforms and forward-mode AD, in the working dtype.

Precision. Bias and activation are computed in fp32 from the fp32 sums, the result is rounded once. Under autocast ``x``
is cast once and kept for backward in 16 bits; the bias keeps its dtype; the weight is cast inside the op, or read from
its ``shadow``, a 16-bit copy that the optimizer step has written. Backward, with the saved pre-activation ``z`` in 16
bits and all sums in fp32: ``dz = grad * activation'(z)``; ``dx = dz @ weight`` in the dtype of ``x``; ``dweight = dz^T
@ x`` in the dtype of the weight (an fp32 weight gets the fp32 sums themselves); ``dbias``, the sum of the rows of
``dz``, in the dtype of the bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch

from .. import _functional as F
from .._checks.activations import ACTIVATIONS, GATED, check_activation, check_gated_width
from .._checks.lists import HALF_DTYPES
from .._checks.operands import check_bias, check_same_device, check_tensor, check_tensors, readable_bias
from .._checks.types import type_name
from .._dispatch import autocast, nodes
from .._dispatch.batch_invariant import k_blocks
from .._dispatch.library import PLAIN, define
from .._sharding.dtensor import is_dtensor, of_weight
from . import _main_grad
from ._autograd import needs_gradient, under_transform
from ._linear import Linear, LinearSplit
from ._products import check_blocks, gemm, gemm_options, working_dtype
from ._shadows import fresh_shadow, shadows_exist, with_shadow
from ._tensors import cast, flat, is_foreign, is_strided, like


def _linear(x, weight, bias=None, shadow=None, *, activation="none", compute_dtype=None, batch_invariant=0):
    dtype = working_dtype("linear", compute_dtype, x=x, weight=weight)
    _check(x, weight, bias, shadow, dtype, compute_dtype is not None, activation)
    if dtype not in HALF_DTYPES:
        return ACTIVATIONS[activation](F.linear(x, weight, bias))
    if under_transform():
        bias = None if bias is None else bias.to(dtype)
        return ACTIVATIONS[activation](F.linear(x.to(dtype), weight.to(dtype), bias))
    if batch_invariant > 1:
        _check_blocks(x, weight, batch_invariant)
    if needs_gradient(x, weight, bias):
        return autocast.apply(Linear, x, weight, bias, shadow, activation, dtype, batch_invariant)[0]
    weight16 = cast(weight, dtype) if shadow is None else shadow
    x16 = flat(cast(x, dtype))
    options = gemm_options(x16, batch_invariant=batch_invariant)
    if activation != "none":
        options["activation"] = activation
    return like(x, gemm(x16, weight16.t(), readable_bias(bias, dtype), **options)[0])


def _linear_split(x, weight, bias=None, shadow=None, *, split, compute_dtype=None, batch_invariant=0):
    dtype = working_dtype("linear", compute_dtype, x=x, weight=weight)
    if not needs_gradient(x, weight, bias) or dtype not in HALF_DTYPES or under_transform():
        out = _linear(x, weight, bias, shadow, compute_dtype=compute_dtype, batch_invariant=batch_invariant)
        return list(out.split(split, -1))
    _check(x, weight, bias, shadow, dtype, compute_dtype is not None, "none")
    if batch_invariant > 1:
        _check_blocks(x, weight, batch_invariant)
    return list(autocast.apply(LinearSplit, x, weight, bias, shadow, split, dtype, batch_invariant)[: len(split)])


def _check_blocks(x, weight, batch_invariant: int) -> None:
    out_features = {"out_features": weight.shape[0]} if needs_gradient(x) else {}
    check_blocks("linear", batch_invariant, in_features=weight.shape[1], **out_features)


def _check(x, weight, bias, shadow, dtype: torch.dtype, autocast: bool, activation: str) -> None:
    if x.ndim == 0 or weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear: x has shape {list(x.shape)} and weight {list(weight.shape)}; accepted: [..., in_features] and "
            "[out_features, in_features]"
        )
    check_bias("linear", bias, weight.shape[0], dtype, autocast)
    if shadow is not None:
        check_shadow("linear", "shadow", shadow, weight, dtype)
    check_same_device("linear", x=x, weight=weight, bias=bias, shadow=shadow)
    if check_activation("linear", activation) in GATED:
        check_gated_width("linear", "weight", weight, 0, activation)


def check_shadow(op: str, name: str, shadow: torch.Tensor | None, weight: torch.Tensor, dtype: torch.dtype) -> None:
    if shadow is None:
        return
    check_tensor(op, name, shadow, (dtype,))
    if shadow.shape != weight.shape or dtype not in HALF_DTYPES:
        raise ValueError(
            f"{op}: {name} has shape {list(shadow.shape)} and dtype {shadow.dtype}; accepted: a float16 or "
            f"bfloat16 copy of the weight, {list(weight.shape)}"
        )


op = define(
    "linear(Tensor x, Tensor weight, Tensor? bias=None, Tensor? shadow=None, *, "
    'str activation="none", ScalarType? compute_dtype=None, int batch_invariant=0) -> Tensor',
    _linear,
    composite=True,
)

autocast.lower_precision(op, with_shadow(3))


split_op = define(
    "linear_split(Tensor x, Tensor weight, Tensor? bias=None, Tensor? shadow=None, *, int[] split, "
    "ScalarType? compute_dtype=None, int batch_invariant=0) -> Tensor[]",
    _linear_split,
    composite=True,
)

autocast.lower_precision(split_op, with_shadow(3))


@overload
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    split: None = None,
) -> torch.Tensor: ...
@overload
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: None = None,
    split: Sequence[int],
) -> tuple[torch.Tensor, ...]: ...
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    split: Sequence[int] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """``activation(x @ weight^T + bias)``: torch.nn.functional.linear with a fused activation, differentiable.

    Args:
        x: ``[..., in_features]``, any strides.
        weight: ``[out_features, in_features]``, any strides.
        bias: ``[out_features]``; for 16-bit work in the working dtype or fp32, in autocast in any of the three, otherwise in
            the dtype of ``x``.
        activation: ``None``, ``"relu"``, ``"gelu"`` (erf), ``"gelu_tanh"``, ``"silu"`` or ``"swiglu"``, computed in
            fp32 before the one rounding, at infinity as :func:`gelu`. ``"swiglu"`` is ``silu(gate) * up``; the first half of
            the output features are the gates.
        split: sizes that add up to ``out_features``: the result is ``linear(...).split(split, -1)``. On Hopper the backward
            reads the gradients of two or three pieces in place, such as attention's of q, k and v, if the sizes are
            multiples of 64; otherwise it concatenates them once. Without an activation.

    Returns:
        ``[..., out_features]`` in the working dtype, with ``"swiglu"`` ``[..., out_features / 2]``. With ``split`` a tuple of
        views of that.

    The working dtype is that of ``x`` and ``weight``, which must agree: fp16 or bf16 runs this package's GEMM with fp32
    accumulation, fp32 and fp64 run torch's own linear. Inside torch.autocast it is autocast's dtype, whatever mix of
    fp16, bf16 and fp32 comes in, and every argument gets its gradient in its own dtype. Saved for backward: ``x`` and
    ``weight`` in 16 bits, and with an activation the 16-bit pre-activation. A nested or sparse ``x`` runs torch's own
    linear, and so does a ``weight`` that is sparse or of a class with a linear of its own, such as torchao's quantised weights.

    DTensors: each rank multiplies what it holds, placed as torch's linear places it; the ``weight`` stays in place. An
    activation is fused unless it needs what other ranks have (a sum of summands, the other half of ``"swiglu"``).

    Raises:
        TypeError: a dtype or layout is not accepted; outside autocast dtypes are not mixed.
        ValueError: shapes, devices, meshes, ``activation`` or ``split`` do not fit.

    Examples:
        >>> x, weight = torch.ones(2, 4), torch.full((3, 4), 0.5, requires_grad=True)
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     y = ak.linear(x, weight, activation="relu")
        >>> y.data
        tensor([[2., 2., 2.],
                [2., 2., 2.]], dtype=torch.bfloat16)
        >>> y.sum().backward()
        >>> weight.grad.dtype
        torch.float32
    """
    if split is not None:
        return _in_pieces(x, weight, bias, activation, split)
    if nodes.may_serve() and not _main_grad.in_use():
        shadow = fresh_shadow(weight, autocast.dtype_on(weight.device.type)) if shadows_exist() else None
        out = nodes.linear(x, weight, bias, shadow, "none" if activation is None else activation)
        if out is not None:
            return out
    if not (type(x) in PLAIN and type(weight) in PLAIN and is_strided(x) and is_strided(weight)):
        activation = check_activation("linear", activation)
        check_tensors("linear", x=x, weight=weight)
        check_tensors("linear", optional=True, bias=bias)
        if is_dtensor(x) or is_dtensor(weight):
            return _of_dtensors(x, weight, bias, activation)
        if not is_strided(x) or is_foreign(weight):
            return ACTIVATIONS[activation](F.linear(x, weight, bias))
    invariant = k_blocks()
    if autocast.eager(x, weight):
        activation = "none" if activation is None else activation
        dtype = autocast.dtype_on(x.device.type)
        shadow = fresh_shadow(weight, dtype)
        return _linear(x, weight, bias, shadow, activation=activation, compute_dtype=dtype, batch_invariant=invariant)
    return op(x, weight, bias, activation=check_activation("linear", activation), batch_invariant=invariant)


def _in_pieces(x, weight, bias, activation: str | None, split: Sequence[int]) -> tuple[torch.Tensor, ...]:
    check_tensors("linear", x=x, weight=weight)
    check_tensors("linear", optional=True, bias=bias)
    if not isinstance(split, Sequence) or not all(hasattr(size, "__index__") for size in split):
        raise TypeError(
            f"linear: split is {split!r}, of type {type_name(split)}; accepted: a sequence of whole numbers"
        )
    sizes = list(split)
    if activation not in (None, "none"):
        raise ValueError(f"linear: activation is {activation!r}; accepted with split: None")
    if weight.ndim == 2 and (min(sizes, default=0) < 0 or sum(sizes) != weight.shape[0]):
        raise ValueError(f"linear: split is {sizes}; accepted: sizes that add up to {weight.shape[0]}, out_features")
    if is_dtensor(x) or is_dtensor(weight) or not is_strided(x) or is_foreign(weight):
        return tuple(linear(x, weight, bias).split(sizes, -1))
    invariant = k_blocks()
    if not autocast.eager(x, weight):
        return tuple(split_op(x, weight, bias, split=sizes, batch_invariant=invariant))
    dtype = autocast.dtype_on(x.device.type)
    shadow = fresh_shadow(weight, dtype)
    return tuple(_linear_split(x, weight, bias, shadow, split=sizes, compute_dtype=dtype, batch_invariant=invariant))


def _of_dtensors(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    """``linear`` of each rank's piece in 16 bits; torch's own in others."""
    if (autocast.dtype_on(x.device.type) or x.dtype) not in HALF_DTYPES or x.dtype == torch.float64:
        return ACTIVATIONS[activation](F.linear(x, weight, bias))
    own = "none" if _needs_others(weight, activation) else activation
    out = of_weight("linear", lambda *pieces: linear(*pieces, activation=own), x, weight, bias)
    return out if own == activation else ACTIVATIONS[activation](out)


def _needs_others(weight: torch.Tensor, activation: str) -> bool:
    """True if the activation of an element needs pre-activations that are on other ranks."""
    return any(placed.is_shard(1) or (placed.is_shard(0) and activation in GATED) for placed in weight.placements)
