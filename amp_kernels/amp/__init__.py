"""Loss scaling, clipping, and the choice of a format."""

from .clip import clip_grad_norm_, get_total_norm
from .dtype import Advice, advise, decide, recommended_dtype
from .grad_scaler import GradScaler
from .scheduler import SkipAwareScheduler

__all__ = [
    "Advice",
    "GradScaler",
    "SkipAwareScheduler",
    "advise",
    "clip_grad_norm_",
    "decide",
    "get_total_norm",
    "recommended_dtype",
]
