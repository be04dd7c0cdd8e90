"""One read of a gradient list that tells both whether a step may be taken and how long the gradient is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .._library import Sample, define
from . import _lists


def _reference(grads: Sequence[Tensor], grad_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    inv = _lists.inverse_scale(grad_scale)
    sums, flags = [], []
    for grad in grads:
        value = (grad if grad.dtype == torch.float64 else grad.float()) * inv
        sums.append(value.double().square().sum())
        flags.append(~value.isfinite().all())
    return torch.stack(sums).sum().float(), torch.stack(flags).any().float()


def samples(device: str) -> Iterator[Sample]:
    generator = torch.Generator().manual_seed(1)

    def grads(*dtypes: torch.dtype) -> list[Tensor]:
        shapes = [(37,), (3, 5), (), (0, 4), (1000,)]
        pairs = zip(shapes * len(dtypes), [d for d in dtypes for _ in shapes], strict=True)
        return [torch.randn(shape, generator=generator).to(device, dtype) for shape, dtype in pairs]

    scale = torch.tensor(2.0**10, device=device)
    yield (grads(torch.float32),), {}
    yield (grads(torch.float16, torch.bfloat16, torch.float32, torch.float64), scale), {}
    broken = grads(torch.float16, torch.float32)
    broken[4][7] = -torch.inf  # not NaN: opcheck compares results without equal_nan
    yield (broken, scale), {}
    yield (
        ([torch.full((9,), 1e30, device=device)], torch.tensor(2.0**-30, device=device)),
        {},
    )  # finite, but not once unscaled
    yield ([torch.full((9,), 3e38, device=device)], None), {}  # finite elements whose sum and squares overflow
    transposed = torch.randn(8, 6, generator=generator).to(device).t()
    yield ([transposed, transposed.contiguous()],), {"grad_scale": scale}


op = define("check_and_norm(Tensor[] grads, Tensor? grad_scale=None) -> (Tensor, Tensor)", _reference, samples=samples)


def check_and_norm(grads: Sequence[Tensor], grad_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Squared L2 norm and non-finite flag of the unscaled gradients ``grads / grad_scale``, in one read and without a
    host sync.

    The flag is taken from each element's *unscaled* value: with a scale below one a finite scaled gradient may stand
    for an infinite one. It is never taken from the sum, which may overflow on finite gradients. The order of summation
    is fixed, so the result is bitwise reproducible. Gradients are only read.

    Args:
        grads: non-empty list of dense tensors (any strides that cover their memory once), float16, bfloat16, float32 or
            float64, mixed freely, any shapes including empty ones, one device.
        grad_scale: the loss scale, one float32 element on that device; ``None`` means 1. Its reciprocal is taken in
            double and rounded to float32 once, as :class:`torch.amp.GradScaler` does.

    Returns:
        ``(sum_sq, found_inf)``, both float32, 0-dim, on the device: the sum of squares of ``grad / grad_scale``, and
        1.0 if any of these values is infinite or NaN, else 0.0. The norm is ``sum_sq.sqrt()``.

    Raises:
        TypeError: a dtype is not accepted (integers and complex numbers are not).
        ValueError: the list is empty, or a tensor is sparse, not dense, or on another device.
    """
    grads = grads if isinstance(grads, Tensor) else list(grads)
    _lists.check_list("check_and_norm", "grads", grads, _lists.FLOATS)
    if grad_scale is not None:
        _lists.check_scalar("check_and_norm", "grad_scale", grad_scale, grads[0].device)
    return op(grads, grad_scale)
