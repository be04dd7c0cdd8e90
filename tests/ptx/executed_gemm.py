"""The products as PTX: every tile that the planner chooses for some small problem, in all layouts. With small integers every order of
additions gives the same sum, so that the results are those of the CPU to the bit."""

import pytest
import torch

import amp_kernels as ak
from amp_kernels import _host
from amp_kernels._dispatch.library import REGISTRY
from amp_kernels.testing.backends import check_backend

from .gemm_cases import cases, operands, run
from .preloaded import machine, set_chip

machine()
DTYPES = (torch.float16, torch.bfloat16)


def chosen() -> list:
    """Each choice of the planner once, in another layout each; the others with --exhaustive."""
    seen, marked = {}, []
    for case in cases():
        key = (case.kernel, case.tile, case.splits, case.swapped)
        number = seen[key] = seen.get(key, -1) + 1
        sampled = number == len(seen) % 4
        marked.append(pytest.param(case, id=str(case), marks=[] if sampled else pytest.mark.exhaustive))
    return marked


@pytest.mark.parametrize("case", chosen())
def test_exact(case, seeds):
    for seed in seeds:
        dtype = DTYPES[(seed + case.tile) % 2]
        it = set_chip(90 if case.kernel == "sm90" else 80, case.sm_count)
        it.seed = seed
        it.launched.clear()
        a, b = operands(case, dtype, seed)
        got = run(case, a.cuda(), b.cuda()).cpu()
        assert any(f"gemm_{case.kernel}_kernel" in name for name in it.launched)
        with ak.backend("cpu"):
            want = run(case, a, b)
        torch.testing.assert_close(got, want, rtol=0, atol=0, msg=lambda text, seed=seed: f"seed {seed}: {text}")


def test_the_planner_has_a_use_for_most_tiles():
    """Otherwise the problems above are too small to run what the package ships."""
    tiles = {case.tile for case in cases() if case.kernel == "sm90"}
    assert len(tiles) >= len(_host.gemm_candidates()["sm90"]) - 2, sorted(tiles)
    assert {case.kernel for case in cases()} == {"sm80", "sm90"}
    assert any(case.splits for case in cases())
    assert any(case.swapped for case in cases())


@pytest.mark.parametrize("capability", [90, *(pytest.param(c, marks=pytest.mark.exhaustive) for c in (80, 120))])
@pytest.mark.parametrize("op", [op for op in REGISTRY.values() if op.family == "gemm"], ids=lambda op: op.name)
def test_samples(op, capability, seeds):
    for seed in seeds:
        set_chip(capability, 2).seed = seed
        assert check_backend(op, "cuda", "cuda") > 10


@pytest.mark.parametrize("truncate", [False, True], ids=["rounded", "truncated"])
@pytest.mark.parametrize("kernel", ["sm80", "sm90"])
def test_real_values(kernel, truncate):
    """Within the bound of fp32 sums; truncating tensor cores lose up to a bit more at each step (interpreter/instructions/matrix.py)."""
    case = next(c for c in cases() if c.kernel == kernel and c.activation == "none")
    it = set_chip(int(kernel[2:]), case.sm_count)
    it.seed = 0
    it.device.truncate = truncate
    try:
        a, b = operands(case, torch.float16, 3, lambda generator, *shape: torch.randn(shape, generator=generator))
        got = run(case, a.cuda(), b.cuda()).cpu().double()
    finally:
        it.device.truncate = False
    exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    error = (got - exact).abs()
    steps = case.k / 8
    rounded = exact.abs() * torch.finfo(case.out_dtype).eps / 2
    assert (error <= rounded + size * steps * 2.0 ** (-22 if truncate else -24)).all()
    assert error.max() > 0
