"""Lion over float32, float16 and bfloat16 parameters, in one fused pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ..ops.lion import op as lion_
from ._base import FusedOptimizer


class Lion(FusedOptimizer):
    """Lion in one pass over memory: unscaling, clipping, moment, master weight and 16-bit copies together.

    Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023: every weight moves by ``lr`` in the
    direction of a sign, so that one moment suffices; the paper takes 3 to 10 times less learning rate than for AdamW,
    and as much more weight decay. torch has no Lion; the signature follows torch's other optimizers, the state,
    ``exp_avg`` alone, that of the authors' code. Arithmetic is float32 whatever is stored::

        c = beta1 * exp_avg + (1 - beta1) * grad;  param -= lr * (sign(c) + weight_decay * param)
        exp_avg = beta2 * exp_avg + (1 - beta2) * grad

    Args:
        params: parameters, named parameters or group dicts; float32, float16 or bfloat16, dense, any devices, freely
            mixed.
        lr: learning rate, a number or a one-element tensor (read on the device, so schedulers act on captured graphs
            too).
        betas: decay rates of the direction and of the moment, two numbers in [0, 1).
        weight_decay: decoupled decay, multiplied by ``lr``.
        maximize: ascend instead of descend.
        foreach, fused, capturable, differentiable: as torch's optimizers take them. The step is always fused and can
            always be captured in a CUDA graph, once the state exists; ``differentiable`` only ``False``.
        master_weights, shadow_dtype, state_dtype, max_grad_norm, skip_nonfinite, ema_decay, zero_grads, seed: as in
            :class:`AdamW`.

    Raises:
        ValueError: a number is out of range or NaN, or an option is not among those accepted.
        TypeError: a parameter is not of an accepted dtype, or sparse, or a tensor subclass.
        RuntimeError: ``differentiable=True``, or ``fused=True`` together with ``foreach``.
    """

    _op = lion_
    _moment_arguments = ("exp_avg",)
    _shows_step = False
    _required = ("exp_avg",)

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
            "betas": tuple(betas),
            "weight_decay": weight_decay,
            "maximize": maximize,
            "foreach": None,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": True,
        }
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:  # those of the authors' code have none of these
            for key in ("maximize", "capturable", "differentiable"):
                group.setdefault(key, False)
        super().__setstate__(state)

    def _check_group(self, group: dict[str, Any]) -> None:
        self._check_float("weight_decay", group["weight_decay"])
        self._check_range("learning rate", group["lr"])
        self._check_range("weight_decay value", group["weight_decay"])
        self._check_betas(group["betas"])

    def _moment_names(self, group: dict[str, Any], loaded: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg",)

    def _hyper(self) -> tuple[list[float], ...]:
        return *self._betas(), self._numbers("weight_decay")
