"""sgd_: momentum SGD over a parameter list, through ak.optim.SGD, against torch's fused SGD."""

from collections.abc import Iterator

import torch

import amp_kernels as ak

from .. import lists, ours
from ..harness import Call, Case
from .check_and_norm import draw

LR, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 1e-4
STEPS = 2  # of the check: only the second reads the momentum


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    for name in lists.for_device(device.type, quick):
        shapes = lists.LISTS[name]()
        count = lists.numel(shapes)
        yield Case(
            op="sgd_",
            shape=name,
            dtype="fp32",
            bytes=20 * count,  # reads weight, gradient, momentum; writes weight, momentum
            flops=6 * count,
            inputs=lambda generator, shapes=shapes: [draw(shapes, torch.float32, generator) for _ in range(2)],
            providers={
                "torch": lambda inputs: _prepare(inputs, torch.optim.SGD, fused=True),
                **ours.providers("sgd_", device, lambda inputs: _prepare(inputs, ak.optim.SGD)),
            },
            reference=_reference,
            check_calls=STEPS,
            backends=ours.backends("sgd_", device),
        )


def _prepare(inputs: list[list[torch.Tensor]], optimizer_class, **options) -> Call:
    params, grads = inputs
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    optimizer = optimizer_class(params, lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, **options)

    def call():
        optimizer.step()
        return {"params": params}

    return call


def _reference(inputs: list[list[torch.Tensor]]) -> dict:
    """Two steps: in the first the momentum buffer is the gradient itself."""
    wanted = []
    for param, grad in zip(*inputs, strict=True):
        p, g = param.double(), grad.double()
        momentum = torch.zeros_like(p)
        for _ in range(STEPS):
            momentum = MOMENTUM * momentum + g + WEIGHT_DECAY * p
            p = p - LR * momentum
        wanted.append(p)
    return {"params": (wanted, 1e-6)}
