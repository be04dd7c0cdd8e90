"""``mlp``: two linear layers around an activation, ``activation(x @ w1^T + b1) @ w2^T + b2``, with a fused backward.

The op is composite: it decomposes into two ``gemm`` forward, and backward into ``gemm_dact`` and three
GEMMs. fp32 and fp64 outside autocast, torch.func transforms and forward-mode AD take torch's own operations.

Two calls of ``linear`` would store the gradient of the hidden layer and round it to 16 bits. The fused op does neither,
because ``gemm_dact`` takes the fp32 sums of ``dy @ w2`` through the derivative at once and sums the rows of
``dz`` for the bias on the way. Saved for backward, all in 16 bits: ``x``, ``z = x @ w1^T + b1``, ``h = activation(z)``
and the weights. With ``recompute`` backward makes ``h`` again, by one pass over ``z``.
"""

from __future__ import annotations

import torch

from .. import _functional as F
from .._checks.activations import ACTIVATIONS, GATED, activated_width, check_activation, check_gated_width
from .._checks.lists import HALF_DTYPES
from .._checks.operands import check_bias, check_same_device, check_tensors, readable_bias
from .._dispatch import autocast
from .._dispatch.batch_invariant import k_blocks
from .._dispatch.library import define
from .._raw import activation_backward
from .._raw.gemm import gemm_dact_op
from .._sharding.dtensor import is_dtensor
from . import _main_grad
from ._autograd import add_gradient, needs_gradient, under_transform
from ._linear import bias_gradient, gradient_dtype, weight_gradient
from ._products import check_blocks, differentiable_product, gemm, gemm_options, product, working_dtype
from ._shadows import fresh_shadow
from ._tensors import cast, flat, is_foreign, like
from .activation import _activation as activated
from .linear import check_shadow, linear


class _Mlp(torch.autograd.Function):
    """The autograd node of ``mlp``. As in ``linear``, saved tensors that are made here are also outputs, so that a recorded
    backward sees their dependence on the inputs."""

    @staticmethod
    def forward(ctx, x, w1, b1, w2, b2, shadow1, shadow2, activation, dtype, batch_invariant, recompute):
        ctx.set_materialize_grads(False)
        needs_x, needs_w1, needs_b1, needs_w2, _ = ctx.needs_input_grad[:5]
        _main_grad.refuse_data_parallel(w1, w2)
        inner = needs_x or needs_w1 or needs_b1  # whether the gradient passes the activation
        keeps_h = needs_w2 and not (recompute and inner)
        x16 = cast(x, dtype)
        w1_16 = cast(w1, dtype) if shadow1 is None else shadow1
        w2_16 = cast(w2, dtype) if shadow2 is None else shadow2
        options = gemm_options(x16, batch_invariant=batch_invariant)
        h, z = gemm(flat(x16), w1_16.t(), readable_bias(b1, dtype), activation=activation, preact=True, **options)
        out = gemm(h, w2_16.t(), readable_bias(b2, dtype), **options)[0]
        ctx.options = activation, batch_invariant
        if batch_invariant:
            _main_grad.prepare(b1, b2)
        ctx.x_shape = x.shape
        ctx.dtypes = x.dtype, gradient_dtype(w1), gradient_dtype(w2)
        ctx.bias_dtypes = tuple(None if b is None else gradient_dtype(b) for b in (b1, b2))
        ctx.save_for_backward(
            x16 if needs_w1 else None,
            w1_16 if needs_x else None,
            z if inner else None,
            h if keeps_h else None,
            w2_16 if inner else None,
            # The fp32 weights are kept with their shadows for a recorded backward, which must reach them.
            w1 if needs_x and shadow1 is not None else None,
            w2 if inner and shadow2 is not None else None,
        )
        return (
            like(x, out),
            x16 if needs_w1 and x16 is not x else None,
            w1_16 if needs_x and shadow1 is None and w1_16 is not w1 else None,
            z if inner else None,
            h if keeps_h else None,
            w2_16 if inner and shadow2 is None and w2_16 is not w2 else None,
        )

    @staticmethod
    def backward(ctx, grad, grad_x16, grad_w1_16, grad_z, grad_h, grad_w2_16):
        x16, w1_16, z, h, w2_16, w1, w2 = ctx.saved_tensors
        x_dtype, w1_dtype, w2_dtype = ctx.dtypes
        b1_dtype, b2_dtype = ctx.bias_dtypes
        activation, batch_invariant = ctx.options
        needs_x, needs_w1, needs_b1, needs_w2, needs_b2 = ctx.needs_input_grad[:5]
        recorded = torch.is_grad_enabled()
        if recorded:
            w1_16 = w1_16 if w1 is None else w1.to(w1_16.dtype)
            w2_16 = w2_16 if w2 is None else w2.to(w2_16.dtype)
        grad_x = grad_w1 = grad_b1 = grad_w2 = grad_b2 = dz = None
        if grad is not None:
            dy = flat(grad)
            position = 2 if b1_dtype is None else 3
            if needs_w2:
                h = activated(z, activation) if h is None else h
                grad_w2 = weight_gradient(ctx, position, dy, h, w2_dtype, batch_invariant)
            if needs_b2:
                grad_b2 = bias_gradient(ctx, position + 1, dy, b2_dtype, batch_invariant)
        if z is not None:
            dz, sums = _hidden_gradient(grad, grad_h, grad_z, z, w2_16, activation, needs_b1, batch_invariant, recorded)
        if dz is not None:
            if needs_x:
                grad_x = differentiable_product(dz, w1_16, x_dtype, batch_invariant=batch_invariant).view(ctx.x_shape)
            if needs_w1:
                grad_w1 = weight_gradient(ctx, 1, dz, flat(x16), w1_dtype, batch_invariant)
            if needs_b1:
                grad_b1 = bias_gradient(ctx, 2, dz, b1_dtype, batch_invariant) if sums is None else cast(sums, b1_dtype)
        grad_x = add_gradient(grad_x, grad_x16, x_dtype)
        grad_w1 = add_gradient(grad_w1, grad_w1_16, w1_dtype)
        grad_w2 = add_gradient(grad_w2, grad_w2_16, w2_dtype)
        return grad_x, grad_w1, grad_b1, grad_w2, grad_b2, None, None, None, None, None, None


