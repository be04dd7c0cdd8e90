"""Fused optimizers with torch's signatures, state layout and checkpoints, and master weights for 16-bit parameters."""

from ._state import refresh_shadows
from .adamw import AdamW
from .sgd import SGD

__all__ = ["SGD", "AdamW", "refresh_shadows"]
