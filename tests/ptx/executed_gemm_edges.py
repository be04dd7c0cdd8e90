"""The products as PTX where tiles, or parts of them, lie wholly beside or below the result, also an odd number of tiles across a cluster
of two, and where operands are copied first, because TMA cannot read them, or multiplied in phases that it can: gemm_repack and
gemm_phases. Operands lie among NaN; sums are exact."""

import re

import pytest
import torch

from ..gpu.gemm_cases import GemmCase, small_edges
from ..gpu.test_gemm import check, operands
from .gemm_cases import copied, narrow, phased
from .preloaded import machine, set_chip

machine()
EVERY_RUN = {("below", "fp32"), ("part beside", "plain"), ("beside", "gelu"), ("beside", "dact")}


def edges() -> list:
    """Each way out of a tile; the first of those above in every run, the others with --exhaustive."""
    left, found = set(EVERY_RUN), []
    for edge, (case, sm_count, tile) in small_edges().items():
        key = (edge[0], case.kind)
        marks = [] if key in left else pytest.mark.exhaustive
        left.discard(key)
        name = f"{edge[0].replace(' ', '_')}-{case}"
        found.append(pytest.param(case, sm_count, tile, id=name, marks=marks))
    assert not left
    return found


def executed(
    case: GemmCase,
    dtype: torch.dtype,
    sm_count: int,
    seed: int,
    offset: int = 0,
    batch: tuple[int, ...] = (),
    capability: int = 90,
):
    """Computes and checks the case; the names of the kernels, and the product's launch."""
    it = set_chip(capability, sm_count)
    it.seed = seed
    a, b, exact = operands(case, dtype, offset, batch)
    it.launched.clear()
    check(case, a, b, exact)
    product = next(launch for launch in reversed(it.prepared) if re.search("gemm_sm.0_kernel", launch.kernel.name))
    return list(it.launched), product


@pytest.mark.parametrize(("case", "sm_count", "tile"), edges())
def test_beyond_the_result(case, sm_count, tile, seeds):
    for seed in seeds:
        dtype = (torch.float16, torch.bfloat16)[seed % 2]
        last = executed(case, dtype, sm_count, seed)[1]
        assert last.block == (128 * (1 + tile["consumers"]), 1, 1)
        assert last.cluster == (tile["cluster_m"] * tile["cluster_n"], 1, 1)


def id_of(case: GemmCase, sm_count: int, offset: int, batch: tuple[int, ...]) -> str:
    return f"{case}" + "-offset" * offset + "-batch" * bool(batch)


@pytest.mark.parametrize(
    ("case", "sm_count", "offset", "batch"),
    [
        pytest.param(*problem, id=id_of(*problem), marks=pytest.mark.exhaustive if i % 7 else [])
        for i, problem in enumerate(copied())
    ],
)
def test_operands_that_tma_cannot_read_are_copied(case, sm_count, offset, batch, seeds):
    for seed in seeds:
        dtype = (torch.float16, torch.bfloat16)[seed % 2]
        launched, _ = executed(case, dtype, sm_count, seed, offset, batch)
        first, second = launched[:2]
        assert "gemm_repack_kernel" in first
        assert "gemm_sm90_kernel" in second


@pytest.mark.parametrize(
    ("case", "sm_count"),
    [
        pytest.param(*problem, id=str(problem[0]), marks=pytest.mark.exhaustive if i % 4 else [])
        for i, problem in enumerate(narrow())
    ],
)
def test_n_major_operands_of_narrow_tiles(case, sm_count, seeds):
    for seed in seeds:
        executed(case, (torch.float16, torch.bfloat16)[seed % 2], sm_count, seed)


@pytest.mark.parametrize(("case", "sm_count", "capability"), phased(), ids=str)
def test_odd_lines_along_a_long_k_go_in_phases(case, sm_count, capability, seeds):
    for seed in seeds:
        dtype = (torch.float16, torch.bfloat16)[seed % 2]
        launched, product = executed(case, dtype, sm_count, seed, capability=capability)
        assert product.kernel.name == launched[0]
        assert "gemm_add_phases_kernel" in launched[1]
