"""Modules over the ops, drop-in for torch.nn's, and ``convert``, which puts them into a model."""

from .convert import convert, revert
from .cross_entropy import CrossEntropyLoss
from .linear import Linear
from .linear_cross_entropy import LinearCrossEntropyLoss
from .main_grad import accumulate_fp32
from .mlp import MLP
from .norm import LayerNorm, RMSNorm
from .override_matmul import override_matmul
from .to_half import to_half

__all__ = [
    "MLP",
    "CrossEntropyLoss",
    "LayerNorm",
    "Linear",
    "LinearCrossEntropyLoss",
    "RMSNorm",
    "accumulate_fp32",
    "convert",
    "override_matmul",
    "revert",
    "to_half",
]
