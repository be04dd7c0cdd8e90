"""``gelu``, ``silu`` and ``swiglu`` on their own: read and written in the dtype that comes, fp32 inside, one rounding.

After a product the activation belongs into its epilogue (``linear(activation=...)``), which saves this pass over memory; these
are for where something comes between the two. The op is composite, over the raw ``activation_forward`` and
``activation_backward``. float64, torch.func transforms, forward-mode AD and compilers take torch's own operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _functional as F
from .._checks.activations import ACTIVATIONS
from .._checks.lists import FLOATS
from .._checks.operands import check_tensors
from .._dispatch import autocast
from .._dispatch.library import decompose_batches, define, is_traced
from .._raw import activation_backward, activation_forward
from .._sharding.dtensor import by_rows, is_dtensor
from ._autograd import under_transform
from ._linear import gradient_dtype
from ._tensors import is_strided


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, activation):
        ctx.activation, ctx.dtype = activation, gradient_dtype(x)
        ctx.save_for_backward(x)
        return activation_forward.op(x, activation=activation)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return activation_backward.differentiable(grad, x, ctx.activation).to(ctx.dtype), None
        return activation_backward.op(grad, x, activation=ctx.activation)[0].to(ctx.dtype), None


def _activation(x: Tensor, activation: str) -> Tensor:
    activation_forward.check(x, activation, FLOATS, op=activation.removesuffix("_tanh"), name="input")
    if x.dtype != torch.float64 and not under_transform() and not is_traced(x):
        return _Activation.apply(x, activation)
    wide = x if x.dtype == torch.float64 else x.float()
    return ACTIVATIONS[activation](wide).to(x.dtype)


op = define("activation(Tensor x, *, str activation) -> Tensor", _activation, composite=True)
decompose_batches(op)


def _call(x: Tensor, activation: str) -> Tensor:
    if autocast.eager(x):
        return _activation(x, activation)
    if is_dtensor(x):
        return by_rows(activation, lambda x: _call(x, activation), [-1] if activation == "swiglu" else [], [x])
    return op(x, activation=activation)


def gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    """torch.nn.functional.gelu, computed in fp32 and rounded once.

    Args:
        input: fp16, bf16 or fp32, any shape and strides. float64, and what is sparse or nested, runs torch's own.
        approximate: ``"none"``, by the error function, or ``"tanh"`` (D. Hendrycks, K. Gimpel: Gaussian error linear units,
            arXiv:1606.08415).

    Returns:
        A contiguous tensor in the dtype of ``input``, inside torch.autocast, too. Saved for backward: ``input``. -inf gives 0
        with the gradient 0, and inf has the gradient 1: these are the limits, where torch's own, of float64 too, gives NaN.

    Raises:
        TypeError: the dtype is not accepted.
        ValueError: ``approximate`` is neither of the two.

    Examples:
        >>> ak.gelu(torch.tensor([-1.0, 0.0, 1.0], dtype=torch.bfloat16))
        tensor([-0.1582,  0.0000,  0.8398], dtype=torch.bfloat16)
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"gelu: approximate is {approximate!r}; accepted: 'none', 'tanh'")
    check_tensors("gelu", input=input)
    if not is_strided(input):
        return F.gelu(input, approximate=approximate)
    return _call(input, "gelu_tanh" if approximate == "tanh" else "gelu")


def silu(input: Tensor) -> Tensor:
    """torch.nn.functional.silu, ``x * sigmoid(x)``, computed in fp32 and rounded once.

    The argument, the result, also at infinity, and the errors are those of :func:`gelu`.

    Examples:
        >>> ak.silu(torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float16))
        tensor([-0.2690,  0.0000,  0.7310], dtype=torch.float16)
    """
    check_tensors("silu", input=input)
    return _call(input, "silu") if is_strided(input) else F.silu(input)


def swiglu(input: Tensor, *more: Tensor) -> Tensor:
    """``silu(gate) * up``, computed in fp32 and rounded once.

    One read of both and one write; ``F.silu(gate) * up`` writes and reads ``silu(gate)`` besides, rounded. N. Shazeer: GLU
    variants improve Transformer, arXiv:2002.05202.

    Args:
        input: ``[..., 2 F]``, gates before values, as :func:`linear` takes them with ``activation="swiglu"``; fp16, bf16,
            fp32 or float64, any strides.

    Returns:
        A contiguous ``[..., F]`` in the dtype of ``input``, inside torch.autocast, too. Saved for backward: ``input``. Gates at
        infinity are those of :func:`silu`.

    Raises:
        TypeError: the dtype or layout is not accepted, or gates and values come as two tensors.
        ValueError: the last dimension is odd.

    Examples:
        >>> ak.swiglu(torch.tensor([[0.0, 1.0, 5.0, 2.0]]))
        tensor([[0.0000, 1.4621]])
    """
    if more:
        raise TypeError(
            f"swiglu: got {1 + len(more)} tensors; accepted: one, [..., 2 F], gates before values, as torch.cat([gate, up], -1) "
            "makes it; of two tensors silu(gate) * up is the same"
        )
    check_tensors("swiglu", input=input)
    return _call(input, "swiglu")
