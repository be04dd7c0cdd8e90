"""Rows of tokens to the order of their groups and back, as a mixture of experts needs them. Raw.

``places``, int32 ``[T, k]``, gives choice j of token t the row ``places[t, j]`` of ``T * k`` rows; every row is given once. The two ops
are each other's gradient. Both compute in fp32 and round once; without ``weights``, fp32 ``[T, k]``, each weight is 1.

- ``spread_rows``: ``out[places[t, j]] = weights[t, j] * x[t]``. With ``y``, rows like those of ``out``, besides the gradient of
  weights, ``dots[t, j] = (x[t] * y[places[t, j]]).sum()``.
- ``combine_rows``: ``out[t] = sum of weights[t, j] * y[places[t, j]]``, added in the order of j, so that the bits of a token depend on its
  own rows alone.

A place out of range or given twice is an error on the CPU. On a GPU only the kernel reads the places: it skips those out of range, and
rows that no place names are not written.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._checks.lists import HALF_DTYPES, KERNEL_DTYPES, names
from .._checks.operands import check_tensor
from .._dispatch.library import Sample, define
from .._dispatch.samples import Normal
from ._norm import check_like

# ---- checks


def check_places(op: str, name: str, places: Tensor) -> None:
    check_tensor(op, name, places, (torch.int32,))
    if places.ndim != 2:
        raise ValueError(
            f"{op}: {name} has shape {list(places.shape)}; accepted: [T, k], a row for each choice of a token"
        )


def check_weights(op: str, weights: Tensor, places: Tensor) -> None:
    if weights.shape != places.shape:
        raise ValueError(
            f"{op}: weights has shape {list(weights.shape)}; accepted: {list(places.shape)}, one per choice"
        )


def _check_routed(op: str, name: str, matrix: Tensor, rows: int, call) -> None:
    check_like(op, "weights", call.weights, call.places.shape, (torch.float32,))
    check_tensor(op, name, matrix, KERNEL_DTYPES)
    if matrix.ndim != 2 or matrix.shape[0] != rows:
        raise ValueError(f"{op}: {name} has shape {list(matrix.shape)}; accepted with these places: [{rows}, columns]")


def _check_types(op: str, wide: torch.dtype, narrow: torch.dtype) -> None:
    if wide != narrow and not (wide == torch.float32 and narrow in HALF_DTYPES):
        raise TypeError(f"{op}: {names([wide, narrow])} together; accepted: equal dtypes, or float32 with a 16-bit one")


def _check_spread(call) -> None:
    op, dtype = "spread_rows", spread_dtype(call)
    check_places(op, "places", call.places)
    _check_routed(op, "x", call.x, call.places.shape[0], call)
    check_like(op, "y", call.y, (call.places.numel(), call.x.shape[1]), (dtype,))
    _check_types(op, call.x.dtype, dtype)


def _check_combine(call) -> None:
    check_places("combine_rows", "places", call.places)
    _check_routed("combine_rows", "y", call.y, call.places.numel(), call)
    _check_types("combine_rows", call.out_dtype or call.y.dtype, call.y.dtype)


# ---- in torch's operations, differentiable, of any dtype


def spread(x: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    rows = x.unsqueeze(1).expand(-1, places.shape[1], -1) if weights is None else x.unsqueeze(1) * weights.unsqueeze(2)
    rows = rows.reshape(places.numel(), x.shape[1])
    return torch.zeros_like(rows).index_copy(0, places.flatten().long(), rows)


def combine(y: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    total = y.new_zeros(places.shape[0], y.shape[1])
    for j in range(places.shape[1]):
        rows = y[places[:, j].long()]
        total = total + (rows if weights is None else weights[:, j, None] * rows)
    return total


def dots(x: Tensor, y: Tensor, places: Tensor) -> Tensor:
    """The gradient of the weights of :func:`combine`, of which ``x`` is the result's."""
    return (x.unsqueeze(1) * y[places.long()]).sum(2)


# ---- ops


def spread_dtype(call) -> torch.dtype:
    return call.out_dtype or (call.x if call.y is None else call.y).dtype


def _spread_reference(call):
    x, places = call.x.float(), call.places
    out = spread(x, places, call.weights).to(spread_dtype(call))
    return out, None if call.y is None else dots(x, call.y.float(), places)


def _combine_reference(call):
    return combine(call.y.float(), call.places, call.weights).to(call.out_dtype or call.y.dtype)


def _routes(device: str, columns: tuple[int, ...]) -> Iterator[tuple[Normal, Tensor, int]]:
    normal = Normal(device)
    for (tokens, top_k), width in zip(((7, 2), (40, 1), (3, 9), (0, 2), (5, 0)), columns, strict=False):
        places = torch.randperm(tokens * top_k, generator=normal.generator).to(device, torch.int32)
        yield normal, places.view(tokens, top_k), width


def spread_samples(device: str) -> Iterator[Sample]:
    for normal, places, columns in _routes(device, (24, 7, 600, 8, 8)):
        x, y = (normal(n, columns) for n in (places.shape[0], places.numel()))
        weights = normal(*places.shape)
        for dtype in KERNEL_DTYPES:
            yield (x.to(dtype), places), {}
            yield (x, places, weights), {"out_dtype": dtype}
            yield (x.to(dtype), places, weights, y.to(dtype)), {}
            yield (x, places, None, y.to(dtype)), {}


def combine_samples(device: str) -> Iterator[Sample]:
    for normal, places, columns in _routes(device, (24, 7, 600, 8, 8)):
        y, weights = normal(places.numel(), columns), normal(*places.shape)
        for dtype in KERNEL_DTYPES:
            yield (y.to(dtype), places), {}
            yield (y.to(dtype), places, weights), {"out_dtype": torch.float32}
            yield (y.t().contiguous().t().to(dtype), places, weights), {}


spread_op = define(
    "spread_rows(Tensor x, Tensor places, Tensor? weights=None, Tensor? y=None, *, ScalarType? out_dtype=None) "
    "-> (Tensor, Tensor)",
    _spread_reference,
    bound=True,
    samples=spread_samples,
    check=_check_spread,
)
combine_op = define(
    "combine_rows(Tensor y, Tensor places, Tensor? weights=None, *, ScalarType? out_dtype=None) -> Tensor",
    _combine_reference,
    bound=True,
    samples=combine_samples,
    check=_check_combine,
)
