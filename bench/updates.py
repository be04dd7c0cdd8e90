"""What the benchmarks of the update ops other than AdamW share: a parameter list in FP32, two steps, the weights."""

import itertools
from collections.abc import Callable, Iterator

import torch

from amp_kernels.testing.updates import draw

from . import lists, ours
from .harness import Call, Case, Scope

# The check takes two steps, since only the second reads the state that the first wrote, and the second turns against the
# first, or the sign of Lion's moment would never matter.
STEPS, SECOND = 2, -0.05

Tensors = list[torch.Tensor]


def cases(
    op: str,
    scope: Scope,
    *,
    bytes_per_param: int,
    flops_per_param: int,
    torch_step: Callable[[Tensors], Callable[[], None]],
    our_step: Callable[[Tensors], Callable[[], None]],
    reference: Callable[[torch.Tensor, Tensors], torch.Tensor],
) -> Iterator[Case]:
    """One case a list. The steps are made from parameters that carry gradients; `reference(param, grads)` takes a step
    of one parameter in float64 with each of the gradients."""
    for name, shapes in lists.chosen(scope).items():
        count = lists.numel(shapes)
        yield Case(
            op=op,
            shape=name,
            dtype="fp32",
            bytes=bytes_per_param * count,
            flops=flops_per_param * count,
            inputs=lambda generator, shapes=shapes: [draw(shapes, torch.float32, generator) for _ in range(2)],
            providers={
                "torch": lambda inputs: _prepare(inputs, torch_step),
                **ours.providers(op, scope.device, lambda inputs: _prepare(inputs, our_step)),
            },
            reference=lambda inputs: {
                "params": ([reference(p.double(), gradients(g.double())) for p, g in zip(*inputs, strict=True)], 1e-6)
            },
            check_calls=STEPS,
            backends=ours.backends(op, scope.device),
        )


def gradients(grad: torch.Tensor) -> Tensors:
    """Those of the check's steps."""
    return [grad, SECOND * grad]


def _prepare(inputs: list[Tensors], make: Callable[[Tensors], Callable[[], None]]) -> Call:
    params, grads = inputs
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    step = make(params)
    calls = itertools.count()

    def call():
        step()
        if next(calls) == 0:
            torch._foreach_mul_(grads, SECOND)
        return {"params": params}

    return call
