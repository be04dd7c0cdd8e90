"""The plan of csrc/gemm/plan.h for a product on a GPU, and the time that its cost model predicts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..ops.gemm_shapes import Shape
from .measured import COPY_BYTES_PER_S, CUBLAS_FLOPS_PER_S
from .tile_times import Choice, tile_name


@dataclass(frozen=True)
class Chip:
    """`copy` in bytes/s, read and written, and `flops` of 16-bit products that a program reaches, in flops/s.

    Those of the H200 were measured. The others have the same share of their data sheet's: 0.88 of the memory's rate,
    0.82 of the tensor cores' at the boost clock.
    """

    name: str
    copy: float
    flops: float
    request: dict[str, Any] = field(default_factory=dict)  # what plan_gemm is told of it


def _chip(name: str, copy: float, flops: float, **request: Any) -> Chip:
    return Chip(name, copy, flops, {**request, "dram": copy / 1e6})


CHIPS = {
    "H200": _chip("H200", COPY_BYTES_PER_S, CUBLAS_FLOPS_PER_S, sm_count=132, capability=90),
    "H100": _chip("H100", 2.96e12, CUBLAS_FLOPS_PER_S, sm_count=132, capability=90),  # SXM, HBM3
    "A100": _chip("A100", 1.8e12, 255e12, sm_count=108, capability=80, clock=1410.0),  # SXM, 80 GB
}


def plan(shape: Shape, chip: Chip, bias: bool = False) -> dict[str, Any]:
    """The plan; `microseconds` are the model's."""
    from amp_kernels import _host

    asked = shape.request | ({"plain": False} if bias else {})
    return _host.plan_gemm(shape.m, shape.n, shape.k, **asked, **chip.request)


def choice(plan: dict[str, Any]) -> Choice:
    """A plan of gemm_sm90, by the names of the times of every tile."""
    from amp_kernels import _host

    return Choice(tile_name(_host.gemm_candidates()["sm90"][plan["tile"]]), plan["splits"], plan["swapped"])


def floor_us(shape: Shape, chip: Chip) -> float:
    """Microseconds that memory and tensor cores need at least, each at the rate of `chip`."""
    out = {"fp32": 4, "fp32+": 8}.get(shape.result, 2)
    moved = shape.batch * (2 * shape.k * (shape.m + shape.n) + out * shape.m * shape.n)
    return max(moved / chip.copy, 2 * shape.batch * shape.m * shape.n * shape.k / chip.flops) * 1e6
