"""Shapes and dtypes of the tensors that differentiable ops pass on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._dispatch.library import PLAIN


def is_strided(x: torch.Tensor) -> bool:
    """False for nested, sparse and MKLDNN tensors, which torch's own ops serve."""
    return x.layout is torch.strided and not x.is_nested


def is_foreign(weight: torch.Tensor) -> bool:
    """True for a weight that only torch's own product can read: sparse, or of a class that brings its own, such as torchao's
    quantised weights."""
    if type(weight) in PLAIN:
        return not is_strided(weight)
    override = getattr(type(weight).__torch_function__, "__func__", None)  # None: disabled, as in fake tensors
    return not is_strided(weight) or override not in (None, torch.Tensor.__torch_function__.__func__)


def values_are_known(x: torch.Tensor) -> bool:
    """True if the host may read the values of ``x``."""
    return type(x) in PLAIN and x.device.type == "cpu" and not torch.compiler.is_compiling()


def aligned(x: torch.Tensor | None) -> torch.Tensor | None:
    """``x``, or a copy if it is not aligned to 16 bytes: the row kernels then take another path, which adds in another order."""
    if x is None or type(x) not in PLAIN or x.is_meta or x.data_ptr() % 16 == 0 or torch.compiler.is_compiling():
        return x
    return x.clone(memory_format=torch.contiguous_format)


def flat(x: torch.Tensor) -> torch.Tensor:
    """``[..., K]`` as ``[rows, K]``."""
    return x if x.ndim == 2 else x.flatten(0, -2) if x.ndim > 2 else x.unsqueeze(0)


def like(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``[rows, N]`` with the leading dimensions of ``x``."""
    return rows if x.ndim == 2 else reshaped(rows, (*x.shape[:-1], rows.shape[-1]))


def reshaped(fresh: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A fresh contiguous tensor in another shape, for a result.

    Not by ``view``: autograd forbids in-place writes to a view that a Function returned. torch's own linear ends in this operation,
    too.
    """
    same = fresh.ndim == len(shape) and fresh.shape == shape
    return fresh if same else _unsafe_view(fresh, shape)


_unsafe_view = torch.ops.aten._unsafe_view.default


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x if x.dtype is dtype else x.to(dtype)
