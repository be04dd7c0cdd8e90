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

from collections.abc import Iterator
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from .._checks.lists import FLOATS
from .._checks.operands import (
    ACTIVATIONS,
    GATED,
    OPERAND_DTYPES,
    check_activation,
    check_bias,
    check_gated_width,
    check_same_device,
    check_tensor,
    readable_bias,
)
from .._dispatch import autocast, nodes
from .._dispatch.batch_invariant import is_batch_invariant
from .._dispatch.library import Sample, define
from .._raw import activation_backward
from .._raw._column_sums import column_sums
from .._raw.gemm import gemm_op
from .._sharding.dtensor import is_dtensor, of_weight
from . import _main_grad
from ._products import (
    add_gradient,
    cast,
    differentiable_product,
    flat,
    gemm_options,
    is_dense,
    like,
    plainly_16_bit,
    sampler,
    under_transform,
    working_dtype,
)
from ._shadows import fresh_shadow, shadows_exist


class _Linear(torch.autograd.Function):
    """What autograd follows of ``linear``.

    The 16-bit copies of x and weight and the pre-activation are returned beside the result: as outputs of this node
    they carry their dependence on the inputs into a backward that is itself recorded, and no fp32 copy need be kept for
    it.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, shadow, activation, compute_dtype, batch_invariant):
        ctx.set_materialize_grads(False)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        _main_grad.refuse_data_parallel(weight)
        x16 = cast(x, compute_dtype)
        weight16 = cast(weight, compute_dtype) if shadow is None else shadow
        options = gemm_options(x16, batch_invariant=batch_invariant)
        if activation != "none":
            options |= {"activation": activation, "preact": True}
        out, preact = gemm_op(flat(x16), weight16.t(), readable_bias(bias, compute_dtype), **options)
        if preact is not None:
            preact = like(x, preact)
        ctx.activation = activation
        ctx.batch_invariant = batch_invariant
        ctx.x_shape = x.shape
        ctx.dtypes = x.dtype, gradient_dtype(weight), None if bias is None else gradient_dtype(bias)
        # The fp32 weight is kept beside its shadow for a recorded backward, which must reach the weight itself.
        ctx.save_for_backward(
            x16 if needs_weight else None,
            weight16 if needs_x else None,
            preact,
            weight if needs_x and shadow is not None else None,
        )
        return (
            like(x, out),
            preact,
            x16 if needs_weight and x16 is not x else None,
            weight16 if needs_x and shadow is None and weight16 is not weight else None,
        )

    @staticmethod
    def backward(ctx, grad, grad_preact, grad_x16, grad_weight16):
        x16, weight16, preact, weight = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if weight is not None and torch.is_grad_enabled():
            weight16 = weight.to(weight16.dtype)
        dz = preactivation_gradient(ctx.activation, grad, grad_preact, preact)
        grad_x = grad_weight = grad_bias = None
        if dz is not None:
            dz = flat(dz)
            if needs_x:
                grad_x = differentiable_product(dz, weight16, x_dtype, 1.0, ctx.batch_invariant)
                grad_x = grad_x if len(ctx.x_shape) == 2 else grad_x.view(ctx.x_shape)
            if needs_weight:
                grad_weight = weight_gradient(ctx, 1, dz, flat(x16), weight_dtype)
            if needs_bias:
                grad_bias = cast(column_sums(dz), bias_dtype)
        if grad_x16 is not None:
            grad_x = add_gradient(grad_x, grad_x16, x_dtype)
        if grad_weight16 is not None:
            grad_weight = add_gradient(grad_weight, grad_weight16, weight_dtype)
        return grad_x, grad_weight, grad_bias, None, None, None, None


def _backward_of_node(grads, saved, needs_input_grad, dtypes, x_shape, compute_dtype, activation):
    """The backward of :class:`_Linear` for a node in C++."""
    ctx = SimpleNamespace(
        saved_tensors=saved,
        dtypes=(*dtypes, None)[:3],
        needs_input_grad=(*needs_input_grad, False)[:3],
        next_functions=((None, 0),) * 3,
        x_shape=x_shape,
        activation=activation,
        batch_invariant=False,
    )
    return _Linear.backward(ctx, *grads)[: len(dtypes)]


nodes.FORMULAS["linear"] = _backward_of_node


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The dtype in which a gradient is wanted: the tensor's own, unless it is a leaf that asks for another one."""
    wide = parameter.dtype not in OPERAND_DTYPES or not parameter.is_leaf
    return parameter.dtype if wide else parameter.grad_dtype or parameter.dtype


