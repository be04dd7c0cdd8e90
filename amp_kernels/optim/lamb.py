"""LAMB over float32, float16 and bfloat16 parameters, in two fused passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ..ops._blocks import ADAPT_ALL, NO_BIAS_CORRECTION
from ..ops.lamb import op as lamb_
from ._base import FusedOptimizer
from ._checkpoint import Uncast


class LAMB(FusedOptimizer):
    """LAMB in two passes over memory: unscaling, clipping, moments and the norms of weights and directions in the first
    one, weights, masters and 16-bit copies in the second.

    You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", ICLR 2020: Adam's direction
    (with decoupled decay), in steps whose length is a fraction ``lr`` of the norm of the weights they move, tensor by
    tensor. For large batches. torch has no LAMB; names and defaults follow Apex' ``FusedLAMB``, except that
    clipping is off unless ``max_grad_norm`` is given (there 1.0). Arithmetic is float32 whatever is stored, norms are
    summed in float64::

        u = m / (1 - beta1**step) / (sqrt(v / (1 - beta2**step)) + eps) + weight_decay * param
        param -= lr * norm(param) / norm(u) * u

    Args:
        params: parameters, named parameters or group dicts; float32, float16 or bfloat16, dense, any devices, freely
            mixed. A parameter is a tensor of its own: the ratio of norms is taken over each one.
        lr: learning rate, a number or a one-element tensor (read on the device, so schedulers act on captured graphs
            too).
        bias_correction: divide the moments by what their start at zero leaves out.
        betas: decay rates of the moments, two numbers in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decoupled decay, part of the direction.
        use_nvlamb: scale the steps of groups without weight decay by the ratio of norms, too, as the paper does. By
            default such groups (biases, norms) take Adam's steps.
        maximize: ascend instead of descend.
        foreach, fused, capturable, differentiable: as in :class:`Lion`.
        master_weights, shadow_dtype, state_dtype, max_grad_norm, skip_nonfinite, ema_decay, zero_grads, seed: as in
            :class:`AdamW`.

    Raises:
        ValueError: a number is out of range or NaN, or an option is not among those accepted.
        TypeError: a parameter is not of an accepted dtype, or sparse, or a tensor subclass.
        RuntimeError: ``differentiable=True``, or ``fused=True`` together with ``foreach``.
    """

    _op = lamb_
    _moment_arguments = ("exp_avg", "exp_avg_sq")
    _required = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        use_nvlamb: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: str = "fp32",
        shadow_dtype: torch.dtype | None = None,
        state_dtype: torch.dtype = torch.float32,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        ema_decay: float | None = None,
        zero_grads: bool = False,
        seed: int = 0,
    ) -> None:
        self._set_options(
            master_weights, shadow_dtype, state_dtype, max_grad_norm, skip_nonfinite, ema_decay, zero_grads, seed
        )
        if differentiable:
            raise RuntimeError("`fused` does not support `differentiable`")
        if fused and foreach:
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
        defaults = {
            "lr": lr,
            "bias_correction": bool(bias_correction),
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "use_nvlamb": bool(use_nvlamb),
            "maximize": maximize,
            "foreach": None,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": True,
        }
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        defaults = {"bias_correction": True, "use_nvlamb": False, "maximize": False}
        for group in state["param_groups"]:  # those of other implementations lack some of these
            for key, value in {**defaults, "capturable": False, "differentiable": False}.items():
                group.setdefault(key, value)
            step = group.pop("step", None)  # Apex counts once for a group
            for param in group["params"] if step is not None else ():
                values = state["state"].get(param)
                values = values.value if isinstance(values, Uncast) else values
                if values and "step" not in values:
                    state["state"][param] = Uncast({**values, "step": step})
        super().__setstate__(state)

    def _check_group(self, group: dict[str, Any]) -> None:
        for key in ("eps", "weight_decay"):
            self._check_float(key, group[key])
        self._check_range("learning rate", group["lr"])
        self._check_range("epsilon value", group["eps"])
        self._check_range("weight_decay value", group["weight_decay"])
        self._check_betas(group["betas"])

    def _moment_names(self, group: dict[str, Any], loaded: dict[str, Any]) -> tuple[str, ...]:
        return "exp_avg", "exp_avg_sq"

    def _flags(self) -> list[int]:
        own = [
            (0 if group["bias_correction"] else NO_BIAS_CORRECTION) | (ADAPT_ALL if group["use_nvlamb"] else 0)
            for group in self.param_groups
        ]
        return [flags | extra for flags, extra in zip(super()._flags(), own, strict=True)]

    def _hyper(self) -> tuple[list[float], ...]:
        return *self._betas(), self._numbers("eps"), self._numbers("weight_decay")
