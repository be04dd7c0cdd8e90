"""sgd_ in Triton: what the kernels of ``_update.py`` need to know about SGD. The formula is csrc/math/sgd.h.

Work: 6 bytes (16-bit weight and gradient, no momentum) to 22 bytes (fp32 weight, momentum and gradient, shadow) an
element and some ten instructions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..ops._blocks import NESTEROV
from . import _update
from ._update import real

FLAG_NESTEROV = tl.constexpr(NESTEROV)


@triton.jit
def _derive(group, lr, flags, step):
    # The first step that is not skipped is number 1, so a buffer that an overflow left untouched is never taken for history.
    return (
        lr.to(tl.float32),
        real(group + 3).to(tl.float32),
        (1.0 - real(group + 4)).to(tl.float32),
        real(group + 5).to(tl.float32),
        ((flags & FLAG_NESTEROV) != 0).to(tl.float32),
        (step == 1.0).to(tl.float32),
    )


@triton.jit
def _apply(p, moments, g, scalars):
    lr, momentum, take, weight_decay, nesterov, first = scalars
    g = tl.where(weight_decay != 0.0, tl.fma(weight_decay, p, g), g)
    for k in tl.static_range(len(moments)):  # one, or none
        buffer = tl.where(first != 0.0, g, tl.fma(momentum, moments[k], take * g))
        moments = (buffer,)
        g = tl.where(nesterov != 0.0, tl.fma(momentum, buffer, g), buffer)
    return (tl.fma(-lr, g, p),) + moments


_RULE = _update.Rule(_derive, _update.read_six, _apply)


def sgd_(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    momentum_buffers: list[torch.Tensor],
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
    momentum: list[float],
    dampening: list[float],
    weight_decay: list[float],
    ema_decay: list[float],
    flags: list[int],
    max_norm: float,
    seed: int,
) -> None:
    """``amp_kernels::sgd_`` for tensors that Triton can reach; see ``amp_kernels/ops/sgd.py``."""
    options = list(zip(lr, momentum, dampening, weight_decay, strict=True))
    state = params, grads, (momentum_buffers,), steps, masters, shadows, emas, layout
    _update.launch(_RULE, *state, lrs, grad_scale, found_inf, sum_sq, options, ema_decay, flags, max_norm, seed)
