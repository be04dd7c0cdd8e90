"""Modules over the ops, drop-in for torch.nn's, and ``convert``, which puts them into a model."""

from .convert import convert
from .linear import Linear
from .main_grad import accumulate_fp32
from .mlp import MLP

__all__ = ["MLP", "Linear", "accumulate_fp32", "convert"]
