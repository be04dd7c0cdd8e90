"""What csrc/gemm/plan.h picks for a product, and what its model says that this takes: a prediction, from no run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .gemm_shapes import Shape
from .measured import COPY_BYTES_PER_S, CUBLAS_FLOPS_PER_S
from .tiles import Choice, tile_name


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


def request(shape: Shape, bias: bool = False) -> dict[str, Any]:
    """The keyword arguments of plan_gemm for a product; an activation comes after a bias anyway."""
    wide = shape.result.startswith("fp32")
    asked = {
        "batch": shape.batch,
        "m_major_a": shape.layout[0] == "T",
        "n_major_b": shape.layout[1] == "N",
        "tma_a": shape.a_bytes == 16,
        "tma_b": shape.b_bytes == 16,
        "tma_output": shape.n * (4 if wide else 2) % 16 == 0,
        "odd_operands": shape.operand_bytes == 2,
        **({} if shape.offset else {"ld_a": shape.lines[0] + shape.pitch, "ld_b": shape.lines[1] + shape.pitch}),
        "out_bytes": 8 if shape.result == "fp32+" else 4 if wide else 2,
        "activation": "none" if wide or shape.result == "16" else shape.result,
    }
    return {**asked, "plain": False} if bias else asked


def plan(shape: Shape, chip: Chip, bias: bool = False) -> dict[str, Any]:
    """The plan; `microseconds` are the model's."""
    from amp_kernels import _host

    return _host.plan_gemm(shape.m, shape.n, shape.k, **request(shape, bias), **chip.request)


def choice(plan: dict[str, Any]) -> Choice:
    """A plan of gemm_sm90, by the names of the times of every tile."""
    from amp_kernels import _host

    return Choice(tile_name(_host.gemm_candidates()["sm90"][plan["tile"]]), plan["splits"], plan["swapped"])


def describe(plan: dict[str, Any]) -> str:
    """A plan in words."""
    from amp_kernels import _host

    if plan["kernel"] == "none":
        return "none"
    tile = _host.gemm_candidates()[plan["kernel"]][plan["tile"]]
    text = f"{plan['kernel']} {tile['m']}x{tile['n']}"
    if "cluster_m" in tile:
        text += f" cluster {tile['cluster_m']}x{tile['cluster_n']}, {tile['consumers']} consumers"
    text = "repack, " * plan["repacked"] + "in phases, " * plan["in_phases"] + text
    text += ", pingpong" * tile.get("pingpong", False) + f", {plan['splits']} splits" * (plan["splits"] > 1)
    return text + ", swapped" * plan["swapped"]


def floor_us(shape: Shape, chip: Chip) -> float:
    """Microseconds that memory and tensor cores need at least, each at the rate of `chip`."""
    out = {"fp32": 4, "fp32+": 8}.get(shape.result, 2)
    moved = shape.batch * (2 * shape.k * (shape.m + shape.n) + out * shape.m * shape.n)
    return max(moved / chip.copy, 2 * shape.batch * shape.m * shape.n * shape.k / chip.flops) * 1e6
