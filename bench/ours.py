"""amp_kernels as a provider: by the backend its policy picks and, on a GPU, by Triton beside it."""

from collections.abc import Callable
from typing import Any

import torch

import amp_kernels as ak
from amp_kernels import _policy

from .harness import Call


def providers(op: str, device: torch.device, prepare: Callable[[Any], Call]) -> dict[str, Callable[[Any], Call]]:
    """`prepare` under the policy's own choice and, where that is not Triton but could be, once more under Triton."""
    found = {"amp_kernels": prepare}
    if device.type == "cuda" and _policy.built(op).triton and backends(op, device)["amp_kernels"] != "triton":
        found["amp_kernels:triton"] = lambda inputs: _under("triton", prepare, inputs)
    return found


def backends(op: str, device: torch.device) -> dict[str, str]:
    """The backend the policy picks for `op`: recorded in the rows."""
    return {"amp_kernels": _policy.select(op, torch.empty(0, device=device))}


def _under(backend: str, prepare: Callable[[Any], Call], inputs: Any) -> Call:
    with ak.backend(backend):
        call = prepare(inputs)

    def forced():
        with ak.backend(backend):
            return call()

    return forced