def weight_gradient(ctx, position: int, dz: torch.Tensor, x: torch.Tensor, weight_dtype: torch.dtype) -> torch.Tensor:
    """``dz^T @ x`` for the weight that is input number ``position`` of the node ``ctx``: into its ``main_grad`` where it
    has one, otherwise rounded once."""
    rest = _main_grad.accumulate(ctx, position, dz, x)
    return differentiable_product(dz.t(), x, weight_dtype) if rest is None else rest


def preactivation_gradient(
    activation: str, grad: torch.Tensor | None, grad_preact: torch.Tensor | None, preact: torch.Tensor | None
) -> torch.Tensor | None:
    """The gradient of ``z``; ``grad_preact`` is what a differentiated backward sent to ``z`` directly."""
    if grad is None or activation == "none":
        return grad if grad is not None else grad_preact
    if torch.is_grad_enabled():
        dz = activation_backward.differentiable(grad, preact, activation)
    else:
        dz = activation_backward.op(grad, preact, activation=activation)
    return add_gradient(dz, grad_preact, dz.dtype)


def _linear(x, weight, bias=None, shadow=None, *, activation="none", compute_dtype=None, batch_invariant=False):
    if not _plainly_right(x, weight, bias, shadow, activation, compute_dtype):
        dtype = working_dtype("linear", compute_dtype, x=x, weight=weight)
        _check(x, weight, bias, shadow, dtype, compute_dtype is not None, activation)
    dtype = compute_dtype if compute_dtype is not None and x.dtype != torch.float64 else x.dtype
    if dtype not in OPERAND_DTYPES:
        return ACTIVATIONS[activation](F.linear(x, weight, bias))
    if under_transform():
        bias = None if bias is None else bias.to(dtype)
        return ACTIVATIONS[activation](F.linear(x.to(dtype), weight.to(dtype), bias))
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return autocast.apply(_Linear, x, weight, bias, shadow, activation, dtype, batch_invariant)[0]
    weight16 = cast(weight, dtype) if shadow is None else shadow
    x16 = flat(cast(x, dtype))
    options = gemm_options(x16, batch_invariant=batch_invariant)
    if activation != "none":
        options["activation"] = activation
    return like(x, gemm_op(x16, weight16.t(), readable_bias(bias, dtype), **options)[0])


def _plainly_right(x, weight, bias, shadow, activation: str, compute_dtype: torch.dtype | None) -> bool:
    """A quick yes to the commonest calls: everything that :func:`_check` asks, in as few questions as possible."""
    dtype = compute_dtype or x.dtype
    shape = weight.shape
    return (
        plainly_16_bit(x, weight, compute_dtype)
        and shadow is None
        and (
            bias is None
            or (bias.shape == shape[:1] and bias.dtype in (torch.float32, dtype) and bias.device == x.device)
        )
        and len(shape) == 2
        and x.ndim > 0
        and x.shape[-1] == shape[1]
        and activation in ACTIVATIONS
        and activation not in GATED
    )


def _check(x, weight, bias, shadow, dtype: torch.dtype, autocast: bool, activation: str) -> None:
    if x.ndim == 0 or weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear: x has shape {list(x.shape)} and weight {list(weight.shape)}; accepted: [..., in_features] and "
            "[out_features, in_features]"
        )
    check_bias("linear", bias, weight.shape[0], dtype, autocast)
    check_shadow("linear", "shadow", shadow, weight, dtype)
    check_same_device("linear", x=x, weight=weight, bias=bias, shadow=shadow)
    check_gated_width("linear", "weight", weight, 0, check_activation("linear", activation))


def check_shadow(op: str, name: str, shadow: torch.Tensor | None, weight: torch.Tensor, dtype: torch.dtype) -> None:
    if shadow is None:
        return
    check_tensor(op, name, shadow, (dtype,))
    if shadow.shape != weight.shape or dtype not in OPERAND_DTYPES:
        raise ValueError(
            f"{op}: {name} has shape {list(shadow.shape)} and dtype {shadow.dtype}; accepted: a float16 or "
            f"bfloat16 copy of the weight, {list(weight.shape)}"
        )