def _hidden_gradient(grad, grad_h, grad_z, z, w2, activation, needs_sums, batch_invariant, recorded):
    """``dz`` and the sum of its rows, unless that is :func:`bias_gradient`'s. ``grad_h`` and ``grad_z`` come from a backward that was
    differentiated."""
    if not recorded and grad_h is None and grad_z is None:
        if grad is None:
            return None, None
        if batch_invariant > 1:
            dh = product(flat(grad), w2, torch.float32, 1.0, batch_invariant)
            return activation_backward.op(dh, z, activation=activation)
        sums = needs_sums and not batch_invariant  # its order depends on the number of rows
        return gemm_dact_op(
            flat(grad), w2, z, activation=activation, bias_grad=sums, batch_invariant=bool(batch_invariant)
        )
    dh = None if grad is None else differentiable_product(flat(grad), w2, torch.float32, 1.0, batch_invariant)
    dh = add_gradient(dh, grad_h, torch.float32)
    dz = None if dh is None else activation_backward.differentiable(dh, z, activation)
    dz = add_gradient(dz, grad_z, z.dtype)
    return dz, None if dz is None else dz.sum(0, dtype=torch.float32)


def _mlp(
    x,
    w1,
    b1,
    w2,
    b2=None,
    shadow1=None,
    shadow2=None,
    *,
    activation="gelu",
    compute_dtype=None,
    batch_invariant=0,
    recompute=False,
):
    dtype = working_dtype("mlp", compute_dtype, x=x, weight1=w1, weight2=w2)
    _check(x, w1, b1, w2, b2, shadow1, shadow2, dtype, compute_dtype is not None, activation)
    if dtype not in HALF_DTYPES:
        return F.linear(ACTIVATIONS[activation](F.linear(x, w1, b1)), w2, b2)
    if under_transform():
        b1, b2 = (None if b is None else b.to(dtype) for b in (b1, b2))
        return F.linear(ACTIVATIONS[activation](F.linear(x.to(dtype), w1.to(dtype), b1)), w2.to(dtype), b2)
    check_blocks("mlp", batch_invariant, in_features=w1.shape[1], hidden_features=w2.shape[1])
    if needs_gradient(w1, x):
        check_blocks("mlp", batch_invariant, out_features=w2.shape[0], hidden_rows=w1.shape[0])
    if needs_gradient(x, w1, b1, w2, b2):
        options = activation, dtype, batch_invariant, recompute
        return autocast.apply(_Mlp, x, w1, b1, w2, b2, shadow1, shadow2, *options)[0]
    w1_16 = cast(w1, dtype) if shadow1 is None else shadow1
    w2_16 = cast(w2, dtype) if shadow2 is None else shadow2
    options = gemm_options(w1_16, batch_invariant=batch_invariant)
    h = gemm(flat(cast(x, dtype)), w1_16.t(), readable_bias(b1, dtype), activation=activation, **options)[0]
    return like(x, gemm(h, w2_16.t(), readable_bias(b2, dtype), **options)[0])


def _check(x, w1, b1, w2, b2, shadow1, shadow2, dtype: torch.dtype, autocast: bool, activation: str) -> None:
    name = check_activation("mlp", activation)
    shapes = f"mlp: x has shape {list(x.shape)}, weight1 {list(w1.shape)} and weight2 {list(w2.shape)}"
    columns = "2 hidden_features" if name in GATED else "hidden_features"
    accepted = f"accepted: [..., in_features], [{columns}, in_features] and [out_features, hidden_features]"
    if x.ndim == 0 or w1.ndim != 2 or w2.ndim != 2 or x.shape[-1] != w1.shape[1]:
        raise ValueError(f"{shapes}; {accepted}")
    check_gated_width("mlp", "weight1", w1, 0, name)
    if w2.shape[1] != activated_width(name, w1.shape[0]):
        raise ValueError(f"{shapes}; {accepted}")
    for weight, bias, shadow, number in ((w1, b1, shadow1, 1), (w2, b2, shadow2, 2)):
        check_bias("mlp", bias, weight.shape[0], dtype, autocast, f"bias{number}")
        check_shadow("mlp", f"shadow{number}", shadow, weight, dtype)
    check_same_device("mlp", x=x, weight1=w1, bias1=b1, weight2=w2, bias2=b2, shadow1=shadow1, shadow2=shadow2)


