"""Lion over float32, float16 and bfloat16 parameters, in one fused pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.optim.optimizer import ParamsT

from .._updates.lion import lion_
from ._algorithm import SWITCHES, Algorithm
from ._base import StandaloneOptimizer
from ._options import MixedPrecision, takes_options

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Lion(StandaloneOptimizer):
    """Lion in one pass over memory: unscaling, clipping, moment, master weight and 16-bit copies together.

    Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023: every weight moves by ``lr`` in the
    direction of a sign, so that one moment suffices; the paper takes 3 to 10 times less learning rate than for AdamW,
    and as much more weight decay. torch has no Lion; the signature follows torch's other optimizers, the state,
    ``exp_avg`` alone, that of the authors' code. Arithmetic is float32 whatever is stored::

        c = beta1 * exp_avg + (1 - beta1) * grad;  param -= lr * (sign(c) + weight_decay * param)
        exp_avg = beta2 * exp_avg + (1 - beta2) * grad

    Args:
        params, lr, maximize, decouple_lr, foreach, fused, capturable, differentiable: as in :class:`AdamW`.
        cautious: as in :class:`AdamW`, with ``c`` for the first moment.
        betas: decay rates of the direction and of the moment, two numbers in [0, 1).
        weight_decay: decoupled decay, multiplied by ``lr``.
        options: those of all optimizers here, :class:`MixedPrecision`.

    Raises:
        ValueError: a number is out of range or NaN, or an option is not among those accepted.
        TypeError: a parameter that is not frozen is not of an accepted dtype, or sparse, or a tensor subclass.
        RuntimeError: ``differentiable=True``, or ``fused=True`` together with ``foreach``.

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(3))
        >>> optimizer = ak.optim.Lion([weight], lr=0.5)
        >>> weight.grad = torch.tensor([1e-3, -40.0, 0.0])
        >>> optimizer.step()
        >>> weight.data
        tensor([-0.5000,  0.5000,  0.0000])
    """

    _algorithm = Algorithm(lion_, shows_step=False, switches=SWITCHES)

    @takes_options
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        cautious: bool = False,
        decouple_lr: bool = False,
        **options: Unpack[MixedPrecision],
    ) -> None:
        self._set_options(options, foreach, fused, differentiable, cautious=cautious, decouple_lr=decouple_lr)
        numbers = {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay}
        super().__init__(params, **numbers, maximize=maximize, capturable=capturable)
