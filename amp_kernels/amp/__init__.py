"""Loss scaling, and the choice of a format."""

from .dtype import Advice, advise, decide, recommended_dtype
from .grad_scaler import GradScaler

__all__ = ["Advice", "GradScaler", "advise", "decide", "recommended_dtype"]
