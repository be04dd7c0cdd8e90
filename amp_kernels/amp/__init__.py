"""Loss scaling, clipping, and the choice of a dtype.

Examples:
    The scale adapts:

    >>> weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    >>> optimizer = ak.optim.AdamW([weight])
    >>> scaler = ak.GradScaler("cpu", init_scale=2.0**20)
    >>> for _ in range(8):
    ...     optimizer.zero_grad()
    ...     scaler.scale(weight.sum()).backward()
    ...     scaler.step(optimizer, max_norm=1.0)
    ...     scaler.update()
    >>> scaler.skipped_steps, scaler.get_scale()  # halved until the gradients fit into float16
    (tensor(5), 32768.0)
"""

from .clip import clip_grad_norm_, get_total_norm
from .dtype import Advice, advise, decide, recommended_dtype
from .grad_scaler import GradScaler
from .graph_step import graph_step
from .scheduler import SkipAwareScheduler

__all__ = [
    "Advice",
    "GradScaler",
    "SkipAwareScheduler",
    "advise",
    "clip_grad_norm_",
    "decide",
    "get_total_norm",
    "graph_step",
    "recommended_dtype",
]
