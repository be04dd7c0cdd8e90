"""An activation: ``activation(preact)``, elementwise in fp32 and rounded once.

The op is raw; ``amp_kernels.gelu``, ``silu`` and ``swiglu`` are the differentiable ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .._checks.activations import ACTIVATIONS, GATED, activated, check_activation, check_gated_width
from .._checks.lists import KERNEL_DTYPES
from .._checks.operands import check_tensor
from .._dispatch.library import Sample, define


def check(
    preact: torch.Tensor,
    activation: str,
    dtypes: tuple[torch.dtype, ...] = KERNEL_DTYPES,
    *,
    op: str = "activation_forward",
    name: str = "preact",
) -> None:
    check_tensor(op, name, preact, dtypes)
    if check_activation(op, activation) in GATED:
        if preact.ndim == 0:
            raise ValueError(f"{op}: {name} has no dimension; accepted with activation={activation!r}: [..., 2 F]")
        check_gated_width(op, name, preact, -1, activation)


def _reference(preact, *, activation):
    return activated(preact.float().contiguous(), activation).to(preact.dtype, copy=True)


def extremes(activation: str) -> torch.Tensor:
    """Infinities, zeros and large numbers; of a gated activation as gates."""
    z = torch.tensor([[float("-inf"), float("inf"), 0.0, -0.0, -1e30, 1e30]])
    return torch.cat([z, torch.ones_like(z)], 1) if activation in GATED else z


def samples(device: str) -> Iterator[Sample]:
    generator = torch.Generator().manual_seed(0)
    for i, activation in enumerate(ACTIVATIONS):
        z = (4 * torch.randn(2, 6, 6, generator=generator)).to(device, KERNEL_DTYPES[i % 3])
        yield (z if i % 2 else z.transpose(1, 2),), {"activation": activation}
    yield (torch.randn(3, 2200, generator=generator).to(device, torch.bfloat16),), {"activation": "swiglu"}
    yield (torch.randn(2, 1033, generator=generator).to(device, torch.float16),), {"activation": "gelu"}
    yield (z[:0],), {"activation": "silu"}
    for activation in ACTIVATIONS:
        yield (extremes(activation).to(device),), {"activation": activation}


op = define(
    "activation_forward(Tensor preact, *, str activation) -> Tensor",
    _reference,
    samples=samples,
    check=lambda call: check(*call),
)
