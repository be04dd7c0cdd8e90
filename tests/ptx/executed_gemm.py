"""The products as PTX: every tile that the planner chooses for some small problem, in all layouts. With small integers every order of
additions gives the same sum, so that the results are those of the CPU to the bit."""

import pytest
import torch

import amp_kernels as ak
from amp_kernels import _host
from amp_kernels._dispatch.library import REGISTRY
from amp_kernels.cli.check import check_backend

from ..ops import raw
from .gemm_cases import cases, check_prefetched, in_turns, integers, operands, run
from .preloaded import machine, set_chip

machine()
DTYPES = (torch.float16, torch.bfloat16)


def chosen() -> list:
    """Each choice of the planner once, in another layout each; the others with --exhaustive."""
    groups: dict[tuple, list] = {}
    for case in cases():
        groups.setdefault((case.kernel, case.tile, case.splits, case.swapped), []).append(case)
    sampled = {group[i % len(group)] for i, group in enumerate(groups.values())}
    return [pytest.param(c, id=str(c), marks=[] if c in sampled else pytest.mark.exhaustive) for c in cases()]


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


@pytest.mark.parametrize(("along", "shared"), [("cluster_m", "B"), ("cluster_n", "A")])
def test_the_blocks_of_a_cluster_share_an_operand(along, shared, seeds):
    """Each of two loads half of it for both. If it is A, the consumers of a block take tiles in turn."""
    tiles = _host.gemm_candidates()["sm90"]
    clusters = (c for c in cases() if c.kernel == "sm90" and tiles[c.tile][along] == 2 and c.activation == "none")
    case = in_turns() if shared == "A" else next(clusters)
    for seed in seeds:
        it = set_chip(90, case.sm_count)
        it.seed = seed
        a, b = operands(case, torch.float16, seed)
        got = run(case, a.cuda(), b.cuda()).cpu()
        launch = it.prepared[-1]
        assert launch.cluster == (2, 1, 1)
        opcodes = {instruction.op for instruction in launch.kernel.code}
        assert any("multicast" in op for op in opcodes)
        assert ("bar.arrive" in opcodes) == tiles[case.tile]["pingpong"] == (shared == "A")
        with ak.backend("cpu"):
            assert torch.equal(got, run(case, a, b))


def test_the_planner_has_a_use_for_most_tiles():
    """Otherwise the problems above are too small to run what the package ships."""
    tiles = {case.tile for case in cases() if case.kernel == "sm90"}
    assert len(tiles) >= len(_host.gemm_candidates()["sm90"]) - 2, sorted(tiles)
    assert {case.kernel for case in cases()} == {"sm80", "sm90"}
    assert {case.kernel for case in cases() if case.splits} == {"sm80", "sm90"}
    assert any(case.swapped for case in cases())


@pytest.mark.parametrize("capability", [90, *(pytest.param(c, marks=pytest.mark.exhaustive) for c in (80, 120))])
@pytest.mark.parametrize(
    "op",
    [op for op in REGISTRY.values() if op.family in ("gemm", "grouped_gemm", "segmented_gemm")],
    ids=lambda op: op.name,
)
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


def read_beside(kind: str):
    """A product whose epilogue reads boxes of a tensor beside C, and that tensor."""
    generator = torch.Generator().manual_seed(5)
    a, b = integers(generator, 72, 64).half().cuda(), integers(generator, 64, 200).half().cuda()
    if kind == "derivative":
        beside = integers(generator, 72, 200).half().cuda()
        return lambda: raw.gemm_dact(a, b, beside, activation="relu"), beside
    if kind == "swiglu's derivative":
        beside = integers(generator, 72, 400).half().cuda()
        return lambda: raw.gemm_dact(a, b, beside, activation="swiglu"), beside
    if kind == "a batch":
        a, b = a.expand(2, 72, 64), b.expand(2, 64, 200)
    beside = integers(generator, *a.shape[:-1], 200).half().cuda()
    return lambda: raw.gemm(a, b, residual=beside), beside


@pytest.mark.parametrize("kind", ["a residual", "a batch", "derivative", "swiglu's derivative"])
def test_operands_of_the_epilogue_are_prefetched(kind, seeds):
    """Each box that it loads, with the same coordinates, and nothing else."""
    for seed in seeds:
        it = set_chip(90, 1)
        it.seed = seed
        compute, beside = read_beside(kind)
        compute()
        product = next(launch for launch in reversed(it.recent) if "gemm_sm90_kernel" in launch.kernel.name)
        assert product.prefetched
        check_prefetched(product, beside)


@pytest.mark.parametrize(
    ("chip", "tile", "n", "batch", "sm_count", "by_columns"),
    [
        (90, (128, 128), 200, 2, 1, False),
        (90, (256, 160), 200, 1, 1, False),
        (90, (128, 208), 392, 1, 4, False),
        (90, (128, 144), 136, 1, 3, False),
        (90, (64, 128), 136, 1, 4, False),
        (90, (64, 80), 72, 1, 4, False),
        (90, (128, 128), 136, 2, 2, True),
        (90, (64, 128), 136, 2, 4, True),
        (80, (64, 64), 136, 2, 2, False),
    ],
)
def test_symmetric_products(chip, tile, n, batch, sm_count, by_columns, seeds):
    """In every tile; the operands differ, so every element says which triangle it was computed in."""
    syrk = REGISTRY["syrk"]
    generator = torch.Generator().manual_seed(chip)
    a, b = (torch.randint(-2, 3, (batch, 72, n), generator=generator).half() for _ in range(2))
    a, b = (t if by_columns else t.contiguous() for t in (a.mT, b.mT))
    c = torch.randint(-2, 3, (batch, n, n), generator=generator).half()
    options = {"alpha": 0.5, "beta": -2.0, "diagonal": 3.0}
    with ak.backend("cpu"):
        want = syrk(a, b, c, **options)
    for seed in seeds:
        it = set_chip(chip, sm_count)
        it.seed = seed
        it.launched.clear()
        got = syrk(a.cuda(), b.cuda(), c.cuda(), **options).cpu()
        kernel = f"gemm_sm{chip}_kernel"
        assert any(kernel in name and "ILi{}ELi{}E".format(*tile) in name for name in it.launched)
        assert torch.equal(got, want)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("sizes", [(64, 128), (128, 64, 64)])
def test_segments(sizes, dim, seeds):
    """Each box comes from the matrix that it lies in: only these, and all of them, are read."""
    generator = torch.Generator().manual_seed(dim)
    parts = [integers(generator, 72, size).half() for size in sizes]
    b = integers(generator, 72 if dim == 0 else sum(sizes), 64).half()
    with ak.backend("cpu"):
        want = REGISTRY["gemm"](torch.cat(parts, 1).t() if dim == 0 else torch.cat(parts, 1), b)[0]
    for seed in seeds:
        it = set_chip(90, 2)
        it.seed = seed
        on_gpu = [part.cuda() for part in parts]
        got = REGISTRY["segmented_gemm"]([t.t() for t in on_gpu] if dim == 0 else on_gpu, b.cuda(), dim=dim)
        product = next(launch for launch in reversed(it.recent) if "gemm_sm90_kernel" in launch.kernel.name)
        bases = {box[0].base for box in product.loaded}
        assert {part.data_ptr() for part in on_gpu} < bases
        assert len(bases) == len(parts) + 1
        assert torch.equal(got.cpu(), want)
