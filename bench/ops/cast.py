"""cast_: fp32 tensors to 16 bits and back over a whole model, against torch._foreach_copy_."""

from collections.abc import Iterator

import torch

import amp_kernels as ak

from ..harness.case import DTYPES, Call, Case, Scope, Tensors
from . import lists
from .providers import compared


def cast(scope: Scope) -> Iterator[Case]:
    for name, shapes in lists.chosen(scope, tensors=True).items():
        for source, to in scope.dtypes(("fp32", "bf16"), ("fp32", "fp16"), ("bf16", "fp32")):
            count = lists.numel(shapes)
            yield compared(
                "cast_",
                scope.device,
                lambda sources, to=to: _prepare(sources, DTYPES[to], ak.cast_),
                {"torch": lambda sources, to=to: _prepare(sources, DTYPES[to], torch._foreach_copy_)},
                shape=name,
                dtype=f"{source} to {to}",
                bytes=count * (DTYPES[source].itemsize + DTYPES[to].itemsize),
                flops=0,
                inputs=lambda generator, shapes=shapes, source=source: lists.draw(shapes, DTYPES[source], generator),
                reference=lambda sources, to=to: {"out": ([s.to(DTYPES[to]).double() for s in sources], 0.0)},
            )


def _prepare(sources: Tensors, dtype: torch.dtype, cast) -> Call:
    destinations = [torch.empty_like(source, dtype=dtype) for source in sources]

    def call():
        cast(destinations, sources)
        return {"out": destinations}

    return call


CASES = (cast,)
