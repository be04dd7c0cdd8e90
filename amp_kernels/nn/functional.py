"""torch.nn.functional's names and signatures over this package's functions.

Examples:
    In place of ``import torch.nn.functional as F``, for the functions that are there:

    >>> from amp_kernels.nn import functional as F
    >>> F.softmax(torch.zeros(2, dtype=torch.bfloat16), dim=-1)
    tensor([0.5000, 0.5000], dtype=torch.bfloat16)
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import activation as _activation
from ..ops import softmax as _softmax
from ..ops.activation import gelu
from ..ops.cross_entropy import cross_entropy
from ..ops.embedding import embedding
from ..ops.linear import linear
from ..ops.norm import layer_norm, rms_norm

__all__ = ["cross_entropy", "embedding", "gelu", "layer_norm", "linear", "log_softmax", "rms_norm", "silu", "softmax"]


def _dimension(input: Tensor, dim: int | None) -> int:
    """What torch takes without ``dim``, where it warns: the first dimension of none, one or three, else the second."""
    return dim if dim is not None else torch.nn.functional._get_softmax_dim("softmax", input.dim(), 4)


def softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    """torch.nn.functional.softmax by :func:`amp_kernels.softmax`."""
    return _softmax.softmax(input, _dimension(input, dim), dtype=dtype)


def log_softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor:
    """torch.nn.functional.log_softmax by :func:`amp_kernels.log_softmax`."""
    return _softmax.log_softmax(input, _dimension(input, dim), dtype=dtype)


def silu(input: Tensor, inplace: bool = False) -> Tensor:
    """torch.nn.functional.silu by :func:`amp_kernels.silu`; in place it is torch's own."""
    return torch.nn.functional.silu(input, inplace=True) if inplace else _activation.silu(input)
