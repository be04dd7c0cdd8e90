"""sgd_: momentum SGD over a parameter list, through ak.optim.SGD, against torch's fused SGD."""

from collections.abc import Iterator

import torch

import amp_kernels as ak

from .. import updates
from ..harness import Case, Scope

OPTIONS = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}


def cases(scope: Scope) -> Iterator[Case]:
    yield from updates.cases(
        "sgd_",
        scope,
        bytes_per_param=20,  # reads weight, gradient, momentum; writes weight, momentum
        flops_per_param=6,
        torch_step=lambda params: torch.optim.SGD(params, fused=True, **OPTIONS).step,
        our_step=lambda params: ak.optim.SGD(params, **OPTIONS).step,
        reference=_reference,
    )


def _reference(p: torch.Tensor, grads: updates.Tensors) -> torch.Tensor:
    """In the first step the momentum buffer is the gradient itself."""
    momentum = torch.zeros_like(p)
    for g in grads:
        momentum = OPTIONS["momentum"] * momentum + g + OPTIONS["weight_decay"] * p
        p = p - OPTIONS["lr"] * momentum
    return p
