"""Gradients and loss scale before the update of a step: check_and_norm, one read of all gradients, against torch's
unscale + norm (two reads and a write); unscale_ against the op torch.amp uses; exponent_histogram against frexp and
bincount of torch, a tensor at a time; update_scale_, nothing but the latency of one launch."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator

import torch

from amp_kernels._raw import check_and_norm as raw_check_and_norm
from amp_kernels._raw import exponent_histogram as raw_exponent_histogram
from amp_kernels._raw.unscale import unscale_
from amp_kernels._raw.update_scale import op as update_scale_op

from ..harness.case import DTYPES, Call, Case, Prepare, Scope, Tensors
from . import lists
from .providers import compared

INF = float("inf")
# dtype, options: the largest magnitude instead of the sum of squares, and one result per tensor, have rows of their own
VARIANTS = [("bf16", {}), ("bf16", {"norm_type": INF}), ("bf16", {"per_tensor": True}), ("fp32", {}), ("fp16", {})]
INVERSE = 0.5
GROWTH, BACKOFF, NEVER = 2.0, 0.5, 10**9  # growth interval: the scale stays what it is however often this runs


def check_and_norm(scope: Scope) -> Iterator[Case]:
    for name, shapes in lists.chosen(scope).items():
        for dtype, options in scope.dtypes(*VARIANTS, quick=3):
            yield norm_of_list(name, shapes, dtype, options, scope.device)


def norm_of_list(name: str, shapes: list[lists.Shape], dtype: str, options: dict, device: torch.device) -> Case:
    count = lists.numel(shapes)
    return compared(
        "check_and_norm",
        device,
        lambda grads: _our_norm(grads, options),
        {"torch": lambda grads: _torch_norm(grads, **options)},
        shape=name + "".join({"norm_type": " inf", "per_tensor": " per tensor"}[key] for key in options),
        dtype=dtype,
        bytes=count * DTYPES[dtype].itemsize,
        written=0,
        flops=2 * count,
        inputs=lambda generator: lists.draw(shapes, DTYPES[dtype], generator),
        reference=lambda grads: _exact_norm(grads, **options),
    )


def _our_norm(grads: Tensors, options: dict) -> Call:
    scale = torch.ones((), device=grads[0].device)

    def call():
        norm, found_inf = raw_check_and_norm.check_and_norm(grads, scale, **options)
        return {"norm": norm, "found_inf": found_inf}

    return call


def _torch_norm(grads: Tensors, norm_type: float = 2.0, per_tensor: bool = False) -> Call:
    """torch's check has one flag for the list; per tensor there is only the norm to compare."""
    found_inf, inverse = torch.zeros((), device=grads[0].device), torch.ones((), device=grads[0].device)

    def call():
        found_inf.zero_()
        # times 1: the same work, same grads
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inverse)
        norms = torch.stack(torch._foreach_norm(grads, norm_type, dtype=torch.float32))
        if per_tensor:
            return {"norm": norms.square()}
        return {"norm": norms.max() if norm_type == INF else norms.square().sum(), "found_inf": found_inf}

    return call


def _exact_norm(grads: Tensors, norm_type: float = 2.0, per_tensor: bool = False) -> dict:
    each = [g.abs().max().double() if norm_type == INF else g.double().square().sum() for g in grads]
    each = torch.stack(each)
    norm = each if per_tensor else each.max() if norm_type == INF else each.sum()
    # Sums of 2^30 squares in float32, in partial sums of a block each: well below one in 10^5.
    return {"norm": (norm, 1e-5), "found_inf": (torch.zeros_like(norm), 0.0)}


def _over_lists(
    op: str, scope: Scope, dtypes: tuple, own: Prepare, stock: Prepare, passes: int, **case
) -> Iterator[Case]:
    """A list in a dtype is a case, of so many passes over its bytes."""
    for name, shapes in lists.chosen(scope).items():
        for dtype in scope.dtypes(*dtypes):
            count = lists.numel(shapes)
            yield compared(
                op,
                scope.device,
                own,
                {"torch": stock},
                shape=name,
                dtype=dtype,
                bytes=passes * count * DTYPES[dtype].itemsize,
                flops=count,
                inputs=lambda generator, shapes=shapes, dtype=dtype: lists.draw(shapes, DTYPES[dtype], generator),
                **case,
            )


