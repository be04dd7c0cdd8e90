"""Small products that make the planner choose every tile it has a use for, with and without splits and exchanged operands."""

import functools
import itertools
from dataclasses import dataclass

import torch

import amp_kernels as ak
from amp_kernels import _host

M = (8, 33, 96, 176, 256, 384)
N = (32, 64, 96, 136, 160, 192, 200, 256, 512)
K = (64, 128, 256, 1024)
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
    problems = sorted(itertools.product(M, N, K), key=lambda size: size[0] * size[1] * size[2])
    for (m, n, k), layout, (activation, out), sms, capability in itertools.product(
        problems, list(layouts), kinds, SMS, (90, 80)
    ):
        plan = _host.plan_gemm(m, n, k, m_major_a=layout[0], n_major_b=layout[1], activation=activation,
                               out_bytes=out.itemsize, sm_count=sms, capability=capability)  # fmt: skip
        key = (plan["kernel"], plan["tile"], plan["splits"] > 1, plan["swapped"], layout, activation != "none")
        if plan["kernel"] != "none" and key not in found:
            found[key] = Case(*key[:4], m, n, k, sms, *layout, activation, out)
    return sorted(found.values(), key=str)


def integers(generator, *shape) -> torch.Tensor:
    """Products and sums of these are exact in any order."""
    return torch.randint(-2, 3, shape, generator=generator).float()


def operands(case: Case, dtype: torch.dtype, seed: int, draw=integers) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B, on the CPU, as the case lays them."""
    generator = torch.Generator().manual_seed(seed)
    a, b = draw(generator, case.m, case.k).to(dtype), draw(generator, case.k, case.n).to(dtype)
    return a.t().contiguous().t() if case.m_major_a else a, b if case.n_major_b else b.t().contiguous().t()


def run(case: Case, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return ak.ops.gemm.gemm(a, b, activation=case.activation, out_dtype=case.out_dtype)
