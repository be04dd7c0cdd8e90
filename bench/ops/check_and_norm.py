"""check_and_norm: one read of all gradients, against torch's unscale + norm (two reads and a write)."""

from collections.abc import Iterator

import torch

from amp_kernels.ops.check_and_norm import check_and_norm

from .. import lists, ours
from ..harness import Call, Case
from ..roofline import DTYPES


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    for name in lists.for_device(device.type, quick):
        for dtype in ("bf16",) if quick else ("fp32", "fp16", "bf16"):
            shapes = lists.LISTS[name]()
            count = lists.numel(shapes)
            yield Case(
                op="check_and_norm",
                shape=name,
                dtype=dtype,
                bytes=count * DTYPES[dtype].itemsize,
                flops=2 * count,
                inputs=lambda generator, shapes=shapes, dtype=dtype: draw(shapes, DTYPES[dtype], generator),
                providers={"torch": _torch, **ours.providers("check_and_norm", device, _ours)},
                reference=_reference,
                backends=ours.backends("check_and_norm", device),
            )


def draw(shapes: list[lists.Shape], dtype: torch.dtype, generator: torch.Generator) -> list[torch.Tensor]:
    """Normal gradients. Drawn directly in `dtype`: a float32 copy of a large list would not fit beside it."""
    return [torch.randn(shape, generator=generator, device=generator.device, dtype=dtype) for shape in shapes]


def _ours(grads: list[torch.Tensor]) -> Call:
    scale = torch.ones((), device=grads[0].device)

    def call():
        sum_sq, found_inf = check_and_norm(grads, scale)
        return {"sum_sq": sum_sq, "found_inf": found_inf}

    return call


def _torch(grads: list[torch.Tensor]) -> Call:
    found_inf, inverse = torch.zeros((), device=grads[0].device), torch.ones((), device=grads[0].device)

    def call():
        found_inf.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(
            grads, found_inf, inverse
        )  # times 1: the same work, same grads
        norms = torch._foreach_norm(grads, 2, dtype=torch.float32)
        return {"sum_sq": torch.stack(norms).square().sum(), "found_inf": found_inf}

    return call


def _reference(grads: list[torch.Tensor]) -> dict:
    total = sum(grad.double().square().sum() for grad in grads)
    # Sums of 2^30 squares in float32, in partial sums of a block each: well below one in 10^5.
    return {"sum_sq": (total, 1e-5), "found_inf": (torch.zeros_like(total), 0.0)}
