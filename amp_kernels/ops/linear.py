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

import torch
import torch.nn.functional as F

from .._checks.activations import ACTIVATIONS, GATED, check_activation, check_gated_width
from .._checks.lists import FLOATS, HALF_DTYPES
from .._checks.operands import check_bias, check_same_device, check_tensor, check_tensors, readable_bias
from .._dispatch import autocast, nodes
from .._dispatch.batch_invariant import k_blocks
from .._dispatch.library import Sample, define
from .._dispatch.samples import Normal
from .._raw import activation_backward
from .._raw.column_sums import column_sums
from .._sharding.dtensor import is_dtensor, of_weight
from . import _main_grad
from ._autograd import add_gradient, needs_gradient, under_transform
from ._products import check_blocks, differentiable_product, gemm, gemm_options, working_dtype
from ._shadows import fresh_shadow, shadows_exist, with_shadow
from ._tensors import cast, flat, is_strided, like


class _Linear(torch.autograd.Function):
    """The autograd node of ``linear``.

    The 16-bit copies of x and weight and the pre-activation are outputs too. So a recorded backward sees their dependence
    on the inputs, and no fp32 copy is kept for it.
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
        out, preact = gemm(flat(x16), weight16.t(), readable_bias(bias, compute_dtype), **options)
        if preact is not None:
            preact = like(x, preact)
        ctx.activation = activation
        ctx.batch_invariant = batch_invariant
        if batch_invariant:
            _main_grad.prepare(bias)
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
    def backward(ctx, *grads):
        gradients = _gradients(
            grads,
            ctx.saved_tensors,
            ctx.needs_input_grad,
            ctx.dtypes,
            ctx.x_shape,
            ctx.activation,
            ctx.batch_invariant,
            ctx,
        )
        return *gradients, None, None, None, None


def _gradients(
    grads, saved, needs_input_grad, dtypes, x_shape, activation, batch_invariant=0, ctx=None
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of x, weight and bias. ``grads`` and ``saved`` stand in the order of :class:`_Linear`, whose node is ``ctx``."""
    grad, grad_preact, grad_x16, grad_weight16 = grads
    x16, weight16, preact, weight = saved
    x_dtype, weight_dtype, bias_dtype = dtypes
    needs_x, needs_weight, needs_bias = needs_input_grad[:3]
    if weight is not None and torch.is_grad_enabled():
        weight16 = weight.to(weight16.dtype)
    dz = preactivation_gradient(activation, grad, grad_preact, preact)
    grad_x = grad_weight = grad_bias = None
    if dz is not None:
        dz = flat(dz)
        if needs_x:
            grad_x = differentiable_product(dz, weight16, x_dtype, 1.0, batch_invariant)
            grad_x = grad_x if len(x_shape) == 2 else grad_x.view(x_shape)
        if needs_weight:
            grad_weight = weight_gradient(ctx, 1, dz, flat(x16), weight_dtype, batch_invariant)
        if needs_bias:
            grad_bias = bias_gradient(ctx, 2, dz, bias_dtype, batch_invariant)
    return add_gradient(grad_x, grad_x16, x_dtype), add_gradient(grad_weight, grad_weight16, weight_dtype), grad_bias


def _node_gradients(grads, saved, needs_input_grad, dtype_names, x_shape, compute_dtype, activation):
    """:func:`_gradients` for a node in C++, which has two or three inputs and knows dtypes by name."""
    dtypes = [getattr(torch, name) for name in dtype_names]
    needs_input_grad, dtypes = (*needs_input_grad, False)[:3], (*dtypes, None)[:3]
    return _gradients(grads, saved, needs_input_grad, dtypes, x_shape, activation)[: len(dtype_names)]


nodes.FORMULAS["linear"] = _node_gradients


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The dtype in which a gradient is wanted: the tensor's own, unless it is a leaf that asks for another one."""
    wide = parameter.dtype not in HALF_DTYPES or not parameter.is_leaf
    return parameter.dtype if wide else parameter.grad_dtype or parameter.dtype


def weight_gradient(
    ctx: torch.autograd.function.FunctionCtx | None,
    position: int,
    dz: torch.Tensor,
    x: torch.Tensor,
    dtype: torch.dtype,
    batch_invariant: int,
) -> torch.Tensor:
    """``dz^T @ x``, rounded once, or what autograd still has to add if it went to the weight's ``main_grad``; ``ctx`` and ``position``
    as in :func:`_main_grad.into`. A sum over rows is one chain, whatever the number of blocks of K."""
    chained = batch_invariant > 0
    rest = None if ctx is None else _main_grad.accumulate(ctx, position, dz, x, chained)
    return differentiable_product(dz.t(), x, dtype, 1.0, int(chained)) if rest is None else rest


