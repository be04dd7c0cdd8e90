"""The rows of tokens that are routed to groups: ``route``, and the differentiable gather and weighted sum of ``grouped_mm``.

float64, torch.func transforms and forward-mode AD take torch's operations, and so does a backward that is recorded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._checks.lists import FLOATS, HALF_DTYPES, KERNEL_DTYPES, check_count
from .._checks.operands import check_same_device, check_tensor
from .._dispatch import autocast
from .._raw import routing as raw
from .._raw.routing import check_places, check_weights, combine_op, spread_op
from ._autograd import needs_gradient, under_transform
from ._tensors import cast, values_are_known
from .embedding import INDEX_DTYPES

# ---- checks


def check_routes(a: Tensor, gather: Tensor | None, scatter: Tensor | None, weights: Tensor | None) -> int:
    """The number of rows that the groups divide; ``a`` is ``grouped_mm``'s, for the rows form."""
    op = "grouped_mm"
    rows = a.shape[0]
    for name, places in (("gather", gather), ("scatter", scatter)):
        if places is None:
            continue
        check_places(op, name, places)
        check_same_device(op, a=a, **{name: places})
        if name == "gather" and places.shape[0] != rows:
            raise ValueError(f"{op}: gather has shape {list(places.shape)}; accepted: [{rows}, k], for the rows of a")
        if name == "scatter" and places.numel() != (rows if gather is None else gather.numel()):
            raise ValueError(
                f"{op}: scatter has shape {list(places.shape)}; accepted: a number for each row of the product, "
                f"{rows if gather is None else gather.numel()}"
            )
        if values_are_known(places) and not under_transform():
            _check_values(op, name, places)
    if weights is not None:
        if scatter is None:
            raise ValueError(
                f"{op}: weights is given and scatter is None; accepted: weights of the rows that scatter adds"
            )
        check_tensor(op, "weights", weights, FLOATS)
        check_weights(op, weights, scatter)
        check_same_device(op, a=a, weights=weights)
    return rows if gather is None else gather.numel()


def _check_values(op: str, name: str, places: Tensor) -> None:
    rows, flat = places.numel(), places.flatten()
    wrong = (flat < 0) | (flat >= rows)
    if not wrong.any():
        wrong = torch.bincount(flat, minlength=rows)[flat] > 1
    if wrong.any():
        at = wrong.nonzero()[0].item()
        raise ValueError(
            f"{op}: {name}[{at // places.shape[1]}, {at % places.shape[1]}] is {flat[at].item()}; accepted: each number of "
            f"[0, {rows}) once"
        )


# ---- rows of tokens to groups and back


def spread_rows(x: Tensor, places: Tensor) -> Tensor:
    """Row ``places[t, j]`` is ``x[t]``."""
    if x.dtype not in KERNEL_DTYPES or under_transform():
        return raw.spread(x, places)
    return autocast.apply(_Spread, x, places) if needs_gradient(x) else spread_op(x, places)[0]


def combine_rows(y: Tensor, places: Tensor, weights: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """The sum of each token's rows ``places[t]``, in order."""
    if y.dtype not in KERNEL_DTYPES or under_transform():
        wide = torch.promote_types(y.dtype, torch.float32)
        weights = None if weights is None else weights.to(wide)
        return raw.combine(y.to(wide), places, weights).to(out_dtype)
    return autocast.apply(_Combine, y, weights, places, out_dtype)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, places):
        ctx.save_for_backward(places)
        return spread_op(x, places)[0]

    @staticmethod
    def backward(ctx, grad):
        (places,) = ctx.saved_tensors
        return combine_rows(grad, places, None, grad.dtype), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, weights, places, out_dtype):
        ctx.dtype = y.dtype
        ctx.save_for_backward(y if ctx.needs_input_grad[1] else None, weights, places)
        narrow = out_dtype in HALF_DTYPES and out_dtype == y.dtype
        wide = {} if narrow or y.dtype is torch.float32 else {"out_dtype": torch.float32}
        return cast(combine_op(y, places, None if weights is None else weights.float(), **wide), out_dtype)

    @staticmethod
    def backward(ctx, grad):
        y, weights, places = ctx.saved_tensors
        wide = None if weights is None else weights.float()
        if torch.is_grad_enabled():
            grad_y = raw.spread(grad.float(), places, wide).to(ctx.dtype)
            products = None if y is None else raw.dots(grad.float(), y.float(), places)
        else:
            grad = grad if grad.dtype is ctx.dtype else grad.float()
            grad_y, products = spread_op(grad, places, wide, y, out_dtype=ctx.dtype)
        return grad_y, None if y is None else cast(products, weights.dtype), None, None


# ---- the order


def route(chosen: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Sort the choices of tokens by group, on the device, for :func:`grouped_mm`.

    Args:
        chosen: int64 or int32 ``[T, k]``, the groups that each token chose, such as the experts of a router's topk. A number outside
            ``[0, num_groups)`` belongs to no group.
        num_groups: G.

    Returns:
        ``offs``, int32 ``[G]``, the end of each group's rows among ``T * k``; and ``places``, int32 ``[T, k]``, the row of each choice,
        in the order of tokens within a group, for ``gather`` and ``scatter``. Choices of no group have the rows past the last
        end, whose results are zero.

    Raises:
        TypeError: ``chosen`` is not int64 or int32.
        ValueError: ``chosen`` does not have two dimensions, or ``num_groups`` is negative.

    Examples:
        >>> offs, places = ak.route(torch.tensor([[2, 0], [0, 1], [2, 1]]), 3)
        >>> offs
        tensor([2, 4, 6], dtype=torch.int32)
        >>> places
        tensor([[4, 0],
                [1, 2],
                [5, 3]], dtype=torch.int32)
    """
    check_tensor("route", "chosen", chosen, INDEX_DTYPES)
    if chosen.ndim != 2:
        raise ValueError(f"route: chosen has shape {list(chosen.shape)}; accepted: [T, k], the groups of each token")
    check_count("route", "num_groups", num_groups, 0)
    flat = chosen.reshape(-1)
    groups = torch.where((flat >= 0) & (flat < num_groups), flat, num_groups)
    if num_groups < 2**15:  # the radix sort of a GPU makes a pass over keys and order for each byte of a key
        groups = groups.to(torch.int16)
    groups, order = groups.sort(stable=True)
    every = torch.arange(num_groups, device=flat.device, dtype=groups.dtype)
    offs = torch.searchsorted(groups, every, right=True, out_int32=True)
    rows = torch.arange(flat.shape[0], device=flat.device, dtype=torch.int32)
    return offs, torch.empty_like(rows).scatter_(0, order, rows).view(chosen.shape)
