"""Inputs and measures that the tests of the differentiable ops share."""

import torch


def half(*shape):
    return torch.zeros(shape, dtype=torch.float16)


def relative(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


def leaves(tensors, dtype):
    """Copies that autograd follows; ``None`` stays."""
    return [None if t is None else t.detach().to(dtype, copy=True).requires_grad_() for t in tensors]