def samples(device: str) -> Iterator[Sample]:
    normal = sampler(device)

    for i, dtype in enumerate(FLOATS):
        yield (normal(4, 5, dtype=dtype), normal(3, 5, dtype=dtype)), {}
        for activation in (list(ACTIVATIONS)[i + 1], "swiglu"):
            yield (
                (normal(2, 4, 5, dtype=dtype), normal(6, 5, dtype=dtype), normal(6, dtype=dtype)),
                {"activation": activation},
            )
    for dtype in OPERAND_DTYPES:
        x, weight, bias = (normal(*shape, dtype=torch.float32) for shape in ((4, 5), (3, 5), (3,)))
        yield (x, weight, bias), {"activation": "gelu", "compute_dtype": dtype}
        yield (x, weight, None, weight.detach().to(dtype)), {"activation": "silu", "compute_dtype": dtype}
        yield (normal(5, dtype=dtype, grad=False), weight), {"compute_dtype": dtype}
        yield (
            (normal(4, 5, dtype=dtype, grad=False), normal(3, 5, dtype=dtype, grad=False)),
            {
                "activation": "relu",
                "batch_invariant": True,
            },
        )


op = define(
    "linear(Tensor x, Tensor weight, Tensor? bias=None, Tensor? shadow=None, *, "
    'str activation="none", ScalarType? compute_dtype=None, bool batch_invariant=False) -> Tensor',
    _linear,
    samples=samples,
    composite=True,
)


def _with_shadow(args: tuple, kwargs: dict, dtype: torch.dtype) -> tuple[tuple, dict]:
    """Completes a call under autocast with the weight's shadow."""
    if len(args) > 3 or "shadow" in kwargs:
        return args, kwargs
    shadow = fresh_shadow(args[1], dtype)
    return args, kwargs if shadow is None else {**kwargs, "shadow": shadow}


autocast.lower_precision(op, _with_shadow)


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
        bias: ``[out_features]``; for 16-bit work in the working dtype or fp32, in autocast in any of the three, otherwise in
            the dtype of ``x``.
        activation: ``None``, ``"relu"``, ``"gelu"`` (erf), ``"gelu_tanh"``, ``"silu"`` or ``"swiglu"``, computed in
            fp32 before the one rounding. ``"swiglu"`` is ``silu(gate) * up``; the first half of the output features are
            the gates.

    Returns:
        ``[..., out_features]`` in the working dtype, with ``"swiglu"`` ``[..., out_features / 2]``.

    The working dtype is that of ``x`` and ``weight``, which must agree: fp16 or bf16 runs this package's GEMM with fp32
    accumulation, fp32 and fp64 run torch's own linear. Inside torch.autocast it is autocast's dtype, whatever mix of
    fp16, bf16 and fp32 comes in, and every argument gets its gradient in its own dtype. Saved for backward: ``x`` and
    ``weight`` in 16 bits, and with an activation the 16-bit pre-activation. A nested or sparse ``x`` runs torch's own
    linear.

    DTensors: each rank multiplies what it holds, placed as torch's linear places it; the ``weight`` stays where it lies. An
    activation is fused unless it needs what other ranks have (a sum of summands, the other half of ``"swiglu"``).

    Raises:
        TypeError: a dtype or layout is not accepted; outside autocast dtypes are not mixed.
        ValueError: shapes, devices, meshes or ``activation`` do not fit.

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
    if nodes.may_serve() and not _main_grad.in_use():
        shadow = fresh_shadow(weight, autocast.dtype_on(weight.device.type)) if shadows_exist() else None
        out = nodes.linear(x, weight, bias, shadow, "none" if activation is None else activation)
        if out is not None:
            return out
    activation = check_activation("linear", activation)
    if is_dtensor(x) or is_dtensor(weight):
        return _of_dtensors(x, weight, bias, activation)
    if not is_dense(x):
        return ACTIVATIONS[activation](F.linear(x, weight, bias))
    invariant = is_batch_invariant()
    if autocast.eager(x, weight):
        dtype = autocast.dtype_on(x.device.type)
        shadow = fresh_shadow(weight, dtype)
        return _linear(x, weight, bias, shadow, activation=activation, compute_dtype=dtype, batch_invariant=invariant)
    return op(x, weight, bias, activation=activation, batch_invariant=invariant)


def _of_dtensors(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    """``linear`` of each rank's piece in 16 bits; torch's own in others."""
    if (autocast.dtype_on(x.device.type) or x.dtype) not in OPERAND_DTYPES or x.dtype == torch.float64:
        return ACTIVATIONS[activation](F.linear(x, weight, bias))
    own = "none" if _needs_others(weight, activation) else activation
    out = of_weight("linear", lambda *pieces: linear(*pieces, activation=own), x, weight, bias)
    return out if own == activation else ACTIVATIONS[activation](out)


def _needs_others(weight: torch.Tensor, activation: str) -> bool:
    """Whether a rank with a piece of a DTensor has not all that the activation of one of its elements is made of."""
    return any(placed.is_shard(1) or (placed.is_shard(0) and activation in GATED) for placed in weight.placements)