def unscale(scope: Scope) -> Iterator[Case]:
    def reference(grads: Tensors) -> dict:
        found_inf = torch.zeros((), dtype=torch.float64, device=grads[0].device)
        return {"grads": ([grad.double() * INVERSE for grad in grads], 0.0), "found_inf": (found_inf, 0.0)}

    own, stock = (
        functools.partial(_unscaled, function)
        for function in (unscale_, torch._amp_foreach_non_finite_check_and_unscale_)
    )
    return _over_lists("unscale_", scope, ("fp32", "fp16", "bf16"), own, stock, 2, reference=reference)


def _unscaled(function: Callable, grads: Tensors) -> Call:
    found_inf = torch.zeros((), device=grads[0].device)
    inverse = torch.full((), INVERSE, device=grads[0].device)
    calls = itertools.count()

    def call():
        function(grads, found_inf, inverse)
        if next(calls) == 0:
            inverse.fill_(1.0)  # the same work from now on, and gradients that stay as they are
        return {"grads": grads, "found_inf": found_inf}

    return call


def exponent_histogram(scope: Scope) -> Iterator[Case]:
    def own(tensors: Tensors) -> Call:
        return lambda: _named(raw_exponent_histogram.exponent_histogram(tensors))

    def reference(tensors: Tensors) -> dict:
        return {name: (value, 0.0) for name, value in _named(raw_exponent_histogram.op.reference(tensors)).items()}

    dtypes, rest = ("bf16", "fp16", "fp32"), {"written": 0, "reference": reference}
    return _over_lists("exponent_histogram", scope, dtypes, own, _torch_histogram, 1, **rest)


def _named(results: tuple[torch.Tensor, torch.Tensor]) -> dict:
    return {"counts": results[0].double(), "largest": results[1]}


def _torch_histogram(tensors: Tensors) -> Call:
    """Bins finite values only, which is less work than the op's."""

    def call():
        exponents = [torch.frexp(tensor.float()).exponent.flatten() + 149 for tensor in tensors]
        bins = [torch.where(tensor.flatten() == 0, 0, e) for tensor, e in zip(tensors, exponents, strict=True)]
        counts = torch.stack([torch.bincount(b, minlength=280) for b in bins])
        return {"counts": counts.double(), "largest": torch.stack([tensor.abs().max() for tensor in tensors]).float()}

    return call


def update_scale(scope: Scope) -> Iterator[Case]:
    def number(value: float) -> torch.Tensor:
        return torch.tensor(value, dtype=torch.float64, device=scope.device)

    for flags in (1,) if scope.quick else (1, 8):
        yield compared(
            "update_scale_",
            scope.device,
            lambda flags: _next_scale(flags, _our_scale),
            {"torch": lambda flags: _next_scale(flags, _torch_scale)},
            shape=f"{flags} flag" + "s" * (flags > 1),
            dtype="fp32",
            bytes=4 * flags + 24,  # reads the flags; reads and writes the scale and both trackers
            flops=0,
            inputs=lambda generator, flags=flags: [torch.zeros((), device=scope.device) for _ in range(flags)],
            reference=lambda flags: {"scale": (number(1024.0), 0.0), "tracker": (number(3.0), 0.0)},
            check_calls=2,
        )


def _next_scale(flags: Tensors, update) -> Call:
    device = flags[0].device
    tracker, hysteresis = (torch.full((), 1, dtype=torch.int32, device=device) for _ in range(2))
    scale = torch.full((), 1024.0, device=device)

    def call():
        update(scale, tracker, hysteresis, flags)
        return {"scale": scale, "tracker": tracker}

    return call


def _torch_scale(scale: torch.Tensor, tracker: torch.Tensor, hysteresis: torch.Tensor, flags: Tensors) -> None:
    """GradScaler.update adds up the flags of several devices first, as here those of several optimizers."""
    found_inf = flags[0]
    for flag in flags[1:]:
        found_inf = found_inf + flag
    torch._amp_update_scale_(scale, tracker, found_inf, GROWTH, BACKOFF, NEVER)


def _our_scale(scale: torch.Tensor, tracker: torch.Tensor, hysteresis: torch.Tensor, flags: Tensors) -> None:
    update_scale_op(scale, tracker, hysteresis, flags, GROWTH, BACKOFF, NEVER, 0.0, math.inf, 1)


CASES = (check_and_norm, unscale, exponent_histogram, update_scale)
