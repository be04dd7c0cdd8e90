"""unscale_: gradients times the inverse scale in place, with the non-finite check, against the op torch.amp uses."""

from collections.abc import Iterator

import torch

from amp_kernels.ops.unscale import unscale_

from .. import lists, ours
from ..harness import Call, Case
from ..roofline import DTYPES
from .check_and_norm import draw

INVERSE = 0.5


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    for name in lists.for_device(device.type, quick):
        for dtype in ("fp32",) if quick else ("fp32", "fp16", "bf16"):
            shapes = lists.LISTS[name]()
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
                    **ours.providers("unscale_", device, lambda grads: _prepare(grads, unscale_)),
                },
                reference=lambda grads: {
                    "grads": ([grad.double() * INVERSE for grad in grads], 0.0),
                    "found_inf": (torch.zeros((), dtype=torch.float64, device=grads[0].device), 0.0),
                },
                backends=ours.backends("unscale_", device),
            )


def _prepare(grads: list[torch.Tensor], unscale) -> Call:
    found_inf = torch.zeros((), device=grads[0].device)
    inverse = torch.full((), INVERSE, device=grads[0].device)

    def call():
        unscale(grads, found_inf, inverse)
        inverse.reciprocal_()  # halves and doubles in turn, so that the values stay normal however often it runs
        return {"grads": grads, "found_inf": found_inf}

    return call
