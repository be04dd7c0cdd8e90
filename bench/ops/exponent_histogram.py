"""exponent_histogram: one read of a list, against frexp and bincount of torch, a tensor at a time."""

from collections.abc import Iterator

import torch

from amp_kernels._raw.exponent_histogram import exponent_histogram, op
from amp_kernels.testing.updates import draw

from .. import lists, ours
from ..harness import Call, Case, Scope
from ..roofline import DTYPES


def cases(scope: Scope) -> Iterator[Case]:
    for name, shapes in lists.chosen(scope).items():
        for dtype in ("bf16",) if scope.quick else ("bf16", "fp16", "fp32"):
            count = lists.numel(shapes)
            yield Case(
                op="exponent_histogram",
                shape=name,
                dtype=dtype,
                bytes=count * DTYPES[dtype].itemsize,
                flops=count,
                inputs=lambda generator, shapes=shapes, dtype=dtype: draw(shapes, DTYPES[dtype], generator),
                providers={"torch": _torch, **ours.providers("exponent_histogram", scope.device, _ours)},
                reference=lambda tensors: {name: (value, 0.0) for name, value in _named(op.reference(tensors)).items()},
                backends=ours.backends("exponent_histogram", scope.device),
            )


def _named(results: tuple[torch.Tensor, torch.Tensor]) -> dict:
    return {"counts": results[0].double(), "largest": results[1]}


def _ours(tensors: list[torch.Tensor]) -> Call:
    return lambda: _named(exponent_histogram(tensors))


def _torch(tensors: list[torch.Tensor]) -> Call:
    """Of finite values alone, which is less than what is asked for."""

    def call():
        exponents = [torch.frexp(tensor.float()).exponent.flatten() + 149 for tensor in tensors]
        bins = [torch.where(tensor.flatten() == 0, 0, e) for tensor, e in zip(tensors, exponents, strict=True)]
        counts = torch.stack([torch.bincount(b, minlength=280) for b in bins])
        return {"counts": counts.double(), "largest": torch.stack([tensor.abs().max() for tensor in tensors]).float()}

    return call