op = define(
    "mlp(Tensor x, Tensor weight1, Tensor? bias1, Tensor weight2, Tensor? bias2=None, Tensor? shadow1=None, "
    'Tensor? shadow2=None, *, str activation="gelu", ScalarType? compute_dtype=None, int batch_invariant=0, '
    "bool recompute=False) "
    "-> Tensor",
    _mlp,
    composite=True,
)


def _with_shadows(args: tuple, kwargs: dict, dtype: torch.dtype) -> tuple[tuple, dict]:
    """Completes a call under autocast with the weights' shadows."""
    if len(args) < 4 or len(args) > 5 or "shadow1" in kwargs or "shadow2" in kwargs:
        return args, kwargs
    return args, {**kwargs, "shadow1": fresh_shadow(args[1], dtype), "shadow2": fresh_shadow(args[3], dtype)}


autocast.lower_precision(op, _with_shadows)


def mlp(
    x: torch.Tensor,
    weight1: torch.Tensor,
    bias1: torch.Tensor | None,
    weight2: torch.Tensor,
    bias2: torch.Tensor | None = None,
    *,
    activation: str | None = "gelu",
    recompute: bool = False,
) -> torch.Tensor:
    """``activation(x @ weight1^T + bias1) @ weight2^T + bias2``, differentiable to any order, with an autocast rule.

    Args:
        x: ``[..., in_features]``, any strides.
        weight1: ``[hidden_features, in_features]``; with ``"swiglu"`` ``[2 hidden_features, in_features]``, the gates
            first: ``torch.cat([gate_proj, up_proj])`` of a Llama model.
        bias1: one value per row of ``weight1``, or ``None``; for 16-bit work in the working dtype or fp32, in autocast
            in any of the three, otherwise in the dtype of ``x``.
        weight2: ``[out_features, hidden_features]``.
        bias2: ``[out_features]`` or ``None``; dtypes as for ``bias1``.
        activation: ``None``, ``"relu"``, ``"gelu"`` (erf), ``"gelu_tanh"``, ``"silu"`` or ``"swiglu"``
            (``silu(gate) * up``; Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202), computed in fp32.
        recompute: save no activation for backward, which makes it again from the pre-activation: 2 bytes less for each row
            and hidden feature, for one pass that reads the pre-activation and writes the activation. The result and the other
            gradients keep their bits. That of ``weight2`` does with ``None`` and ``"relu"``; otherwise the activation ``h``
            is that of a pre-activation ``z`` that was rounded, and so differs by at most ``u (|z h'(z)| + 2 |h|)``
            (``u``: 2^-8 in bf16, 2^-11 in fp16; to first order).

    Returns:
        ``[..., out_features]`` in the working dtype.

    dtypes, autocast and gradients are those of :func:`amp_kernels.linear`. Saved for backward, in 16 bits: ``x``, the
    pre-activation, its activation (without ``recompute``), and the weights. DTensors, and weights that are
    sparse or quantised, go through :func:`amp_kernels.linear` twice.

    Raises:
        TypeError: a dtype or layout is not accepted; outside autocast dtypes are not mixed.
        ValueError: shapes, devices or ``activation`` do not fit.

    Examples:
        >>> x, gate_and_up, down = torch.randn(8, 16), torch.randn(2 * 32, 16), torch.randn(16, 32)
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     y = ak.mlp(x, gate_and_up, None, down, activation="swiglu")
        >>> y.shape, y.dtype
        (torch.Size([8, 16]), torch.bfloat16)
    """
    activation = check_activation("mlp", activation)
    check_tensors("mlp", x=x, weight1=weight1, weight2=weight2)
    check_tensors("mlp", optional=True, bias1=bias1, bias2=bias2)
    if is_dtensor(x) or is_dtensor(weight1) or is_foreign(weight1) or is_foreign(weight2):
        return linear(linear(x, weight1, bias1, activation=activation), weight2, bias2)
    invariant = k_blocks()
    if autocast.eager(x, weight1, weight2):
        dtype = autocast.dtype_on(x.device.type)
        shadows = fresh_shadow(weight1, dtype), fresh_shadow(weight2, dtype)
        return _mlp(
            x,
            weight1,
            bias1,
            weight2,
            bias2,
            *shadows,
            activation=activation,
            compute_dtype=dtype,
            batch_invariant=invariant,
            recompute=recompute,
        )
    options = {"activation": activation, "batch_invariant": invariant, "recompute": recompute}
    return op(x, weight1, bias1, weight2, bias2, **options)