def bias_gradient(
    ctx: torch.autograd.function.FunctionCtx | None,
    position: int,
    dz: torch.Tensor,
    dtype: torch.dtype,
    batch_invariant: int,
) -> torch.Tensor:
    """The sum of the rows of ``dz``; like :func:`weight_gradient`."""
    if ctx is None or batch_invariant == 0 or torch.is_grad_enabled():
        return cast(column_sums(dz), dtype)
    total = _main_grad.Total(ctx, position, dz.shape[1:], dz.device)
    total.add_rows(dz)
    return total.gradient(dtype)


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


def _linear(x, weight, bias=None, shadow=None, *, activation="none", compute_dtype=None, batch_invariant=0):
    dtype = working_dtype("linear", compute_dtype, x=x, weight=weight)
    _check(x, weight, bias, shadow, dtype, compute_dtype is not None, activation)
    if dtype not in HALF_DTYPES:
        return ACTIVATIONS[activation](F.linear(x, weight, bias))
    if under_transform():
        bias = None if bias is None else bias.to(dtype)
        return ACTIVATIONS[activation](F.linear(x.to(dtype), weight.to(dtype), bias))
    out_features = {"out_features": weight.shape[0]} if needs_gradient(x) else {}
    check_blocks("linear", batch_invariant, in_features=weight.shape[1], **out_features)
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return autocast.apply(_Linear, x, weight, bias, shadow, activation, dtype, batch_invariant)[0]
    weight16 = cast(weight, dtype) if shadow is None else shadow
    x16 = flat(cast(x, dtype))
    options = gemm_options(x16, batch_invariant=batch_invariant)
    if activation != "none":
        options["activation"] = activation
    return like(x, gemm(x16, weight16.t(), readable_bias(bias, dtype), **options)[0])


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
    if shadow.shape != weight.shape or dtype not in HALF_DTYPES:
        raise ValueError(
            f"{op}: {name} has shape {list(shadow.shape)} and dtype {shadow.dtype}; accepted: a float16 or "
            f"bfloat16 copy of the weight, {list(weight.shape)}"
        )


def samples(device: str) -> Iterator[Sample]:
    normal = Normal(device, grad=True)

    for i, dtype in enumerate(FLOATS):
        yield (normal(4, 5, dtype=dtype), normal(3, 5, dtype=dtype)), {}
        for activation in (list(ACTIVATIONS)[i + 1], "swiglu"):
            yield (
                (normal(2, 4, 5, dtype=dtype), normal(6, 5, dtype=dtype), normal(6, dtype=dtype)),
                {"activation": activation},
            )
    for dtype in HALF_DTYPES:
        x, weight, bias = (normal(*shape, dtype=torch.float32) for shape in ((4, 5), (3, 5), (3,)))
        yield (x, weight, bias), {"activation": "gelu", "compute_dtype": dtype}
        yield (x, weight, None, weight.detach().to(dtype)), {"activation": "silu", "compute_dtype": dtype}
        yield (normal(5, dtype=dtype, grad=False), weight), {"compute_dtype": dtype}
        yield (
            (normal(4, 5, dtype=dtype, grad=False), normal(3, 5, dtype=dtype, grad=False)),
            {
                "activation": "relu",
                "batch_invariant": 1,
            },
        )


op = define(
    "linear(Tensor x, Tensor weight, Tensor? bias=None, Tensor? shadow=None, *, "
    'str activation="none", ScalarType? compute_dtype=None, int batch_invariant=0) -> Tensor',
    _linear,
    samples=samples,
    composite=True,
)

autocast.lower_precision(op, with_shadow(3))


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
    check_tensors("linear", x=x, weight=weight)
    check_tensors("linear", optional=True, bias=bias)
    if is_dtensor(x) or is_dtensor(weight):
        return _of_dtensors(x, weight, bias, activation)
    if not is_strided(x):
        return ACTIVATIONS[activation](F.linear(x, weight, bias))
    invariant = k_blocks()
    if autocast.eager(x, weight):
        dtype = autocast.dtype_on(x.device.type)
        shadow = fresh_shadow(weight, dtype)
        return _linear(x, weight, bias, shadow, activation=activation, compute_dtype=dtype, batch_invariant=invariant)
    return op(x, weight, bias, activation=activation, batch_invariant=invariant)


def _of_dtensors(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    """``linear`` of each rank's piece in 16 bits; torch's own in others."""
    if (autocast.dtype_on(x.device.type) or x.dtype) not in HALF_DTYPES or x.dtype == torch.float64:
        return ACTIVATIONS[activation](F.linear(x, weight, bias))
    own = "none" if _needs_others(weight, activation) else activation
    out = of_weight("linear", lambda *pieces: linear(*pieces, activation=own), x, weight, bias)
    return out if own == activation else ACTIVATIONS[activation](out)


def _needs_others(weight: torch.Tensor, activation: str) -> bool:
    """True if the activation of an element needs pre-activations that lie on other ranks."""
    return any(placed.is_shard(1) or (placed.is_shard(0) and activation in GATED) for placed in weight.placements)
