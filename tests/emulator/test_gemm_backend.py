"""The GEMM ops on the emulator, through the planner: both kernels, all layouts, alignments and epilogues.

Operands are small integers, so sums are exact and the results are those of the CPU kernels to the bit.
"""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import amp_kernels as ak

from ..gpu.gemm_cases import KINDS, small_edges
from ..helpers.emulator import Launch, launches
from ..ops.raw import gemm, gemm_accumulate_, gemm_dact
from .both import laid

_host = pytest.importorskip("amp_kernels._host", reason="the package was built without pybind11")

ACTIVATIONS = ["none", "relu", "gelu", "gelu_tanh", "silu", "swiglu"]


def integers(generator, shape, dtype, low=-2, high=3):
    return torch.randint(low, high, shape, generator=generator).to(dtype)


HOW = st.sampled_from(["plain", "transposed", "apart", "odd", "strided"])
SIZE = st.one_of(st.sampled_from([1, 8, 16, 64, 72, 128]), st.integers(0, 90))
PROBLEM = st.fixed_dictionaries(
    {
        "m": SIZE,
        "n": SIZE.map(lambda n: n // 2 * 2),
        "k": st.one_of(st.sampled_from([8, 64, 72, 520]), st.integers(0, 80)),
        "batch": st.sampled_from([None, None, 1, 2]),
        "dtype": st.sampled_from([torch.float16, torch.bfloat16]),
        "how": st.tuples(HOW, HOW, HOW),
        "capability": st.sampled_from(["8.0", "9.0", "9.0"]),
        "seed": st.integers(0, 11),
        "sm_count": st.sampled_from([1, 3, 132]),  # with few, small products take large tiles
    }
)


class Problem:
    def __init__(self, m, n, k, batch, dtype, how, capability, seed, sm_count=132):
        self.generator = torch.Generator().manual_seed(seed)
        self.shape = (m, n) if batch is None else (batch, m, n)
        self.dtype, self.how = dtype, how
        front = self.shape[:-2]
        self.a = laid(integers(self.generator, (*front, m, k), dtype), how[0])
        self.b = laid(integers(self.generator, (*front, k, n), dtype), how[1])
        self.environment = {
            "AMP_KERNELS_EMULATE_CAPABILITY": capability,
            "AMP_KERNELS_EMULATE_SEED": str(seed),
            "AMP_KERNELS_EMULATE_SMS": str(sm_count),
        }

    def beside(self, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Eighths, of the result's rows."""
        return laid(integers(self.generator, (*self.shape[:-1], columns), dtype, -16, 17) / 8, self.how[2])

    def assert_same_on_both(self, call):
        """`call()` on the emulator and on the CPU: bits must agree."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.environment.items():
                patch.setenv(name, value)
            with ak.backend("emulate"):
                results = call()
        with ak.backend("cpu"):
            expected = call()
        torch.testing.assert_close([*results], [*expected], rtol=0, atol=0, equal_nan=True, check_stride=True)


@settings(max_examples=60, deadline=None)
@given(
    problem=PROBLEM,
    activation=st.sampled_from(ACTIVATIONS),
    out_dtype=st.sampled_from([None, torch.float32, torch.float16, torch.bfloat16]),
    bias=st.sampled_from([None, "columns", "rows"]),
    residual=st.sampled_from([None, torch.float32, "same"]),
    scale=st.sampled_from([(1.0, 1.0), (0.5, -2.0), (2.0, 0.0)]),
    options=st.tuples(st.booleans(), st.booleans()),
)
def test_forward_of_any_problem(problem, activation, out_dtype, bias, residual, scale, options):
    p = Problem(**problem)
    keep_z, batch_invariant = options
    m, n = p.shape[-2:]
    kwargs = {"alpha": scale[0], "beta": scale[1], "activation": activation, "out_dtype": out_dtype}
    if bias is not None:
        shape = (n,) if bias == "columns" else (m, 1)
        kwargs["bias"] = integers(p.generator, shape, torch.float32) / 4
    if residual is not None:
        columns = n // 2 if activation == "swiglu" else n
        kwargs["residual"] = p.beside(columns, p.dtype if residual == "same" else residual)
    if keep_z:
        p.assert_same_on_both(lambda: gemm(p.a, p.b, **kwargs, batch_invariant=batch_invariant, preact=True))
    else:
        p.assert_same_on_both(lambda: [gemm(p.a, p.b, **kwargs, batch_invariant=batch_invariant)])


def calls(p: Problem) -> dict:
    """For each kind of GemmCase what it computes."""
    n = p.shape[-1]
    bias = integers(p.generator, (n,), torch.float32)
    start, z = p.beside(n, torch.float32), p.beside(n, p.dtype)
    return {
        "plain": lambda: [gemm(p.a, p.b)],
        "fp32": lambda: [gemm(p.a, p.b, out_dtype=torch.float32)],
        "accumulate": lambda: [gemm_accumulate_(start.clone(), p.a, p.b)],
        "gelu": lambda: gemm(p.a, p.b, bias, activation="gelu", preact=True),
        "swiglu": lambda: gemm(p.a, p.b, bias, activation="swiglu", preact=True),
        "dact": lambda: gemm_dact(p.a, p.b, z, activation="relu", bias_grad=True),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_beyond_c(kind):
    """Tiles, and parts of them, that lie wholly beside or below C."""
    places = {"beside", "below"} | ({"part beside"} if kind in ("plain", "fp32", "accumulate") else set())
    of_kind = {edge: problem for edge, problem in small_edges().items() if problem[0].kind == kind}
    assert {edge[0] for edge in of_kind} == places
    for seed, (case, sm_count, tile) in enumerate(of_kind.values()):
        rows, columns = "apart", "transposed apart"  # as case.request has it
        how = (columns if case.m_major_a else rows, rows if case.n_major_b else columns, "plain")
        p = Problem(case.m, case.n, case.k, None, torch.bfloat16, how, "9.0", seed, sm_count)
        p.assert_same_on_both(calls(p)[kind])
        (launch,) = (launch for launch in launches() if launch.name == "gemm_sm90")
        assert (launch.block, launch.cluster) == (128 * (1 + tile["consumers"]), tile["cluster_m"] * tile["cluster_n"])


def launch_of(a: torch.Tensor, b: torch.Tensor, **options) -> Launch:
    """The launch of the product, on the emulator."""
    with ak.backend("emulate"):
        gemm(a, b, **options)
    *copies, launch = launches()
    assert [copy.name for copy in copies] in ([], ["gemm_repack"])
    return launch


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("m", "n", "k"), [(64, 64, 64), (8, 512, 4096), (16, 16, 8192), (9, 9, 9), (300, 260, 72)])
def test_the_planned_kernel_is_launched(m, n, k, capability, monkeypatch):
    monkeypatch.setenv("AMP_KERNELS_EMULATE_CAPABILITY", f"{capability // 10}.{capability % 10}")
    launch = launch_of(torch.zeros(m, k).bfloat16(), torch.zeros(n, k).bfloat16().T)
    aligned = k % 8 == 0
    plan = _host.plan_gemm(
        m, n, k, tma_a=aligned, tma_b=aligned, odd_operands=k % 2 == 1, tma_output=n % 8 == 0, capability=capability
    )
    assert launch.name == f"gemm_{plan['kernel']}"
    rows, columns = (n, m) if plan["swapped"] else (m, n)
    tile = _host.gemm_candidates()[plan["kernel"]][plan["tile"]]
    work = -(-rows // tile["m"]) * -(-columns // tile["n"]) * plan["splits"]
    if plan["kernel"] == "sm90":
        assert launch.block == 128 * (1 + tile["consumers"])
        assert launch.cluster == tile["cluster_m"] * tile["cluster_n"]
        assert launch.grid % launch.cluster == 0
        assert launch.grid <= max(work, launch.cluster)
    else:
        assert launch.grid == work


def test_a_lone_row_takes_the_kernel_of_many():
    """A single row has no distance to the next one, so TMA could take it where it cannot take its company, which is copied."""
    b = torch.zeros(100, 64, dtype=torch.bfloat16)
    for batch_invariant, kernels in ((True, ["gemm_sm90"] * 2), (False, ["gemm_sm90", "gemm_sm80"])):
        rows = [torch.zeros(m, 100).bfloat16() for m in (1, 5)]
        names = [launch_of(a, b, batch_invariant=batch_invariant).name for a in rows]
        assert names == kernels


def test_a_lone_row_takes_the_kernel_of_many_also_beside_one_residual_for_all():
    """The stride of one row is its length; that of many that share it is 0, which TMA does not take."""
    b, residual = torch.zeros(333, 512, dtype=torch.bfloat16).mT.contiguous().mT, torch.zeros(512, dtype=torch.bfloat16)
    rows = [torch.zeros(m, 333).bfloat16() for m in (1, 64)]
    launched = [launch_of(a, b, residual=residual.expand(len(a), 512), batch_invariant=True) for a in rows]
    assert launched[0].name == launched[1].name


def test_a_lone_row_is_that_of_many_that_are_copied():
    a, b = torch.randn(5, 260).bfloat16(), torch.randn(260, 1024).bfloat16()
    got, copied = [], []
    with ak.backend("emulate"):
        for first, last in ((0, 5), (0, 1), (3, 4)):
            got += gemm(a[first:last], b, batch_invariant=True).unsqueeze(0)
            copied.append([launch.name for launch in launches()])
    # One begins at 16 bytes.
    assert copied == [["gemm_repack", "gemm_sm90"], ["gemm_sm90"], ["gemm_repack", "gemm_sm90"]]
    assert torch.equal(got[1][0], got[0][0])
    assert torch.equal(got[2][0], got[0][3])


UNALIGNED = [
    *itertools.product([("plain", "plain"), ("plain", "transposed"), ("odd", "plain")], [None, 2]),
    (("transposed", "plain"), 2),
    (("transposed", "odd"), None),  # plain, it would go in phases
]


@pytest.mark.parametrize(("how", "batch"), UNALIGNED, ids=str)
def test_unaligned_operands_are_copied(how, batch):
    problem = Problem(41, 67, 1097, batch, torch.bfloat16, (*how, "plain"), "9.0", 3)
    bias = integers(problem.generator, (67,), torch.float32)
    start = problem.beside(67, torch.float32)
    problem.assert_same_on_both(lambda: [gemm(problem.a, problem.b, alpha=0.5)])
    assert [launch.name for launch in launches()] == ["gemm_repack", "gemm_sm90"]
    problem.assert_same_on_both(
        lambda: [gemm(problem.a, problem.b, bias=bias, activation="relu", out_dtype=torch.float32)]
    )
    problem.assert_same_on_both(lambda: [gemm_accumulate_(start.clone(), problem.a, problem.b)])


@pytest.mark.parametrize(("capability", "k", "sm_count"), [("9.0", 4001, 4), ("9.0", 500, 8), ("8.0", 500, 2)], ids=str)
def test_odd_lines_along_a_long_k_go_in_phases(capability, k, sm_count):
    problem = Problem(9, 19, k, None, torch.bfloat16, ("transposed", "plain", "plain"), capability, 3, sm_count)
    start = problem.beside(19, torch.float32)
    product = "gemm_sm90" if capability == "9.0" and k > 4000 else "gemm_sm80"
    for call in (
        lambda: [gemm(problem.a, problem.b, alpha=0.5)],
        lambda: [gemm(problem.a, problem.b, out_dtype=torch.float32)],
        lambda: [gemm_accumulate_(start.clone(), problem.a, problem.b)],
    ):
        problem.assert_same_on_both(call)
        assert [launch.name for launch in launches()] == [product, "gemm_add_phases"]
    bias = integers(problem.generator, (19,), torch.float32)
    problem.assert_same_on_both(lambda: [gemm(problem.a, problem.b, bias=bias)])
    assert "gemm_add_phases" not in [launch.name for launch in launches()]


def test_lines_that_overlap_are_copied():
    """Windows over one row: a tensor map's lines may not overlap."""
    row = torch.arange(96.0).bfloat16()
    windows = row.as_strided((5, 64), (8, 1))
    with ak.backend("emulate"):
        got = gemm(windows, torch.eye(64).bfloat16())
    assert torch.equal(got, windows)
