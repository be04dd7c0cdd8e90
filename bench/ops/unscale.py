"""unscale_: gradients times the inverse scale in place, with the non-finite check, against the op torch.amp uses."""

import itertools
from collections.abc import Iterator

import torch

from amp_kernels._raw.unscale import unscale_
from amp_kernels.testing.updates import draw

from .. import lists, ours
from ..harness import Call, Case, Scope
from ..roofline import DTYPES

INVERSE = 0.5


def cases(scope: Scope) -> Iterator[Case]:
    for name, shapes in lists.chosen(scope).items():
        for dtype in ("fp32",) if scope.quick else ("fp32", "fp16", "bf16"):
            count = lists.numel(shapes)
            yield Case(
                op="unscale_",
                shape=name,
                dtype=dtype,
                bytes=2 * count * DTYPES[dtype].itemsize,
                flops=count,
                inputs=lambda generator, shapes=shapes, dtype=dtype: draw(shapes, DTYPES[dtype], generator),
                providers={
                    "torch": lambda grads: _prepare(grads, torch._amp_foreach_non_finite_check_and_unscale_),
                    **ours.providers("unscale_", scope.device, lambda grads: _prepare(grads, unscale_)),
                },
                reference=lambda grads: {
                    "grads": ([grad.double() * INVERSE for grad in grads], 0.0),
                    "found_inf": (torch.zeros((), dtype=torch.float64, device=grads[0].device), 0.0),
                },
                backends=ours.backends("unscale_", scope.device),
            )


def _prepare(grads: list[torch.Tensor], unscale) -> Call:
    found_inf = torch.zeros((), device=grads[0].device)
    inverse = torch.full((), INVERSE, device=grads[0].device)
    calls = itertools.count()

    def call():
        unscale(grads, found_inf, inverse)
        if next(calls) == 0:
            inverse.fill_(1.0)  # the same work from now on, and gradients that stay as they are
        return {"grads": grads, "found_inf": found_inf}

    return call
