"""Small products that make the planner choose every tile it has a use for, with and without splits and exchanged operands."""

import functools
import itertools
import math
from dataclasses import dataclass

import torch

from amp_kernels import _host

from ..gpu.gemm_cases import KINDS, GemmCase
from ..ops import raw

M = (8, 33, 96, 176, 256, 384)
N = (32, 64, 96, 136, 160, 192, 200, 256, 512)
K = (64, 128, 256, 1024)
LONG = ((8, 32, 4096), (8, 64, 4096))  # so few tiles that a Hopper product is split
SMS = (1, 2, 3, 8)


@dataclass(frozen=True)
class Case:
    kernel: str
    tile: int
    splits: bool
    swapped: bool
    m: int
    n: int
    k: int
    sm_count: int
    m_major_a: bool
    n_major_b: bool
    activation: str
    out_dtype: torch.dtype

    def __str__(self):
        layout = ("m" if self.m_major_a else "k") + ("n" if self.n_major_b else "k")
        kind = f"{self.kernel}-tile{self.tile}" + "-splits" * self.splits + "-swapped" * self.swapped
        return (
            f"{kind}-{self.m}x{self.n}x{self.k}-{layout}-{self.activation}-{str(self.out_dtype).removeprefix('torch.')}"
        )


@functools.cache
def cases() -> list[Case]:
    """For each choice of the planner and layout the smallest problem that leads to it."""
    found: dict[tuple, Case] = {}
    layouts = itertools.product((False, True), (False, True))
    kinds = (("none", torch.float16), ("none", torch.float32), ("gelu", torch.bfloat16), ("swiglu", torch.bfloat16))
    problems = sorted([*itertools.product(M, N, K), *LONG], key=lambda size: size[0] * size[1] * size[2])
    for (m, n, k), layout, (activation, out), sms, capability in itertools.product(
        problems, list(layouts), kinds, SMS, (90, 80)
    ):
        plan = _host.plan_gemm(m, n, k, m_major_a=layout[0], n_major_b=layout[1], tma_a=m % 8 == 0 or not layout[0],
                               activation=activation, out_bytes=out.itemsize, sm_count=sms, capability=capability)  # fmt: skip
        key = (plan["kernel"], plan["tile"], plan["splits"] > 1, plan["swapped"], layout, activation != "none")
        if plan["kernel"] != "none" and not plan["repacked"] and key not in found:
            found[key] = Case(*key[:4], m, n, k, sms, *layout, activation, out)
    return sorted(found.values(), key=str)


