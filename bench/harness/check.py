"""Compares what a provider computes with the float64 reference."""

import itertools
import operator
from collections.abc import Iterator
from typing import Any

import torch


class Mismatch(Exception):
    """A provider's result is not the reference's."""


def worst_error(got: dict[str, Any], want: dict[str, tuple[Any, float]]) -> float:
    """The largest relative error of the results. Raises Mismatch where one is above its bound, as NaN is, or misshapen.

    The error of a tensor is that of its worst row, in units of that row's norm or of an average row's, whichever is
    larger: the norm of the whole would hide a wrong tile of a large matrix, and rounding is relative to what is
    rounded. A row is the last dimension, with those before it until it has 16 elements.
    """
    if next(iter(want)) not in got:
        raise Mismatch(f"no result {next(iter(want))!r}")
    worst = 0.0
    for name, result in got.items():
        expected, bound = want[name]
        result, expected = _as_list(result), _as_list(expected)
        if len(result) != len(expected):
            raise Mismatch(f"{name}: {len(result)} tensors instead of {len(expected)}")
        for i, (g, w) in enumerate(zip(result, expected, strict=True)):
            if g.shape != w.shape:
                raise Mismatch(f"{name}[{i}] has shape {list(g.shape)} instead of {list(w.shape)}")
        for i, g, w in _stacked(result, expected):
            error = _row_error(g, w)
            if not error <= bound:
                raise Mismatch(f"{name}[{i}]: relative error {error:.2e}, accepted {bound:.2e}")
            worst = max(worst, error)
    return worst


def _stacked(got: list[torch.Tensor], want: list[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """The pairs; vectors of one length that follow each other become the rows of one matrix, or a list of 10,000 takes
    the check longer than the timing. With them the number of the first."""
    i = 0
    while i < len(want):
        end = i + 1
        while want[i].dim() == 1 and end < len(want) and want[end].shape == want[i].shape:
            end += 1
        yield (i, got[i], want[i]) if end == i + 1 else (i, torch.stack(got[i:end]), torch.stack(want[i:end]))
        i = end


def _row_error(got: torch.Tensor, want: torch.Tensor) -> float:
    if want.numel() == 0:
        return 0.0
    row = want.numel()
    if want.dim() > 1:
        row = next((n for n in itertools.accumulate(reversed(want.shape), operator.mul) if n >= 16), row)
    want = want.double().reshape(-1, row)
    differences = (got.double().reshape(-1, row) - want).norm(dim=1)
    norms = want.norm(dim=1)
    return (differences / norms.clamp(min=norms.square().mean().sqrt() or 1.0)).max().item()


def _as_list(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)
