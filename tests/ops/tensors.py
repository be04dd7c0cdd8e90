"""Inputs and measures that the tests of the differentiable ops share."""

import torch


def half(*shape):
    return torch.zeros(shape, dtype=torch.float16)


def relative(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


def leaves(tensors, dtype):
    """Copies that autograd follows; ``None`` stays."""
    return [None if t is None else t.detach().to(dtype, copy=True).requires_grad_() for t in tensors]


def within(autocast):
    return torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None)


def gradient_penalty(function, tensors, inputs=None):
    """Second derivatives with respect to all: the loss is the squared norm of the first gradients of a cubic."""
    loss = 0.05 * (function(*tensors).double() ** 3).sum()  # within fp16
    grads = torch.autograd.grad(loss, tensors[:inputs], create_graph=True)
    return torch.autograd.grad(sum((g.double() ** 2).sum() for g in grads), tensors)


def head_problem(rows=23, features=16, classes=37, dtype=torch.float32, bias=True, seed=0):
    """x, weight, target and bias of a head, one row in five ignored."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    target = torch.randint(classes, (rows,), generator=generator)
    target[::5] = -100
    return normal(rows, features), normal(classes, features), target, normal(classes) if bias else None
