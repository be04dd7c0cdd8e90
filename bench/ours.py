"""amp_kernels as a provider: by the backend its policy picks and, on a GPU, by Triton beside it."""

from collections.abc import Callable
from typing import Any

import torch

import amp_kernels as ak
from amp_kernels._dispatch import policy
from amp_kernels._dispatch.library import REGISTRY

from . import plan
from .gemm_shapes import Shape
from .harness import Call, WithFacts


def providers(op: str, device: torch.device, prepare: Callable[[Any], Call]) -> dict[str, Callable[[Any], Call]]:
    """`prepare` under the policy's own choice and, where that is not Triton but could be, once more under Triton."""
    found = {"amp_kernels": prepare}
    if device.type == "cuda" and REGISTRY[op].built.triton and backends(op, device)["amp_kernels"] != "triton":
        found["amp_kernels:triton"] = lambda inputs: _under("triton", prepare, inputs)
    return found


def backends(op: str, device: torch.device) -> dict[str, str]:
    """The backend the policy picks for `op`: recorded in the rows."""
    return {"amp_kernels": policy.select(REGISTRY[op], torch.empty(0, device=device))}


def _under(backend: str, prepare: Callable[[Any], Call], inputs: Any) -> Call:
    with ak.backend(backend):
        call = prepare(inputs)

    def forced():
        with ak.backend(backend):
            return call()

    return WithFacts(forced, call.facts) if isinstance(call, WithFacts) else forced


def gemm_plan(shape: Shape, sm_count: int, capability: tuple[int, int]) -> str | None:
    """What csrc/gemm/plan.h picks for a product on such a GPU; None where the module that says so is not built.

    The profiler's kernel names in the same row say what really ran; this says which part of the table it was.
    """
    try:
        from amp_kernels import _host
    except ImportError:
        return None
    gpu = {"sm_count": sm_count, "capability": 10 * capability[0] + capability[1]}
    return plan.describe(_host.plan_gemm(shape.m, shape.n, shape.k, **plan.request(shape), **gpu))
