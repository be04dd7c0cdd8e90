"""One read of a gradient list that tells both whether a step may be taken and how long the gradient is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .. import _functional as F
from .._checks import lists
from .._dispatch.library import KernelOp, Sample, define


def _reference(
    grads: Sequence[Tensor], grad_scale: Tensor | None = None, *, norm_type: float = 2.0, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    inv = lists.inverse_scale(grad_scale)
    norms, flags = [], []
    for grad in grads:
        value = (grad if grad.dtype == torch.float64 else grad.float()) * inv
        if norm_type == math.inf:
            magnitudes = F.pad(value.reshape(-1).abs(), (0, 1))  # the largest of nothing is 0
            norms.append(magnitudes.amax().double())
        else:
            norms.append(value.double().square().sum())
        flags.append(~value.isfinite().all())
    norm, found = torch.stack(norms), torch.stack(flags)
    if not per_tensor:
        norm, found = norm.amax() if norm_type == math.inf else norm.sum(), found.any()
    return norm.float(), found.float()


def _check_norm_type(norm_type: float) -> None:
    if norm_type not in (2.0, math.inf):
        raise ValueError(f"check_and_norm: norm_type is {norm_type}; accepted: 2.0 and math.inf")


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

    for norm_type in (2.0, math.inf):
        mixed = grads(torch.float16, torch.bfloat16, torch.float32, torch.float64)
        yield (mixed, scale), {"norm_type": norm_type, "per_tensor": True}
        yield (broken, scale), {"norm_type": norm_type, "per_tensor": norm_type == 2.0}
    yield (mixed, None), {"norm_type": math.inf}
    tiny = torch.full((1000,), 2.0**-70, device=device)  # their squares are below float32's range, the sum is not
    yield ([tiny, tiny[:5], torch.ones(2, device=device)], None), {"per_tensor": True}


op = define(
    "check_and_norm(Tensor[] grads, Tensor? grad_scale=None, *, float norm_type=2.0, bool per_tensor=False) "
    "-> (Tensor, Tensor)",
    _reference,
    samples=samples,
    check=lambda call: _check_norm_type(call.norm_type),
)

#: The same of the gradients in a table (:mod:`amp_kernels._updates.state`), on the device of ``like``.
of_table = KernelOp(
    "_check_and_norm_table(Tensor like, Tensor table, Tensor? grad_scale, bool per_tensor) -> (Tensor, Tensor)"
)


def check_and_norm(
    grads: Sequence[Tensor], grad_scale: Tensor | None = None, *, norm_type: float = 2.0, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """Norm and non-finite flag of the unscaled gradients ``grads / grad_scale``, in one read and without a host sync.

    The flag is taken from each element's *unscaled* value: with a scale below one a finite scaled gradient may stand
    for an infinite one. It is never taken from the sum, which may overflow on finite gradients. The order of summation
    is fixed, so the result is bitwise reproducible. Gradients are only read.

    A sum of squares is accurate to a few units in its last place wherever float32 can hold it, also if the squares are
    below float32's range one by one.

    Args:
        grads: non-empty list of dense tensors (any strides that cover their memory once), float16, bfloat16, float32 or
            float64, mixed freely, any shapes including empty ones, one device.
        grad_scale: the loss scale, one float32 element on that device; ``None`` means 1. Its reciprocal is taken in
            double and rounded to float32 once, as :class:`torch.amp.GradScaler` does.
        norm_type: 2.0 for sums of squares (the L2 norm is the square root), ``math.inf`` for largest magnitudes.
        per_tensor: one result for each tensor, instead of one for the list as if it were one vector.

    Returns:
        ``(norm, found_inf)``, both float32 on the device, 0-dim or ``[len(grads)]``. ``norm``: the sum of squares of
        ``grad / grad_scale``, or its largest magnitude, in which infinity stays infinite and NaN wins; 0 for no
        elements. ``found_inf``: 1.0 if any of these values is infinite or NaN, else 0.0.

    Raises:
        TypeError: a dtype is not accepted (integers and complex numbers are not).
        ValueError: ``norm_type`` is another one, the list is empty, or a tensor is sparse, not dense, or on another
            device.
    """
    _check_norm_type(norm_type)
    grads = grads if isinstance(grads, Tensor) else list(grads)
    lists.check_list("check_and_norm", "grads", grads, lists.FLOATS)
    if grad_scale is not None:
        lists.check_scalar("check_and_norm", "grad_scale", grad_scale, grads[0].device)
    return op(grads, grad_scale, norm_type=float(norm_type), per_tensor=per_tensor)
