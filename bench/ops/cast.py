"""cast_: fp32 tensors to 16 bits and back over a whole model, against torch._foreach_copy_."""

from collections.abc import Iterator

import torch

import amp_kernels as ak
from amp_kernels.testing.updates import draw

from .. import lists, ours
from ..harness import Call, Case, Scope
from ..roofline import DTYPES


def cases(scope: Scope) -> Iterator[Case]:
    for name, shapes in lists.chosen(scope, tensors=True).items():
        for of, to in (("fp32", "bf16"),) if scope.quick else (("fp32", "bf16"), ("fp32", "fp16"), ("bf16", "fp32")):
            count = lists.numel(shapes)
            yield Case(
                op="cast_",
                shape=name,
                dtype=f"{of} to {to}",
                bytes=count * (DTYPES[of].itemsize + DTYPES[to].itemsize),
                flops=0,
                inputs=lambda generator, shapes=shapes, of=of: draw(shapes, DTYPES[of], generator),
                providers={
                    "torch": lambda sources, to=to: _prepare(sources, DTYPES[to], torch._foreach_copy_),
                    **ours.providers(
                        "cast_", scope.device, lambda sources, to=to: _prepare(sources, DTYPES[to], ak.cast_)
                    ),
                },
                reference=lambda sources, to=to: {"out": ([s.to(DTYPES[to]).double() for s in sources], 0.0)},
                backends=ours.backends("cast_", scope.device),
            )


def _prepare(sources: list[torch.Tensor], dtype: torch.dtype, cast) -> Call:
    destinations = [torch.empty_like(source, dtype=dtype) for source in sources]

    def call():
        cast(destinations, sources)
        return {"out": destinations}

    return call
