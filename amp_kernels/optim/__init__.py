"""Fused optimizers with torch's signatures, state layout and checkpoints, and master weights for 16-bit parameters."""

from ._state import refresh_shadows
from .adam import Adam
from .adamw import AdamW
from .lion import Lion
from .sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "Lion", "refresh_shadows"]
