"""lion_: Lion over a parameter list, through ak.optim.Lion. torch has no Lion: its side is written in torch's own
multi-tensor operations, the way torch.optim does it without a fused kernel."""

from collections.abc import Callable, Iterator

import torch

import amp_kernels as ak

from .. import updates
from ..harness import Case, Scope

LR, BETAS, WEIGHT_DECAY = 1e-2, (0.9, 0.99), 0.1


def cases(scope: Scope) -> Iterator[Case]:
    yield from updates.cases(
        "lion_",
        scope,
        bytes_per_param=20,  # reads weight, gradient, moment; writes weight, moment
        flops_per_param=8,
        torch_step=_torch,
        our_step=lambda params: ak.optim.Lion(params, lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY).step,
        reference=_reference,
    )


def _torch(params: updates.Tensors) -> Callable[[], None]:
    grads, moments = [param.grad for param in params], [torch.zeros_like(param) for param in params]

    def step():
        direction = torch._foreach_lerp(grads, moments, BETAS[0])
        torch._foreach_sign_(direction)
        torch._foreach_mul_(params, 1 - LR * WEIGHT_DECAY)
        torch._foreach_add_(params, direction, alpha=-LR)
        torch._foreach_lerp_(moments, grads, 1 - BETAS[1])

    return step


def _reference(p: torch.Tensor, grads: updates.Tensors) -> torch.Tensor:
    moment = torch.zeros_like(p)
    for g in grads:
        p = p * (1 - LR * WEIGHT_DECAY) - LR * (BETAS[0] * moment + (1 - BETAS[0]) * g).sign()
        moment = BETAS[1] * moment + (1 - BETAS[1]) * g
    return p
