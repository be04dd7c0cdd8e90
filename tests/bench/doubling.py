"""A case for the tests of the harness: doubling a vector."""

import torch

from bench.harness.case import Case


def doubling(
    size: int = 64, device: str = "cpu", name: str | None = None, functions: dict | None = None, **options
) -> Case:
    """`functions`: by provider; torch's alone by default."""
    functions = functions or {"torch": lambda x: 2 * x}
    return Case(
        op="double",
        shape=name or str(size),
        dtype="fp32",
        bytes=8 * size,
        flops=size,
        inputs=lambda generator: torch.randn(size, generator=generator, device=device),
        providers={name: lambda x, f=f: lambda: {"out": f(x)} for name, f in functions.items()},
        reference=lambda x: {"out": (2 * x.double(), 1e-6)},
        **options,
    )
