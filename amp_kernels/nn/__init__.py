"""Modules over the ops, drop-in for torch.nn's, and ``convert``, which puts them into a model."""

from .convert import convert
from .linear import Linear

__all__ = ["Linear", "convert"]
