"""SGD over float32, float16 and bfloat16 parameters, in one fused pass."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .._checks import lists
from .._updates.sgd import sgd_
from .._updates.state import NESTEROV
from ._algorithm import Algorithm
from ._base import FusedOptimizer
from ._options import MixedPrecision, takes_options
from ._state import Place

if TYPE_CHECKING:
    from typing_extensions import Unpack


class SGDAlgorithm(Algorithm):
    """Momentum, which a group may be without."""

    def check_group(self, name: str, group: dict[str, Any]) -> None:
        lists.check_number(name, "dampening", group["dampening"])
        if group.get("nesterov") and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")

    def moments(self, group: dict[str, Any], loaded: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] != 0 or loaded.get("momentum_buffer") is not None else ()

    def loaded_step(self, shown: Set[str], values: dict[str, Any]) -> Tensor | float:
        """0 makes the next step start the momentum buffer. torch counts no steps; otherwise the count matters for random bits
        only."""
        has_buffer = "momentum_buffer" in shown
        if has_buffer and values.get("momentum_buffer") is None:
            return 0.0
        return values.get("step", 1.0 if has_buffer else 0.0)

    def exported(self, values: dict[str, Any], place: Place | None) -> dict[str, Any]:
        """Replace a buffer that no step has written by None: torch has no buffer before the first step that is taken."""
        unwritten = place is not None and "momentum_buffer" in values and place.block.steps[place.slot].item() == 0
        return {**values, "momentum_buffer": None} if unwritten else values

    def flags(self, group: dict[str, Any]) -> int:
        return super().flags(group) | (NESTEROV if group["nesterov"] else 0)


class SGD(FusedOptimizer, torch.optim.SGD):
    """:class:`torch.optim.SGD` in one pass over memory: unscaling, clipping, momentum, master weight and 16-bit copies
    together.

    Arithmetic is float32 whatever is stored. Checkpoints are interchangeable with torch's in both directions. The
    momentum buffer starts with the first step that is *taken*, also when an overflow skipped earlier ones.

    Args:
        params, lr, maximize, foreach, fused, differentiable: as in :class:`AdamW`.
        momentum: 0 keeps no buffer.
        dampening: of the gradient that enters the buffer.
        weight_decay: L2 term added to the gradient.
        nesterov: needs a momentum and no dampening.
        cautious: with momentum, do not move a weight where the direction has not the sign of the gradient, as in
            :class:`AdamW`.
        options: those of all optimizers here, :class:`MixedPrecision`.

    Raises:
        ValueError: a number is out of range or NaN, or an option is not among those accepted.
        TypeError: a parameter that is not frozen is not of an accepted dtype, or sparse, or a tensor subclass.
        RuntimeError: ``differentiable=True``, or ``fused=True`` together with ``foreach``.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        >>> optimizer = ak.optim.SGD([weight], lr=2**-10)  # steps of 2^-10 are lost on a bfloat16 one
        >>> weight.grad = torch.ones_like(weight)
        >>> for _ in range(16):
        ...     optimizer.step()
        >>> weight.data
        tensor([0.9844, 0.9844, 0.9844], dtype=torch.bfloat16)
    """

    _algorithm = SGDAlgorithm(sgd_, shows_step=False, switches=("cautious",))

    @takes_options
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        cautious: bool = False,
        **options: Unpack[MixedPrecision],
    ) -> None:
        self._set_options(options, foreach, fused, differentiable, cautious=cautious)
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, maximize=maximize, fused=True)
