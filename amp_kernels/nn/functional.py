"""This package's functions with the names and signatures of torch.nn.functional.

Examples:
    Replace ``import torch.nn.functional as F`` for the functions that exist here:

    >>> from amp_kernels.nn import functional as F
    >>> F.layer_norm(torch.tensor([1.0, 3.0], dtype=torch.bfloat16), [2])
    tensor([-1.,  1.], dtype=torch.bfloat16)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _functional as F
from .._removed import attributes_of as _attributes_of
from .._removed import refuse as _refuse
from ..ops import activation as _activation
from ..ops import cross_entropy as _cross_entropy
from ..ops import linear as _linear
from ..ops import linear_cross_entropy as _linear_cross_entropy
from ..ops import norm as _norm
from ..ops.activation import gelu
from ..ops.embedding import embedding

__getattr__ = _attributes_of(__name__)

__all__ = ["cross_entropy", "embedding", "gelu", "layer_norm", "linear", "linear_cross_entropy", "rms_norm", "silu"]


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    **options: Any,
) -> Tensor:
    """torch.nn.functional.cross_entropy with :func:`amp_kernels.cross_entropy`, which has more ``options``."""
    if size_average is not None or reduce is not None:
        reduction = torch.nn._reduction.legacy_get_string(size_average, reduce)
    told = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    return _cross_entropy.cross_entropy(input, target, weight, **told, **options)


def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    **removed: Any,
) -> Tensor:
    """torch.nn.functional.layer_norm with :func:`amp_kernels.layer_norm`, which also makes an addition in front."""
    _refuse("nn.functional.layer_norm", removed)
    return _norm.layer_norm(input, normalized_shape, weight, bias, eps)


def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    **removed: Any,
) -> Tensor:
    """torch.nn.functional.rms_norm with :func:`amp_kernels.rms_norm`, which also makes an addition in front."""
    _refuse("nn.functional.rms_norm", removed)
    return _norm.rms_norm(input, normalized_shape, weight, eps)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None) -> Tensor:
    """torch.nn.functional.linear with :func:`amp_kernels.linear`, which also has an ``activation``."""
    return _linear.linear(input, weight, bias, activation=activation)


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: object = None,
    **more: Any,
) -> Tensor:
    """torch.nn.functional.linear_cross_entropy (torch 2.13) with :func:`amp_kernels.linear_cross_entropy`, which has ``more`` options.

    ``options``, which selects torch's chunking strategy, is ignored: this function always works in chunks and sums in fp32. As in
    torch, a weight ``[classes, *dimensions, in_features]`` makes several predictions for each row of an input ``[N, in_features]``,
    and all logits with them.
    """
    told = {"reduction": reduction, "label_smoothing": label_smoothing, **more}
    if not isinstance(linear_weight, Tensor) or linear_weight.ndim <= 2:
        return _linear_cross_entropy.linear_cross_entropy(
            input, linear_weight, target, linear_bias=linear_bias, weight=weight, ignore_index=ignore_index, **told
        )
    predictions = linear_weight.shape[:-1]
    if input.ndim != 2 or (linear_bias is not None and linear_bias.shape != predictions):
        bias = None if linear_bias is None else list(linear_bias.shape)
        raise ValueError(
            f"linear_cross_entropy: input has shape {list(input.shape)}, linear_weight {list(linear_weight.shape)} and linear_bias "
            f"{bias}; accepted: [N, in_features], [classes, *dimensions, in_features], None or [classes, *dimensions]"
        )
    rows = linear_bias if linear_bias is None else linear_bias.flatten()
    logits = _linear.linear(input, linear_weight.flatten(0, -2), rows).unflatten(-1, predictions)
    return cross_entropy(logits, target, weight, ignore_index=-100 if ignore_index is None else ignore_index, **told)


def silu(input: Tensor, inplace: bool = False) -> Tensor:
    """torch.nn.functional.silu with :func:`amp_kernels.silu`; ``inplace=True`` uses torch's own."""
    return F.silu(input, inplace=True) if inplace else _activation.silu(input)
