"""Shared by the tests of the scaler: optimizers of every kind and an iteration."""

import pytest
import torch

from amp_kernels.optim import SGD, AdamW, Lion

OPTIMIZERS = {
    "ours": lambda p: AdamW(p, lr=0.1),
    "ours sgd": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "ours lion": lambda p: Lion(p, lr=0.1),
    "torch fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "torch": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}
EACH = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def is_ours(optimizer):
    return type(optimizer).__module__.startswith("amp_kernels.")


def params(*shapes):
    return [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]


def iterate(scaler, optimizer, bad=(), explicit=False, value=1.0, **step):
    """One iteration with all gradients ``value``; those of the parameters numbered ``bad`` hold a NaN."""
    scaler.scale(torch.ones(()))
    for i, param in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        param.grad = torch.full_like(param, value)
        if i in bad:
            param.grad.view(-1)[-1] = torch.nan
    if explicit:
        scaler.unscale_(optimizer)
    scaler.step(optimizer, **step)
    scaler.update()
