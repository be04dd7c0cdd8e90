"""Unscale gradients in place and record whether any of them is infinite or NaN: the explicit ``scaler.unscale_``.

Without the record it is how the backward of a loss multiplies the gradients that its forward has made by that of the loss:
``found_inf`` is ``None``, and where the factor is 1, which the host does not know, kernels read and write nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .._checks import lists
from .._dispatch.library import Sample, define


def _reference(grads: Sequence[Tensor], found_inf: Tensor | None, inv_scale: Tensor) -> None:
    inv = inv_scale.reshape(())
    flag = None if found_inf is None else torch.zeros_like(found_inf.reshape(()), dtype=torch.bool)
    for grad in grads:
        value = (grad if grad.dtype == torch.float64 else grad.float()) * inv
        grad.copy_(value)
        flag = None if flag is None else flag | ~grad.isfinite().all()
    if found_inf is not None:
        found_inf.copy_(torch.where(flag, torch.ones_like(found_inf), found_inf))


def samples(device: str) -> Iterator[Sample]:
    generator = torch.Generator().manual_seed(2)
    shapes = [(33,), (4, 7), (), (0,)]

    def call(inv: float, found: float | None = 0.0, bad: float | None = None) -> Sample:
        grads = [torch.randn(s, generator=generator).to(device, d) for d in lists.FLOATS for s in shapes]
        if bad is not None:
            grads[5][2, 3] = bad
        flag = None if found is None else torch.full((), found, device=device)
        return (grads, flag, torch.full((), inv, device=device)), {}

    yield call(2.0**-7)
    yield call(1.0, bad=torch.nan)
    yield call(0.25, bad=-torch.inf)
    yield call(0.5, found=1.0)  # an earlier find stays
    yield call(0.3, found=None, bad=torch.inf)
    yield call(1.0, found=None)
    yield (
        (
            [torch.full((3,), 1e30, device=device)],
            torch.zeros((), device=device),
            torch.full((), 2.0**30, device=device),
        ),
        {},
    )


op = define("unscale_(Tensor(a!)[] grads, Tensor(b!)? found_inf, Tensor inv_scale) -> ()", _reference, samples=samples)


def unscale_(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Multiply gradients by ``inv_scale`` in place; set ``found_inf`` to 1 if a result is infinite or NaN. No host
    sync.

    ``torch._amp_foreach_non_finite_check_and_unscale_`` for a list of mixed dtypes, with one difference: torch tests
    the value before the multiplication, so that a finite gradient whose product overflows (a scale below one) passes
    its check; here the stored result is tested. ``found_inf`` is never cleared.

    Args:
        grads: non-empty list of dense tensors, float16, bfloat16, float32 or float64, mixed freely, one device;
            overwritten.
        found_inf: one float32 element on that device, overwritten with 1.0 or left alone.
        inv_scale: one float32 element on that device.

    Raises:
        TypeError: a dtype is not accepted.
        ValueError: the list is empty, a tensor is sparse, not dense, or on another device, or two tensors share memory.
            (torch multiplies what is shared twice on the CPU; on a GPU it races, with either result.)
    """
    grads = grads if isinstance(grads, Tensor) else list(grads)
    lists.check_list("unscale_", "grads", grads, lists.FLOATS)
    shared = lists.overlap(grads)
    if shared is not None:
        i, j = shared
        raise ValueError(
            f"unscale_: grads[{i}] ({lists.describe(grads[i])}) and grads[{j}] ({lists.describe(grads[j])}) share "
            "memory, which would be unscaled twice; accepted: tensors that do not overlap (list a shared one once)"
        )
    lists.check_scalar("unscale_", "found_inf", found_inf, grads[0].device)
    lists.check_scalar("unscale_", "inv_scale", inv_scale, grads[0].device)
    op(grads, found_inf, inv_scale)
