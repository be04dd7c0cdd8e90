"""``rotary``: rotary position embedding of queries and keys, optionally after an RMS norm of each head, in one pass.

The op is composite, over the raw ``rotary_forward`` and ``rotary_backward``. Under autocast the result has autocast's dtype,
computed in fp32 from whatever comes in. float64, cosines and sines that require gradients, torch.func transforms, forward-mode AD and
compilers take torch's own operations.

Raw ops take ``[batch, tokens, heads, width]``, which is how projections leave memory; here heads come before tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _functional as F
from .._checks.lists import KERNEL_DTYPES
from .._checks.operands import check_tensors
from .._dispatch import autocast
from .._dispatch.batch_invariant import is_batch_invariant
from .._dispatch.library import define, is_traced
from .._raw.rotary import backward_op, check_shapes, check_weights, forward_op, turned
from .._sharding.dtensor import is_dtensor
from . import norm
from ._autograd import needs_gradient, under_transform
from ._linear import gradient_dtype
from ._tensors import cast


def _swapped(x: Tensor) -> Tensor:
    """Heads and tokens exchanged, of a tensor that is new here: not a view to autograd, which lets nobody write to one in place that a
    Function returned."""
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return x.transpose(1, 2)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, q_weight, k_weight, eps, interleaved, out_dtype):
        ctx.options = {"eps": eps, "interleaved": interleaved}
        ctx.dtypes = [None if t is None else gradient_dtype(t) for t in (q, k, q_weight, k_weight)]
        kept = (None, None) if q_weight is None else (q, k)
        ctx.save_for_backward(cos, sin, *kept, q_weight, k_weight)
        return _forward(q, k, cos, sin, q_weight, k_weight, eps, interleaved, out_dtype)

    @staticmethod
    def backward(ctx, grad_q, grad_k):
        cos, sin, q, k, q_weight, k_weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            found = _differentiable_backward(grad_q, grad_k, *ctx.saved_tensors, **ctx.options)
        else:
            given = (t if t is None else t.transpose(1, 2) for t in (q, k))
            of_q, of_k, sums = backward_op(
                grad_q.transpose(1, 2),
                grad_k.transpose(1, 2),
                cos,
                sin,
                *given,
                q_weight,
                k_weight,
                out_dtype=ctx.dtypes[0],
                **ctx.options,
            )
            found = _swapped(of_q), _swapped(of_k), *((None, None) if q_weight is None else sums)
        of_q, of_k, *of_weights = (
            cast(grad, dtype) if needed and grad is not None else None
            for grad, dtype, needed in zip(
                found, ctx.dtypes, (*ctx.needs_input_grad[:2], *ctx.needs_input_grad[4:6]), strict=True
            )
        )
        return of_q, of_k, None, None, *of_weights, None, None, None


def _forward(q, k, cos, sin, q_weight, k_weight, eps, interleaved, out_dtype) -> tuple[Tensor, Tensor]:
    options = {"eps": eps, "interleaved": interleaved, "out_dtype": out_dtype}
    of_q, of_k = forward_op(q.transpose(1, 2), k.transpose(1, 2), cos, sin, q_weight, k_weight, **options)
    return _swapped(of_q), _swapped(of_k)


def _differentiable_backward(grad_q, grad_k, cos, sin, q, k, q_weight, k_weight, *, eps, interleaved):
    """The same through operations that autograd can differentiate again."""
    results = []
    for grad, x, weight in ((grad_q, q, q_weight), (grad_k, k, k_weight)):
        angles = (_of_heads(t, torch.float32) for t in (cos, sin))
        g, of_weight = turned(grad.float(), *angles, interleaved, transposed=True), None
        if weight is not None:
            x, weight = (t if t.requires_grad else t.detach().requires_grad_() for t in (x, weight))
            y = F.rms_norm(x.float(), weight.shape, weight.float(), eps)
            g, of_weight = torch.autograd.grad(y, (x, weight), g, create_graph=True)
        results.append((g, of_weight))
    (of_q, of_q_weight), (of_k, of_k_weight) = results
    return of_q, of_k, of_q_weight, of_k_weight


def _of_heads(angle: Tensor, dtype: torch.dtype) -> Tensor:
    """``cos`` or ``sin`` as it broadcasts to ``[batch, heads, tokens, width]``."""
    return angle.to(dtype).unsqueeze(-3)


def _composed(q, k, cos, sin, q_weight, k_weight, eps, interleaved, out_dtype) -> tuple[Tensor, Tensor]:
    """The op in torch's own operations."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    with torch._C._DisableAutocast():
        cos, sin = _of_heads(cos, wide), _of_heads(sin, wide)

        def result(x: Tensor, weight: Tensor | None) -> Tensor:
            y = x.to(wide)
            if weight is not None:
                y = F.rms_norm(y, weight.shape, weight.to(wide), eps)
            return turned(y, cos, sin, interleaved).to(out_dtype)

        return result(q, q_weight), result(k, k_weight)


