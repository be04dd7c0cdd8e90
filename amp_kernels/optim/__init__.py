"""Fused optimizers with torch's signatures, state layout and checkpoints, and master weights for 16-bit parameters.

Examples:
    16-bit parameters, of which the optimizer keeps the other 16 bits:

    >>> model = torch.nn.Linear(4, 2).to(torch.bfloat16)
    >>> optimizer = ak.optim.AdamW(model.parameters(), master_weights="split", max_grad_norm=1.0)
    >>> model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    >>> optimizer.step()
    >>> ak.fp32_state_dict(model, optimizer)["weight"].dtype
    torch.float32
"""

from ..ops._shadows import refresh_shadows
from ._export import fp32_state_dict
from ._options import MixedPrecision
from ._release import ReleasedGradients, release_gradients
from ._units import GroupResults
from .adam import Adam
from .adamw import AdamW
from .lamb import LAMB
from .lion import Lion
from .muon import Muon
from .sgd import SGD

__all__ = [
    "LAMB",
    "SGD",
    "Adam",
    "AdamW",
    "GroupResults",
    "Lion",
    "MixedPrecision",
    "Muon",
    "ReleasedGradients",
    "fp32_state_dict",
    "refresh_shadows",
    "release_gradients",
]
