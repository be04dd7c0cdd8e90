"""lion_ in Triton: what the kernels of ``_update.py`` need to know about Lion. The formula is csrc/math/lion.h.

Work: 14 bytes (split master, bf16 moment, 16-bit gradient) to 22 bytes (fp32 weight, moment and gradient, shadow) an
element and some ten instructions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _update
from ._update import real


@triton.jit
def _derive(group, lr, flags, step):
    beta1, beta2 = real(group + 3), real(group + 4)
    return (
        lr.to(tl.float32),
        (1.0 - lr * real(group + 5)).to(tl.float32),
        beta1.to(tl.float32),
        (1.0 - beta1).to(tl.float32),
        beta2.to(tl.float32),
        (1.0 - beta2).to(tl.float32),
    )


@triton.jit
def _apply(p, moments, g, scalars):
    lr, decay, keep_c, take_c, keep_m, take_m = scalars
    m = moments[0]
    c = tl.fma(keep_c, m, take_c * g)
    sign = tl.where(c > 0.0, 1.0, tl.where(c < 0.0, -1.0, c))  # of NaN: NaN
    return tl.fma(-lr, sign, p * decay), tl.fma(keep_m, m, take_m * g)


_RULE = _update.Rule(_derive, _update.read_six, _apply)


def lion_(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    steps: list[torch.Tensor],
    masters: list[torch.Tensor],
    shadows: list[torch.Tensor],
    emas: list[torch.Tensor],
    layout: torch.Tensor,
    lrs: list[torch.Tensor],
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    sum_sq: torch.Tensor | None,
    lr: list[float],
    beta1: list[float],
    beta2: list[float],
    weight_decay: list[float],
    ema_decay: list[float],
    flags: list[int],
    max_norm: float,
    seed: int,
) -> None:
    """``amp_kernels::lion_`` for tensors that Triton can reach; see ``amp_kernels/ops/lion.py``."""
    options = list(zip(lr, beta1, beta2, weight_decay, strict=True))
    state = params, grads, (exp_avgs,), steps, masters, shadows, emas, layout
    _update.launch(_RULE, *state, lrs, grad_scale, found_inf, sum_sq, options, ema_decay, flags, max_norm, seed)