def _rotary(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    interleaved: bool = False,
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    double = getattr(q, "dtype", None) == torch.float64
    dtypes = (torch.float64,) if double else KERNEL_DTYPES
    check_shapes("rotary", q, k, cos, sin, 1, dtypes)
    check_weights("rotary", q, q_weight, k_weight, dtypes)
    out_dtype = q.dtype if compute_dtype is None or double else compute_dtype
    by_torch = double or q.numel() == 0 or k.numel() == 0 or under_transform() or is_traced(q)
    if by_torch or needs_gradient(cos, sin):
        return _composed(q, k, cos, sin, q_weight, k_weight, eps, interleaved, out_dtype)
    if is_batch_invariant() and q_weight is not None:  # the norm sums the gradients of weights in an order of its own
        options = {"eps": eps, "centred": False, "compute_dtype": torch.float32}
        q, k = (norm._norm(x, w.shape, w, **options)[0] for x, w in ((q, q_weight), (k, k_weight)))
        q_weight = k_weight = None
    arguments = q, k, cos, sin, q_weight, k_weight, eps, interleaved, out_dtype
    if needs_gradient(q, k, q_weight, k_weight):
        return autocast.apply(_Rotary, *arguments)
    return _forward(*arguments)


op = define(
    "rotary(Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor? q_weight=None, Tensor? k_weight=None, *, float eps=1e-6, "
    "bool interleaved=False, ScalarType? compute_dtype=None) -> (Tensor, Tensor)",
    _rotary,
    composite=True,
)
autocast.lower_precision(op)


def rotary(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of queries and keys, with an RMS norm of each head in front of it (QK-norm), in one pass.

    With ``y = x / sqrt(mean(x^2) + eps) * weight`` over a head, or ``y = x`` without weights, the result is
    ``y cos + rotate_half(y) sin``, as transformers' ``apply_rotary_pos_emb`` computes it, in fp32 and rounded once. J. Su et al.:
    RoFormer: Enhanced transformer with rotary position embedding, arXiv:2104.09864.

    Args:
        q: ``[batch, heads, tokens, width]``, fp16, bf16 or fp32, with an even width up to 256. Any strides; read in place if the
            columns of a head are contiguous, as in ``projection.view(batch, tokens, heads, width).transpose(1, 2)``.
        k: as ``q``, with a number of heads of its own.
        cos, sin: ``[tokens, rotary]`` or ``[1 or batch, tokens, rotary]``, one value per column, fp16, bf16 or fp32. Columns of a head
            from ``rotary`` on, an even number, stay as they are.
        q_weight, k_weight: ``[width]``, of the norms, fp16, bf16 or fp32; both or none.
        eps: of the norms, added to the mean square.
        interleaved: columns ``2 i`` and ``2 i + 1`` are a pair (GPT-J, Cohere), instead of ``i`` and ``i + rotary / 2`` (Llama).

    Returns:
        ``(q, k)`` turned, of the same shapes, with the heads of a token side by side in memory. They have the dtype of ``q``, and
        inside torch.autocast autocast's dtype.

    Gradients of the weights are fp32 sums in a fixed order. Saved for backward: cosines, sines and, with weights, ``q`` and ``k``.
    float64, and cosines or sines that require gradients, run torch's own operations. In :func:`batch_invariant` norms run in passes of
    their own.

    Raises:
        TypeError: a dtype or layout is not accepted, or a tensor is a DTensor.
        ValueError: shapes or devices do not fit, or only one weight is given.

    Examples:
        >>> angles = torch.arange(3.0)[:, None] * torch.tensor([1.0, 0.1, 1.0, 0.1])
        >>> q, k = torch.ones(1, 2, 3, 4), torch.ones(1, 1, 3, 4)
        >>> q, k = ak.rotary(q, k, angles.cos(), angles.sin())
        >>> k[0, 0]
        tensor([[ 1.0000,  1.0000,  1.0000,  1.0000],
                [-0.3012,  0.8952,  1.3818,  1.0948],
                [-1.3254,  0.7814,  0.4932,  1.1787]])
    """
    tensors = {"q": q, "k": k, "cos": cos, "sin": sin}
    weights = {"q_weight": q_weight, "k_weight": k_weight}
    check_tensors("rotary", **tensors)
    check_tensors("rotary", optional=True, **weights)
    given = [t for t in (*tensors.values(), *weights.values()) if t is not None]
    for name, tensor in (tensors | weights).items():
        if is_dtensor(tensor):
            raise TypeError(
                f"rotary: {name} is a DTensor; accepted: plain tensors, such as {name}.to_local() of sharded heads"
            )
    options = {"eps": eps, "interleaved": interleaved}
    if autocast.eager(*given):
        dtype = autocast.dtype_on(q.device.type)
        return _rotary(q, k, cos, sin, q_weight, k_weight, compute_dtype=dtype, **options)
    return op(q, k, cos, sin, q_weight, k_weight, **options)
