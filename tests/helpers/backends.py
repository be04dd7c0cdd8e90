"""A backend for a block, with a CPU instruction set."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from amp_kernels._dispatch import cpu_isa, policy


@contextlib.contextmanager
def use(backend: str) -> Iterator[None]:
    """Run every op in the block on ``backend``, one of ``policy.BACKENDS``, optionally with a CPU instruction set:
    ``"cpu/avx2"``."""
    name, _, isa = backend.partition("/")
    with policy.backend(name), cpu_isa.cpu_isa(isa) if isa else contextlib.nullcontext():
        yield
