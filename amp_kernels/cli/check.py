"""Compares a backend of an op with its reference on the op's samples, for ``info --check`` and the tests."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import policy
from .._dispatch.library import Op

# Backends round once, as the reference does, but sum in another order: a few ulps of the output dtype.
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5, torch.float64: 1e-12}


def available_backends(op: Op, device: str) -> list[str]:
    """The backends, except the reference, that can run ``op`` on tensors of ``device``."""
    if op.composite:
        return []
    excluded = policy.why_not(device, policy.capability_of(device), op.built)
    return [name for name in policy.BACKENDS if name not in excluded and name != "reference"]


def check_backend(op: Op, backend: str, device: str) -> int:
    """Run every sample of ``op`` on ``backend`` and on the reference; outputs and mutated arguments must agree.

    Returns:
        The number of samples compared.

    Raises:
        AssertionError: a value, dtype, shape or stride differs; the message names the op, the sample and the backend.
    """
    count = 0
    for count, (args, kwargs) in enumerate(op.samples(device), start=1):
        results = []
        for name in ("reference", backend):
            copy = {**dict(enumerate(args)), **kwargs}
            for position, argument in op.mutated:
                key = position if position in copy else argument
                copy[key] = _map(copy[key], torch.Tensor.clone) if key in copy else None
            call = [copy.pop(i) for i in range(len(args))]
            with policy.backend(name):
                returned = op(*call, **copy)
            mutated = [call[i] if i < len(call) else copy.get(argument) for i, argument in op.mutated]
            results.append(_tensors([returned, mutated]))
        for expected, actual in zip(*results, strict=True):
            # Torch's products round to the operands' dtype what the op's other parts then read.
            rounded = _tensors(args) if backend == "aten" else [expected]
            tolerance = max(TOLERANCE.get(t.dtype, 0) for t in rounded)
            torch.testing.assert_close(
                actual,
                expected,
                rtol=tolerance,
                atol=tolerance,
                equal_nan=True,
                check_stride=True,
                msg=lambda text, n=count: f"{op.name}, sample {n}, backend {backend} on {device}: {text}",
            )
    return count


def _map(value: Any, function) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value.detach())
    return [function(t.detach()) for t in value] if isinstance(value, (list, tuple)) else value


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value.detach()]
    return [t for item in value for t in _tensors(item)] if isinstance(value, (list, tuple)) else []
