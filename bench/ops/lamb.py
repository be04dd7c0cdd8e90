"""lamb_: LAMB over a parameter list, through ak.optim.LAMB. torch has no LAMB: its side is written in torch's own
multi-tensor operations, the way torch.optim does it without a fused kernel."""

from collections.abc import Callable, Iterator

import torch

import amp_kernels as ak

from .. import updates
from ..harness import Case, Scope

LR, BETAS, EPS, WEIGHT_DECAY = 1e-2, (0.9, 0.999), 1e-6, 0.1


def cases(scope: Scope) -> Iterator[Case]:
    options = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
    yield from updates.cases(
        "lamb_",
        scope,
        # The trust ratio needs norms of the whole tensor before a weight moves: weight, gradient and moments are read
        # and the moments written; then weight and moments are read once more and the weight is written.
        bytes_per_param=40,
        flops_per_param=24,
        torch_step=_torch,
        our_step=lambda params: ak.optim.LAMB(params, **options).step,
        reference=_reference,
    )


def _torch(params: updates.Tensors) -> Callable[[], None]:
    grads = [param.grad for param in params]
    exp_avgs, exp_avg_sqs = ([torch.zeros_like(param) for param in params] for _ in range(2))
    powers = torch.ones(2, dtype=torch.float64, device=params[0].device)  # of the betas, on the device for CUDA graphs
    betas = torch.tensor(BETAS, dtype=torch.float64, device=params[0].device)

    def step():
        powers.mul_(betas)
        correction1, correction2 = (1 - powers).float().unbind()
        torch._foreach_lerp_(exp_avgs, grads, 1 - BETAS[0])
        torch._foreach_mul_(exp_avg_sqs, BETAS[1])
        torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - BETAS[1])
        denominator = torch._foreach_div(exp_avg_sqs, correction2)
        torch._foreach_sqrt_(denominator)
        torch._foreach_add_(denominator, EPS)
        update = torch._foreach_div(exp_avgs, correction1)
        torch._foreach_div_(update, denominator)
        torch._foreach_add_(update, params, alpha=WEIGHT_DECAY)
        ratio = torch.stack(torch._foreach_norm(params)) / torch.stack(torch._foreach_norm(update))
        ratio = torch.where(ratio.isfinite() & (ratio > 0), ratio, 1.0) * -LR  # 1 where a norm is 0
        torch._foreach_mul_(update, list(ratio.unbind()))
        torch._foreach_add_(params, update)

    return step


def _reference(p: torch.Tensor, grads: updates.Tensors) -> torch.Tensor:
    """You et al., ICLR 2020, with the identity as the scaling function and bias correction."""
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for step, g in enumerate(grads, start=1):
        m = BETAS[0] * m + (1 - BETAS[0]) * g
        v = BETAS[1] * v + (1 - BETAS[1]) * g * g
        update = (m / (1 - BETAS[0] ** step)) / ((v / (1 - BETAS[1] ** step)).sqrt() + EPS) + WEIGHT_DECAY * p
        p = p - LR * p.norm() / update.norm() * update
    return p