def in_turns() -> Case:
    """The smallest problem of which a block has three tiles, where it shares A with the other block of its cluster, and its two consumers
    hand the tensor cores to each other."""
    for m, n, k in sorted(itertools.product((128, 256, 384), (256, 512, 768, 1024), K), key=math.prod):
        plan = _host.plan_gemm(m, n, k, sm_count=2)
        tile = _host.gemm_candidates()["sm90"][plan["tile"]] if plan["kernel"] == "sm90" else {"pingpong": False}
        if not tile["pingpong"] or tile["cluster_n"] == 1 or plan["swapped"] or plan["splits"] > 1:
            continue
        rows, columns = tile["m"] * tile["cluster_m"], tile["n"] * tile["cluster_n"]
        if -(-m // rows) * -(-n // columns) >= 3:  # for one cluster
            return Case("sm90", plan["tile"], False, False, m, n, k, 2, False, False, "none", torch.float16)
    raise LookupError("the planner takes no turns")


@functools.cache
def copied() -> list[tuple[GemmCase, int, int, tuple[int, ...]]]:
    """Operands that TMA cannot read, one of them or both, because of odd lines or because they begin after an odd element, where the
    planner has them copied: the smallest problem of each kind, the number of SMs, the elements in front and the batch."""
    found: dict[tuple, tuple] = {}
    sizes = sorted(itertools.product((41, 72, 131), (40, 66, 136), (72, 73, 201, 521)), key=math.prod)
    layouts = list(itertools.product((False, True), (False, True)))
    for (m, n, k), kind, layout, offset, sms in itertools.product(sizes, KINDS, layouts, (0, 1), (1, 8)):
        case = GemmCase(kind, m, n, k, *layout)
        request = case.request | ({"tma_a": False, "tma_b": False, "odd_operands": True, "ld_a": 0} if offset else {})
        key = (kind, request["tma_a"], request["tma_b"], offset)
        batch = (3,) if len(found) % 2 else ()
        if key not in found and _host.plan_gemm(**request, batch=math.prod(batch), sm_count=sms)["repacked"]:
            found[key] = (case, sms, offset, batch)
    return list(found.values())


@functools.cache
def phased() -> list[tuple[GemmCase, int, int]]:
    """Odd lines along a long k, which are multiplied in phases: the smallest problem of each kernel and kind, the number of SMs and the
    capability."""
    found: dict[tuple, tuple] = {}
    sizes = sorted(itertools.product((9, 24, 36), (19, 40), (500, 2003, 4001)), key=math.prod)
    for (m, n, k), kind, capability, sms in itertools.product(sizes, ("plain", "fp32", "accumulate"), (90, 80), (2, 8)):
        case = GemmCase(kind, m, n, k, True, True)
        plan = _host.plan_gemm(**case.request, sm_count=sms, capability=capability)
        key = (plan["kernel"], kind, m % 8 == 0)
        if plan["in_phases"] and key not in found:
            found[key] = (case, sms, capability)
    return list(found.values())


@functools.cache
def narrow() -> list[tuple[GemmCase, int]]:
    """An n-major B, or an m-major A that is exchanged for it, in tiles of fewer than 64 columns, the last of which is not full: the
    smallest problem of each tile and kind, and the number of SMs."""
    found: dict[tuple, tuple] = {}
    tiles = _host.gemm_candidates()["sm90"]
    shapes = [(m, n) for few in (8, 24, 40) for m, n in ((few, 200), (200, few), (8, few))]
    problems = sorted(((m, n, k) for m, n in shapes for k in (136, 1096)), key=math.prod)
    for (m, n, k), kind, layout, sms in itertools.product(
        problems, KINDS, ((False, True), (True, True)), (1, 2, 8, 32)
    ):
        case = GemmCase(kind, m, n, k, *layout)
        plan = _host.plan_gemm(**case.request, sm_count=sms)
        columns = tiles[plan["tile"]]["n"] if plan["kernel"] == "sm90" else 64
        wide = case.m if plan["swapped"] else case.n
        key = (columns, kind, plan["swapped"], plan["splits"] > 1)
        if columns < 64 and wide % columns and key not in found and (layout[0] or not plan["swapped"]):
            found[key] = (case, sms)
    return list(found.values())


def check_prefetched(launch, beside: torch.Tensor) -> None:
    """Raises unless TMA has prefetched exactly the boxes of ``beside`` that it loaded. The prefetch changes no result."""
    loaded = {box for box in launch.loaded if box[0].base == beside.data_ptr()}
    if launch.prefetched != loaded:
        wrong = sorted(place for _, place in launch.prefetched ^ loaded)
        raise AssertionError(f"boxes prefetched and not loaded, or loaded and not prefetched: {wrong}")


def integers(generator, *shape) -> torch.Tensor:
    """Products and sums of these are exact in any order."""
    return torch.randint(-2, 3, shape, generator=generator).float()


def operands(case: Case, dtype: torch.dtype, seed: int, draw=integers) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B, on the CPU, as the case lays them."""
    generator = torch.Generator().manual_seed(seed)
    a, b = draw(generator, case.m, case.k).to(dtype), draw(generator, case.k, case.n).to(dtype)
    return a.t().contiguous().t() if case.m_major_a else a, b if case.n_major_b else b.t().contiguous().t()


def run(case: Case, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return raw.gemm(a, b, activation=case.activation, out_dtype=case.out_dtype)
