"""AdamW over float32, float16 and bfloat16 parameters, in one fused pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .._updates.adamw import adamw_
from .._updates.state import COUPLED_DECAY
from ._algorithm import SWITCHES, Algorithm
from ._base import FusedOptimizer
from ._options import MixedPrecision, takes_options

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AdamAlgorithm(Algorithm):
    """Adam's and AdamW's: a flag of each group decides how the decay enters."""

    def check_group(self, name: str, group: dict[str, Any]) -> None:
        if not group.get("bias_correction", True):  # an option of Apex
            raise ValueError(f"{name}: bias_correction is False; accepted: True")
        if group.get("decouple_lr") and not group["decoupled_weight_decay"]:
            raise ValueError(f"{name}: decouple_lr is True; accepted with decoupled_weight_decay=False: False")

    def moments(self, group: dict[str, Any], loaded: dict[str, Any]) -> tuple[str, ...]:
        amsgrad = group.get("amsgrad") or loaded.get("max_exp_avg_sq") is not None
        return self.declared.moments if amsgrad else self.declared.moments[:2]

    def flags(self, group: dict[str, Any]) -> int:
        return super().flags(group) | (0 if group["decoupled_weight_decay"] else COUPLED_DECAY)


class AdamW(FusedOptimizer, torch.optim.AdamW):
    """:class:`torch.optim.AdamW` in one pass over memory: unscaling, clipping, moments, master weight and 16-bit copies
    together.

    Arithmetic is float32 whatever is stored, in the order of torch's single-tensor implementation (Loshchilov and
    Hutter, "Decoupled weight decay regularization", ICLR 2019). Checkpoints are interchangeable with torch's in both
    directions.

    Args:
        params: parameters, named parameters or group dicts; float32, float16 or bfloat16, dense, any devices, freely
            mixed. Frozen ones (``requires_grad=False``) of any dtype and class are kept and not stepped.
        lr: learning rate, a number or a one-element tensor (read on the device, so schedulers act on captured graphs
            too).
        betas: decay rates of the moments, two floats in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decoupled decay, multiplied by ``lr``.
        amsgrad: divide by the root of the largest second moment so far (Reddi, Kale and Kumar, "On the convergence of
            Adam and beyond", ICLR 2018), kept as ``max_exp_avg_sq``; may differ between groups. Switched on for state
            that has none, it starts from the next second moment.
        maximize: ascend instead of descend.
        cautious: do not move a weight where the first moment has not the sign of the gradient (Liang et al., "Cautious optimizers:
            improving training with one line of code", 2024, without the rescaling); the weight still decays.
        decouple_lr: decay weights by ``weight_decay * lr / initial_lr``, so that the decay does not depend on the learning
            rate, only on its schedule. ``initial_lr`` of a group is its first learning rate, as in torch's schedulers.
        foreach, fused, capturable: accepted for compatibility. The step is always fused, and can always be captured in a
            CUDA graph, once the state exists.
        differentiable: only ``False``.
        options: those of all optimizers here, :class:`MixedPrecision`.

    Raises:
        ValueError: a number is out of range or NaN, or an option is not among those accepted.
        TypeError: a parameter that is not frozen is not of an accepted dtype, or sparse, or a tensor subclass.
        RuntimeError: ``differentiable=True``, or ``fused=True`` together with ``foreach``.

    Examples:
        >>> model = torch.nn.Linear(4, 2)
        >>> groups = [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.0}]
        >>> optimizer = ak.optim.AdamW(groups, lr=3e-4, max_grad_norm=1.0)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> theirs = torch.optim.AdamW(groups)
        >>> theirs.load_state_dict(optimizer.state_dict())
        >>> theirs.step()
        >>> theirs.state[model.weight]["step"]
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
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
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
        hints = {"maximize": maximize, "capturable": capturable, "fused": True}
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **hints)
