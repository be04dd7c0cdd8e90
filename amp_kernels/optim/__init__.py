"""Fused optimizers with torch's signatures, state layout and checkpoints, and master weights for 16-bit parameters."""

from ..ops._shadows import refresh_shadows
from ._export import fp32_state_dict
from ._options import MixedPrecision
from .adam import Adam
from .adamw import AdamW
from .lamb import LAMB
from .lion import Lion
from .sgd import SGD

__all__ = ["LAMB", "SGD", "Adam", "AdamW", "Lion", "MixedPrecision", "fp32_state_dict", "refresh_shadows"]
