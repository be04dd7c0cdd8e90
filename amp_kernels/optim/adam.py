"""Adam over float32, float16 and bfloat16 parameters, in one fused pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .._updates.adamw import adamw_
from ._algorithm import SWITCHES
from ._base import FusedOptimizer
from ._options import MixedPrecision, takes_options
from .adamw import AdamAlgorithm

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Adam(FusedOptimizer, torch.optim.Adam):
    """:class:`torch.optim.Adam` in one pass over memory: unscaling, clipping, moments, master weight and 16-bit copies
    together.

    Arithmetic is float32 whatever is stored, in the order of torch's single-tensor implementation (Kingma and Ba,
    "Adam: a method for stochastic optimization", ICLR 2015). Checkpoints are interchangeable with torch's in both
    directions.

    Args:
        params, lr, betas, eps, amsgrad, maximize, cautious, decouple_lr, foreach, fused, capturable, differentiable: as in :class:`AdamW`.
        weight_decay: L2 term added to the gradient; with ``decoupled_weight_decay`` the decay of :class:`AdamW`.
        decoupled_weight_decay: decay the weight itself, as :class:`AdamW` does.
        options: those of all optimizers here, :class:`MixedPrecision`.

    Raises:
        ValueError: a number is out of range or NaN, or an option is not among those accepted.
        TypeError: a parameter that is not frozen is not of an accepted dtype, or sparse, or a tensor subclass.
        RuntimeError: ``differentiable=True``, or ``fused=True`` together with ``foreach``.

    Examples:
        >>> model = torch.nn.Linear(4, 2)
        >>> theirs = torch.optim.Adam(model.parameters(), lr=1e-2)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> theirs.step()
        >>> optimizer = ak.optim.Adam(model.parameters())
        >>> optimizer.load_state_dict(theirs.state_dict())
        >>> optimizer.step()
        >>> optimizer.state[model.weight]["step"]
        tensor(2.)
    """

    _algorithm = AdamAlgorithm(adamw_, required=("step",), switches=SWITCHES)

    @takes_options
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        cautious: bool = False,
        decouple_lr: bool = False,
        decoupled_weight_decay: bool = False,
        **options: Unpack[MixedPrecision],
    ) -> None:
        self._set_options(options, foreach, fused, differentiable, cautious=cautious, decouple_lr=decouple_lr)
        hints = {"maximize": maximize, "capturable": capturable, "fused": True}
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, decoupled_weight_decay=decoupled_weight_decay, **hints
        )
