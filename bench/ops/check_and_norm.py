"""check_and_norm: one read of all gradients, against torch's unscale + norm (two reads and a write).

The options have rows of their own: the largest magnitude instead of the sum of squares, and one result per tensor.
"""

from collections.abc import Iterator

import torch

from amp_kernels._raw.check_and_norm import check_and_norm
from amp_kernels.testing.updates import draw

from .. import lists, ours
from ..harness import Call, Case, Scope
from ..roofline import DTYPES

INF = float("inf")
# dtype, options
VARIANTS = [
    ("bf16", {}),
    ("bf16", {"norm_type": INF}),
    ("bf16", {"per_tensor": True}),
    ("fp32", {}),
    ("fp16", {}),
]


def cases(scope: Scope) -> Iterator[Case]:
    for name, shapes in lists.chosen(scope).items():
        for dtype, options in VARIANTS[:3] if scope.quick else VARIANTS:
            yield case(name, shapes, dtype, options, scope.device)


def case(name: str, shapes: list[lists.Shape], dtype: str, options: dict, device: torch.device) -> Case:
    count = lists.numel(shapes)
    return Case(
        op="check_and_norm",
        shape=name + "".join({"norm_type": " inf", "per_tensor": " per tensor"}[key] for key in options),
        dtype=dtype,
        bytes=count * DTYPES[dtype].itemsize,
        flops=2 * count,
        inputs=lambda generator: draw(shapes, DTYPES[dtype], generator),
        providers={
            "torch": lambda grads: _torch(grads, **options),
            **ours.providers("check_and_norm", device, lambda grads: _ours(grads, options)),
        },
        reference=lambda grads: _reference(grads, **options),
        backends=ours.backends("check_and_norm", device),
    )


def _ours(grads: list[torch.Tensor], options: dict) -> Call:
    scale = torch.ones((), device=grads[0].device)

    def call():
        norm, found_inf = check_and_norm(grads, scale, **options)
        return {"norm": norm, "found_inf": found_inf}

    return call


def _torch(grads: list[torch.Tensor], norm_type: float = 2.0, per_tensor: bool = False) -> Call:
    """torch's check has one flag for the list; per tensor there is only the norm to compare."""
    found_inf, inverse = torch.zeros((), device=grads[0].device), torch.ones((), device=grads[0].device)

    def call():
        found_inf.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(
            grads, found_inf, inverse
        )  # times 1: the same work, same grads
        norms = torch.stack(torch._foreach_norm(grads, norm_type, dtype=torch.float32))
        if per_tensor:
            return {"norm": norms.square()}
        return {"norm": norms.max() if norm_type == INF else norms.square().sum(), "found_inf": found_inf}

    return call


def _reference(grads: list[torch.Tensor], norm_type: float = 2.0, per_tensor: bool = False) -> dict:
    each = torch.stack([_norm(grad, norm_type) for grad in grads])
    norm = each if per_tensor else each.max() if norm_type == INF else each.sum()
    # Sums of 2^30 squares in float32, in partial sums of a block each: well below one in 10^5.
    return {"norm": (norm, 1e-5), "found_inf": (torch.zeros_like(norm), 0.0)}


def _norm(grad: torch.Tensor, norm_type: float) -> torch.Tensor:
    return grad.abs().max().double() if norm_type == INF else grad.double().square().sum()
