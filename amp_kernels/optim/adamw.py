"""AdamW over float32, float16 and bfloat16 parameters, in one fused pass."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ._adam import AdamStep


class AdamW(AdamStep, torch.optim.AdamW):
    """:class:`torch.optim.AdamW` in one pass over memory: unscaling, clipping, moments, master weight and 16-bit copies
    together.

    Arithmetic is float32 whatever is stored, in the order of torch's single-tensor implementation (Loshchilov and
    Hutter, "Decoupled weight decay regularization", ICLR 2019). Checkpoints are interchangeable with torch's in both
    directions.

    Args:
        params: parameters, named parameters or group dicts; float32, float16 or bfloat16, dense, any devices, freely
            mixed.
        lr: learning rate, a number or a one-element tensor (read on the device, so schedulers act on captured graphs
            too).
        betas: decay rates of the moments, two floats in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decoupled decay, multiplied by ``lr``.
        amsgrad: divide by the root of the largest second moment so far (Reddi, Kale and Kumar, "On the convergence of
            Adam and beyond", ICLR 2018), kept as ``max_exp_avg_sq``; may differ between groups. Switched on for state
            that has none, it starts from the next second moment.
        maximize: ascend instead of descend.
        foreach, fused: accepted for compatibility; the step is always fused.
        capturable: accepted for compatibility; a step can always be captured in a CUDA graph, once the state exists.
        differentiable: only ``False``.
        master_weights: where a 16-bit parameter's float32 weight lives: ``"fp32"`` keeps it beside the parameter,
            ``"split"`` keeps the 16 bits that the parameter lacks (2 bytes instead of 4; bfloat16 loses nothing,
            float16 nothing above 2^-17). ``"none"`` keeps nothing and rounds each updated weight stochastically, so
            that updates too small for 16 bits count on average (Gupta et al., "Deep learning with limited numerical
            precision", ICML 2015); ``"none_rne"`` rounds it to nearest even, as torch's own optimizers do. float32
            parameters are their own masters, whatever is chosen.
        shadow_dtype: ``torch.float16`` or ``torch.bfloat16`` keeps a copy of each float32 parameter, written by the
            step, that :func:`amp_kernels.linear` uses under autocast instead of casting the weight in every forward.
        state_dtype: of the moments, ``torch.float32`` or ``torch.bfloat16``.
        max_grad_norm: clip the total L2 norm of all gradients to this in every step, as
            :func:`torch.nn.utils.clip_grad_norm_` would, without writing them. ``scaler.step(opt, max_norm=...)`` has
            precedence.
        skip_nonfinite: skip, on the device, a step whose gradients are not all finite; for training without a scaler.
        ema_decay: keep an exponential moving average of each weight (Polyak and Juditsky, 1992), float32 whatever the
            parameter's dtype, in the shape of the parameter: ``ema += (1 - ema_decay) * (weight - ema)`` after every
            step that is not skipped. It starts at the weight when the state is made and is ``state[param]["ema"]``;
            :func:`amp_kernels.fp32_state_dict` exports it. A number in [0, 1), which groups may override and schedulers
            may change; ``None`` keeps none.
        zero_grads: set the gradients to 0, in place, after each step, also a skipped one.
        seed: of stochastic rounding, 0 to 2^63 - 1. The bits of an element depend on the seed, the parameter's number in
            the optimizer, its step count and the element's place in memory: a run that is repeated or resumed rounds
            alike. In the state_dict.

    Raises:
        ValueError: a number is out of range or NaN, or an option is not among those accepted.
        TypeError: a parameter is not of an accepted dtype, or sparse, or a tensor subclass.
        RuntimeError: ``fused=True`` together with ``foreach`` or ``differentiable``, as in torch.
    """

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
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach if fused else None,  # torch refuses the pair
            capturable=capturable,
            differentiable=differentiable,
            fused=True,
        )
